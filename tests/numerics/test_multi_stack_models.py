"""Models of several stacks: transformers as the reference, every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.job_runner import JobRunner
from fixtures.multi_stack_models import BLIP2, MULTI_STACK_MODELS, MultiStackModel
from fixtures.reference_runs import assert_same_training, assert_tensors_close
from fixtures.strategies import STRATEGIES
from peft import LoraConfig, PeftModel, get_peft_model

from scalewise import compose
from scalewise.checkpoints.trained_run import load_model
from scalewise.commands.run_arguments import load_trained
from scalewise.export import AdapterExport
from scalewise.export import hf_export as exports
from scalewise.models.build import build_model
from scalewise.models.hf.config import HuggingFaceConfig, InitKind
from scalewise.objectives.losses import sum_over_tokens
from scalewise.tracing.step_trace import rejection_reason, trace_run

LONG = pytest.mark.exhaustive
ENCODER = "t5"
TOLD = "blip2_t5"
EACH = pytest.mark.parametrize("family", [ENCODER, BLIP2, TOLD])
TAKEN = ("ddp", "fsdp", "fsdp_offload", "fsdp_zero2", "fsdp_kept", "hsdp")
USUAL = (BLIP2, "fsdp")
LORA = ("adapter=lora", "adapter.rank=4")

Stack = Callable[[str], MultiStackModel]


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("stacks"), shared_cache)


@pytest.mark.parametrize("family", MULTI_STACK_MODELS)
def test_multi_stack_loss_and_gradients_equal_transformers(
    family: str, multi_stack_model: Stack
) -> None:
    stack = multi_stack_model(family)
    spec, peer, run = (
        HuggingFaceConfig(path=str(stack.folder)),
        stack.transformers_model(),
        stack.compose(),
    )
    assert [*spec.validate()] == []
    assert spec.num_parameters == peer.num_parameters()
    actual, (batch,) = build_model(spec, 1), [*stack.batches(1)]
    logits = actual(batch["inputs"], batch["labels"])
    compared = stack.logits(actual, batch)
    torch.testing.assert_close(
        compared, stack.transformers_logits(peer, batch), rtol=1e-5, atol=1e-5
    )
    loss = sum_over_tokens(run.objective, logits, batch["labels"]) / (batch["labels"] != -100).sum()
    expected = peer(**stack.transformers_inputs(batch)).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    own = dict(peer.named_parameters())
    assert {actual.hf_name(name) for name, _ in actual.named_parameters()} == {*own}
    for name, parameter in actual.named_parameters():
        want = own[actual.hf_name(name)].grad
        atol = 1e-5 * max(float(want.abs().max()), stack.gradient_noise)
        torch.testing.assert_close(parameter.grad, want, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    ("family", "layers", "starts"),
    [
        (ENCODER, 8, (0, 4)),
        (BLIP2, 12, (0, 4, 8)),
        (TOLD, 16, (0, 4, 8, 12)),
    ],
)
def test_multi_stack_random_init_respects_depth(
    family: str, layers: int, starts: tuple[int, ...], multi_stack_model: Stack
) -> None:
    spec = HuggingFaceConfig(
        path=str(multi_stack_model(family).folder), init=InitKind.random, depth=4
    )
    assert (spec.layers, spec.info.stack_starts) == (layers, starts)
    one, other = (dict(build_model(spec, 7).named_parameters()) for _ in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@LONG
@EACH
def test_multi_stack_training_equals_a_plain_transformers_loop(
    family: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    stack = multi_stack_model(family)
    found = stack.train_on_one_device(run_job, "optimizer.weight_decay=0")
    model, losses = stack.transformers_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for batch in stack.batches(3):
        loss = model(**stack.transformers_inputs(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert found.column("train/loss") == pytest.approx(losses, rel=1e-5)
    to = found.path / "exported"
    exports.write_export(load_trained(found.path), to, AdapterExport.merged)
    assert_tensors_close(stack.transformers_model(to).state_dict(), model.state_dict(), "weights")


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(family, strategy, marks=() if (family, strategy) == USUAL else LONG)
        for family in (ENCODER, "t5_gated", BLIP2, TOLD)
        for strategy in TAKEN
    ],
)
def test_multi_stack_under_each_strategy_equals_one_device(
    family: str, strategy: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    stack, parts = multi_stack_model(family), STRATEGIES[strategy]
    ranks = stack.compose(*parts).parallelism.data_parallel_size
    micro_batch = f"trainer.micro_batch={12 // ranks // 3}"
    assert_same_training(
        run_job.without_defaults(*stack.overrides(*parts, micro_batch)),
        stack.train_on_one_device(run_job),
    )


WAYS = {
    "accumulated": ("trainer.micro_batch=4",),
    "checkpoint_full": ("memory=checkpoint_full",),
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "checkpoint_every_n": ("memory=checkpoint_every_n", "memory.every=2"),
}


@LONG
@EACH
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("mode", [*WAYS])
def test_multi_stack_memory_options_change_no_step(
    mode: str, strategy: str, family: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    stack = multi_stack_model(family)
    parts = (f"parallelism={strategy}", "trainer.micro_batch=6", *WAYS[mode])
    assert_same_training(
        run_job.without_defaults(*stack.overrides(*parts)), stack.train_on_one_device(run_job)
    )


@LONG
@pytest.mark.parametrize(
    ("family", "adapter"),
    [(ENCODER, LORA), (ENCODER, ("adapter=ia3",)), (BLIP2, LORA), (TOLD, LORA)],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_multi_stack_adapter_equals_one_device(
    strategy: str,
    family: str,
    adapter: tuple[str, ...],
    multi_stack_model: Stack,
    run_job: JobRunner,
) -> None:
    stack = multi_stack_model(family)
    found = run_job.without_defaults(
        *stack.overrides(*adapter, *STRATEGIES[strategy], "trainer.micro_batch=3")
    )
    assert_same_training(found, stack.train_on_one_device(run_job, *adapter))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own use
@pytest.mark.parametrize("family", MULTI_STACK_MODELS)
def test_multi_stack_lora_modules_equal_peft(family: str, multi_stack_model: Stack) -> None:
    stack = multi_stack_model(family)
    run, peer = (
        stack.compose("adapter=lora"),
        get_peft_model(stack.transformers_model(), LoraConfig(r=8)),
    )
    expected = {name for name, parameter in peer.named_parameters() if parameter.requires_grad}
    assert isinstance(run.model, HuggingFaceConfig)
    module = build_model(run.model, 1)
    actual = [weight.name for weight in run.weight_census() if weight.trainable]
    assert {f"base_model.model.{module.hf_name(name)}" for name in actual} == expected
    assert len(actual) == len(expected) > 0


@LONG
@EACH
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own use
@pytest.mark.parametrize(
    "more",
    [(), LORA, ("adapter=ia3",), ("adapter=dora",), (*LORA, "model.init=random")],
    ids=str,
)
def test_multi_stack_run_evaluates_exports_and_resumes(
    more: tuple[str, ...], family: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    stack = multi_stack_model(family)
    sharded = (*STRATEGIES["fsdp"], *more, "trainer.micro_batch=6", "checkpoint.every=2")
    found = run_job.without_defaults(*stack.overrides(*sharded))
    trained = load_trained(found.path)
    (batch,) = stack.batches(1)
    with torch.no_grad():
        logits = stack.logits(load_model(trained, torch.device("cpu")), batch)
        assert not torch.equal(logits, stack.transformers_logits(stack.transformers_model(), batch))
    to, alone = found.path / "exported", found.path / "adapter"
    exports.write_export(trained, to, AdapterExport.merged)
    models = [stack.transformers_model(to)]
    if more:
        exports.write_export(trained, alone, AdapterExport.alone)
        base = stack.transformers_model(alone / "base" if "model.init=random" in more else None)
        models.append(PeftModel.from_pretrained(base, alone))
        asked = None if stack.reads_images else "SEQ_2_SEQ_LM"
        assert models[-1].active_peft_config.task_type == asked
    for model in models:
        with torch.no_grad():
            expected = stack.transformers_logits(model.eval(), batch)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    again = run_job.without_defaults(
        *stack.overrides(*more, "trainer.micro_batch=12"), resume=found.checkpoint(2)
    )
    assert_tensors_close(again.weights(), found.weights(), "weights after step 2")


PLANNED: tuple[tuple[str, ...], ...] = (
    (),
    ("memory=checkpoint_full",),
    LORA,
    ("trainer.global_batch=16",),
    ("parallelism=fsdp", "trainer.micro_batch=4"),
    ("parallelism=fsdp", "trainer.micro_batch=4", "memory=checkpoint_full"),
    ("parallelism=fsdp", "trainer.micro_batch=4", *LORA),
    ("parallelism=hsdp", "parallelism.shards=2", "trainer.micro_batch=2"),
)


@LONG
@pytest.mark.parametrize("family", [ENCODER, "t5_gated", BLIP2, TOLD])
@pytest.mark.parametrize("further", PLANNED, ids=str)
def test_multi_stack_peak_memory_equals_trace(
    further: tuple[str, ...], family: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    overrides = (*multi_stack_model(family).memory_overrides, *further)
    run = compose(overrides)
    assert rejection_reason(run) is None
    predicted = trace_run(run, full_depth=True).peak
    found = run_job.without_defaults(*overrides).summary["metrics"]["memory/peak_bytes"]
    print(f"{family} {' '.join(further)}: {predicted / found - 1:+.2%}")
    assert abs(predicted / found - 1) < 0.02
