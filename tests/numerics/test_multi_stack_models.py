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

EXHAUSTIVE = pytest.mark.exhaustive
ENCODER_DECODER = "t5"
CAPTIONER = "blip2_t5"
for_each_family = pytest.mark.parametrize("family", [ENCODER_DECODER, BLIP2, CAPTIONER])
TESTED_STRATEGIES = (
    *("ddp", "fsdp", "fsdp_offload", "fsdp_zero2", "fsdp_zero1", "hsdp"),
    *("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"),
)
CI_CASE = (BLIP2, "fsdp")
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
    actual_logits = stack.logits(actual, batch)
    torch.testing.assert_close(
        actual_logits, stack.transformers_logits(peer, batch), rtol=1e-5, atol=1e-5
    )
    loss = sum_over_tokens(run.objective, logits, batch["labels"]) / (batch["labels"] != -100).sum()
    expected = peer(**stack.transformers_inputs(batch)).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    peer_parameters = dict(peer.named_parameters())
    assert {actual.hf_name(name) for name, _ in actual.named_parameters()} == {*peer_parameters}
    for name, parameter in actual.named_parameters():
        expected_gradient = peer_parameters[actual.hf_name(name)].grad
        atol = 1e-5 * max(float(expected_gradient.abs().max()), stack.gradient_noise)
        torch.testing.assert_close(parameter.grad, expected_gradient, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    ("family", "layers", "first_layers"),
    [
        (ENCODER_DECODER, 8, (0, 4)),
        (BLIP2, 12, (0, 4, 8)),
        (CAPTIONER, 16, (0, 4, 8, 12)),
    ],
)
def test_multi_stack_random_init_respects_depth(
    family: str, layers: int, first_layers: tuple[int, ...], multi_stack_model: Stack
) -> None:
    spec = HuggingFaceConfig(
        path=str(multi_stack_model(family).folder), init=InitKind.random, depth=4
    )
    assert (spec.layers, spec.info.stack_starts) == (layers, first_layers)
    first_parameters, second_parameters = (
        dict(build_model(spec, 7).named_parameters()) for _ in range(2)
    )
    torch.testing.assert_close(first_parameters, second_parameters, rtol=0, atol=0)


