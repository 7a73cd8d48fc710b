"""Encoders with decoders: transformers' logits, losses and gradients, and steps in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import ENCODING, Checkpoints
from fixtures.doors import Folder
from fixtures.jobs import Job
from fixtures.layouts import LAYOUTS
from fixtures.steps import SGD, assert_close, assert_equal
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM

from scalewise import compose
from scalewise.data.loader import Batch, Loader, Share
from scalewise.evaluation import held_out, live
from scalewise.evaluation.generation import answered
from scalewise.exports import Form
from scalewise.exports import folder as exports
from scalewise.models.hf.spec import HuggingFace, Init
from scalewise.training.trace import refusal, traced
from scalewise.verbs.trained import recorded

LONG = pytest.mark.exhaustive
FAMILY = "t5"
DATA = ("data=synthetic", "data.sequence=24", "data.target_length=8", "data.masked=0.3")
TAKEN = ("ddp", "fsdp", "fsdp_offload", "fsdp_zero2", "fsdp_kept", "hsdp")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Job:
    return Job(tmp_path_factory.mktemp("seq2seq"), shared_cache)


def line(folder: Path, *further: str) -> tuple[str, ...]:
    return (
        *("model=hf", f"model.path={folder}", "objective=seq2seq", *DATA, "data.rows=200"),
        *("tracking=none", "callbacks=[none]", "launch.isolation=process", *SGD),
        *("trainer.global_batch=11", "trainer.clip_norm=0.1", *further),
    )


def alone(job: Job, folder: Path, *further: str) -> Folder:
    return job.of(*line(folder, *further, "trainer.micro_batch=12"))


def theirs(folder: Path) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(folder)


def asked(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns a batch as transformers reads it."""
    there_BS = batch["inputs"] >= 0
    inputs_BS = batch["inputs"].clamp(min=0)
    return {"input_ids": inputs_BS, "attention_mask": there_BS.long(), "labels": batch["labels"]}


def batches(folder: Path, steps: int) -> Loader:
    run = compose([*line(folder, "trainer.micro_batch=11")])
    rows = run.data.prepare(256, run.seed).train
    return Loader(rows, Share(11, 11, 0, 1), seed=run.seed, steps=steps)


@pytest.mark.parametrize("family", ENCODING)
def test_loss_and_gradients_are_those_of_transformers(
    family: str, checkpoints: Checkpoints
) -> None:
    folder = checkpoints(family)
    spec, peer = HuggingFace(path=str(folder)), theirs(folder)
    assert [*spec.complaints()] == []
    assert spec.parameters == peer.num_parameters()
    ours, (batch,) = spec.build(1), [*batches(folder, 1)]
    wanted = peer(**asked(batch))
    logits = ours(batch["inputs"], batch["labels"])
    torch.testing.assert_close(logits, wanted.logits, rtol=1e-5, atol=1e-5)
    run = compose([*line(folder, "trainer.micro_batch=11")])
    loss = run.objective.summed(logits, batch["labels"]) / (batch["labels"] != -100).sum()
    torch.testing.assert_close(loss, wanted.loss)
    loss.backward()
    wanted.loss.backward()
    own = dict(peer.named_parameters())
    assert {ours.theirs(name) for name, _ in ours.named_parameters()} == {*own}
    for name, parameter in ours.named_parameters():
        want = own[ours.theirs(name)].grad
        atol = 1e-5 * float(want.abs().max())
        torch.testing.assert_close(parameter.grad, want, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("sizes", [(24, 8), (64, 40)])
def test_flops_are_those_that_torch_counts(
    sizes: tuple[int, int], checkpoints: Checkpoints
) -> None:
    """Of attention it counts 12 where flash attention's backward makes 14."""
    sequence, target = sizes
    spec = HuggingFace(path=str(checkpoints(FAMILY)))
    module = spec.build(1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        rows = [torch.ones((1, n), dtype=torch.long) for n in (sequence - target, target)]
        module(*rows).sum().backward()
    source, width = sequence - target, spec.query_width
    pairs = 2 * source**2 + 3 * (target**2 + target * source)
    told = spec.flops(sequence, target) * sequence
    assert counted.get_total_flops() == pytest.approx(told - 2 * pairs * width, rel=1e-9)


def test_fresh_weights_are_drawn_for_as_many_layers(checkpoints: Checkpoints) -> None:
    spec = HuggingFace(path=str(checkpoints(FAMILY)), init=Init.random, depth=4)
    assert (spec.layers, spec.facts.starts) == (8, (0, 4))
    one, other = (dict(spec.build(7).named_parameters()) for _ in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@LONG
def test_steps_are_those_of_transformers_in_a_hand_loop(checkpoints: Checkpoints, job: Job) -> None:
    folder = checkpoints(FAMILY)
    found = alone(job, folder, "optimizer.weight_decay=0")
    model, losses = theirs(folder), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for batch in batches(folder, 3):
        loss = model(**asked(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert found.column("train/loss") == pytest.approx(losses, rel=1e-5)
    to = found.path / "exported"
    exports.write(recorded(found.path), to, Form.merged)
    trained = theirs(to).state_dict()
    assert_close(trained, model.state_dict(), "weights")


@LONG
@pytest.mark.parametrize("layout", TAKEN)
@pytest.mark.parametrize("family", ENCODING[:2])
def test_a_layout_takes_the_steps_of_one_device(
    family: str, layout: str, checkpoints: Checkpoints, job: Job
) -> None:
    folder, parts = checkpoints(family), LAYOUTS[layout]
    ranks = compose([*line(folder, *parts)]).parallelism.data_parallel_size
    micro_batch = f"trainer.micro_batch={12 // ranks // 3}"
    assert_equal(job.of(*line(folder, *parts, micro_batch)), alone(job, folder))


WAYS = {
    "accumulated": ("trainer.micro_batch=4",),
    "checkpoint_full": ("memory=checkpoint_full",),
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "checkpoint_every_n": ("memory=checkpoint_every_n", "memory.every=2"),
}


@LONG
@pytest.mark.parametrize("layout", ["single", "fsdp"])
@pytest.mark.parametrize("way", [*WAYS])
def test_what_changes_no_step_changes_none(
    way: str, layout: str, checkpoints: Checkpoints, job: Job
) -> None:
    folder = checkpoints(FAMILY)
    parts = (f"parallelism={layout}", "trainer.micro_batch=6", *WAYS[way])
    assert_equal(job.of(*line(folder, *parts)), alone(job, folder))


LORA = ("adapter=lora", "adapter.rank=4")


@LONG
@pytest.mark.parametrize("kind", ["lora", "ia3"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_an_adapter_takes_the_steps_of_one_device(
    kind: str, layout: str, checkpoints: Checkpoints, job: Job
) -> None:
    folder, adapter = checkpoints(FAMILY), f"adapter={kind}"
    found = job.of(*line(folder, adapter, *LAYOUTS[layout], "trainer.micro_batch=3"))
    assert_equal(found, alone(job, folder, adapter))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own use
@pytest.mark.parametrize("family", ENCODING)
def test_lora_is_what_peft_makes_of_the_architecture(family: str, checkpoints: Checkpoints) -> None:
    run = compose([*line(checkpoints(family), "adapter=lora")])
    peer = get_peft_model(theirs(checkpoints(family)), LoraConfig(r=8))
    wanted = {name for name, parameter in peer.named_parameters() if parameter.requires_grad}
    spec = run.model
    assert isinstance(spec, HuggingFace)
    module = spec.build(1)
    ours = [weight.name for weight in run.census() if weight.trainable]
    assert {f"base_model.model.{module.theirs(name)}" for name in ours} == wanted
    assert len(ours) == len(wanted)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own use
@pytest.mark.parametrize(
    "more",
    [
        *(
            pytest.param(more, marks=LONG)
            for more in (
                LORA,
                (),
                ("adapter=ia3",),
                ("adapter=dora",),
                (*LORA, "model.init=random"),
            )
        ),
    ],
    ids=str,
)
def test_what_was_trained_is_asked_and_exported_and_goes_on(
    more: tuple[str, ...], checkpoints: Checkpoints, job: Job
) -> None:
    folder = checkpoints(FAMILY)
    sharded = (*LAYOUTS["fsdp"], *more, "trainer.micro_batch=6", "checkpoint.every=2")
    found = job.of(*line(folder, *sharded))
    told = recorded(found.path)
    module = live.model(told, torch.device("cpu"))
    (batch,) = batches(folder, 1)
    with torch.no_grad():
        logits = module(batch["inputs"], batch["labels"])
        begun = theirs(folder)(**asked(batch)).logits
    assert not torch.equal(logits, begun)
    to = found.path / "exported"
    exports.write(told, to, Form.merged)
    models = [theirs(to)]
    if more:
        exports.write(told, found.path / "adapter", Form.alone)
        base = found.path / "adapter" / "base" if "model.init=random" in more else folder
        models.append(PeftModel.from_pretrained(theirs(base), found.path / "adapter"))
        assert models[-1].active_peft_config.task_type == "SEQ_2_SEQ_LM"
    for model in models:
        with torch.no_grad():
            wanted = model.eval()(**asked(batch)).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    again = job.of(*line(folder, *more, "trainer.micro_batch=12"), resume=found.checkpoint(2))
    assert_close(again.weights(), found.weights(), "weights after step 2")


def test_answers_are_held_out_and_written_as_by_transformers(checkpoints: Checkpoints) -> None:
    folder = checkpoints("t5_gated")
    run, peer = compose([*line(folder)]), theirs(folder)
    rows = run.data.prepare(256, run.seed).validation
    assert rows is not None
    module = HuggingFace(path=str(folder)).build(1)
    found = held_out.measured(module, rows, 10, 4)
    (batch,) = Loader(rows, Share(10, 10), seed=1, steps=1)
    with torch.no_grad():
        assert found.loss == pytest.approx(peer(**asked(batch)).loss.item(), rel=1e-5)
    assert found.labels == int((batch["labels"] != -100).sum())
    question = [5, 9, 200, 31]
    written = answered(module, question, 0.0, 1)
    ids = [next(written) for _ in range(6)]
    given = torch.tensor([question])
    wanted = peer.generate(given, max_new_tokens=6, do_sample=False, use_cache=False)
    assert ids == wanted[0, 1:].tolist()


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


@pytest.mark.parametrize(
    ("family", "further"),
    [pytest.param(family, each, marks=LONG) for family in ENCODING[:2] for each in PLANNED],
    ids=str,
)
def test_the_peak_is_the_one_traced(
    family: str, further: tuple[str, ...], checkpoints: Checkpoints, job: Job
) -> None:
    overrides = (
        *("model=hf", f"model.path={checkpoints(family)}", "objective=seq2seq"),
        *("data=synthetic", "data.sequence=64", "data.target_length=16", "data.masked=0.2"),
        *("tracking=none", "callbacks=[none]", "checkpoint=none", "launch.isolation=process"),
        *("trainer.max_steps=3", "trainer.log_every=3", "schedule.warmup_steps=1"),
        *("trainer.micro_batch=8", *further),
    )
    run = compose(overrides)
    assert refusal(run) is None
    foreseen = traced(run, whole=True).peak
    found = job.of(*overrides).summary["metrics"]["memory/peak_bytes"]
    print(f"{family} {' '.join(further)}: {foreseen / found - 1:+.2%}")
    assert abs(foreseen / found - 1) < 0.02