@EXHAUSTIVE
@for_each_family
def test_multi_stack_training_equals_a_plain_transformers_loop(
    family: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    stack = multi_stack_model(family)
    actual_run = stack.train_on_one_device(run_job, "optimizer.weight_decay=0")
    model, losses = stack.transformers_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for batch in stack.batches(3):
        loss = model(**stack.transformers_inputs(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert actual_run.column("train/loss") == pytest.approx(losses, rel=1e-5)
    to = actual_run.path / "exported"
    exports.write_export(load_trained(actual_run.path), to, AdapterExport.merged)
    assert_tensors_close(stack.transformers_model(to).state_dict(), model.state_dict(), "weights")


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(family, strategy, marks=() if (family, strategy) == CI_CASE else EXHAUSTIVE)
        for family in (ENCODER_DECODER, "t5_gated", BLIP2, CAPTIONER)
        for strategy in TESTED_STRATEGIES
    ],
)
def test_multi_stack_under_each_strategy_equals_one_device(
    family: str, strategy: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    stack, strategy_overrides = multi_stack_model(family), STRATEGIES[strategy]
    ranks = stack.compose(*strategy_overrides).parallelism.data_parallel_size
    micro_batch = f"trainer.micro_batch={12 // ranks // 3}"
    assert_same_training(
        run_job.without_defaults(*stack.overrides(*strategy_overrides, micro_batch)),
        stack.train_on_one_device(run_job),
    )


OPTIONS = {
    "accumulated": ("trainer.micro_batch=4",),
    "checkpoint_full": ("memory=checkpoint_full",),
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "checkpoint_every_n": ("memory=checkpoint_every_n", "memory.every=2"),
}


@EXHAUSTIVE
@for_each_family
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("mode", [*OPTIONS])
def test_multi_stack_memory_options_change_no_step(
    mode: str, strategy: str, family: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    stack = multi_stack_model(family)
    strategy_overrides = (f"parallelism={strategy}", "trainer.micro_batch=6", *OPTIONS[mode])
    assert_same_training(
        run_job.without_defaults(*stack.overrides(*strategy_overrides)),
        stack.train_on_one_device(run_job),
    )


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        (ENCODER_DECODER, LORA),
        (ENCODER_DECODER, ("adapter=ia3",)),
        (BLIP2, LORA),
        (CAPTIONER, LORA),
        *((family, (*LORA, "quantization=nf4")) for family in (ENCODER_DECODER, BLIP2, CAPTIONER)),
    ],
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
    actual_run = run_job.without_defaults(
        *stack.overrides(*adapter, *STRATEGIES[strategy], "trainer.micro_batch=3")
    )
    assert_same_training(actual_run, stack.train_on_one_device(run_job, *adapter))


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # from PEFT internals
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


@EXHAUSTIVE
@for_each_family
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # from PEFT internals
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
    actual_run = run_job.without_defaults(*stack.overrides(*sharded))
    trained_run = load_trained(actual_run.path)
    (batch,) = stack.batches(1)
    with torch.no_grad():
        logits = stack.logits(load_model(trained_run, torch.device("cpu")), batch)
        assert not torch.equal(logits, stack.transformers_logits(stack.transformers_model(), batch))
    to, adapter_folder = actual_run.path / "exported", actual_run.path / "adapter"
    exports.write_export(trained_run, to, AdapterExport.merged)
    models = [stack.transformers_model(to)]
    if more:
        exports.write_export(trained_run, adapter_folder, AdapterExport.alone)
        base = stack.transformers_model(
            adapter_folder / "base" if "model.init=random" in more else None
        )
        models.append(PeftModel.from_pretrained(base, adapter_folder))
        task_type = None if stack.reads_images else "SEQ_2_SEQ_LM"
        assert models[-1].active_peft_config.task_type == task_type
    for model in models:
        with torch.no_grad():
            expected = stack.transformers_logits(model.eval(), batch)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    resumed_run = run_job.without_defaults(
        *stack.overrides(*more, "trainer.micro_batch=12"), resume=actual_run.checkpoint(2)
    )
    assert_tensors_close(resumed_run.weights(), actual_run.weights(), "weights after step 2")


PLANNED_OPTIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("memory=checkpoint_full",),
    LORA,
    ("trainer.global_batch=16",),
    ("parallelism=fsdp", "trainer.micro_batch=4"),
    ("parallelism=fsdp", "trainer.micro_batch=4", "memory=checkpoint_full"),
    ("parallelism=fsdp", "trainer.micro_batch=4", *LORA),
    ("parallelism=hsdp", "parallelism.shards=2", "trainer.micro_batch=2"),
)


@EXHAUSTIVE
@pytest.mark.parametrize("family", [ENCODER_DECODER, "t5_gated", BLIP2, CAPTIONER])
@pytest.mark.parametrize("extra_overrides", PLANNED_OPTIONS, ids=str)
def test_multi_stack_peak_memory_equals_trace(
    extra_overrides: tuple[str, ...], family: str, multi_stack_model: Stack, run_job: JobRunner
) -> None:
    overrides = (*multi_stack_model(family).memory_overrides, *extra_overrides)
    run = compose(overrides)
    assert rejection_reason(run) is None
    predicted = trace_run(run, full_depth=True).peak
    peak_bytes = run_job.without_defaults(*overrides).summary["metrics"]["memory/peak_bytes"]
    print(f"{family} {' '.join(extra_overrides)}: {predicted / peak_bytes - 1:+.2%}")
    assert abs(predicted / peak_bytes - 1) < 0.02
