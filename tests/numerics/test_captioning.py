"""Models that read pictures: transformers' logits, losses, gradients, and steps in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import RANDOM_BLIP2, Checkpoints
from fixtures.doors import Folder
from fixtures.jobs import Job
from fixtures.layouts import LAYOUTS
from fixtures.steps import SGD, assert_close, assert_equal
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from scalewise import cli, compose
from scalewise.data.loader import Batch, Loader, Share
from scalewise.evaluation import captions, live
from scalewise.exports import Form
from scalewise.exports import folder as exports
from scalewise.hardware import DeviceKind
from scalewise.layouts.single import SingleLayout
from scalewise.models.hf.image_text import ImageTextModule
from scalewise.models.hf.spec import HuggingFace, Init
from scalewise.training.trace import refusal, traced
from scalewise.verbs.trained import recorded

LONG = pytest.mark.exhaustive
TAKEN = ("ddp", "fsdp", "fsdp_offload", "fsdp_zero2", "fsdp_kept", "hsdp")
IMAGE, QUERIES = 31, 4
"""The token that stands for a picture, and how many of it."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Job:
    return Job(tmp_path_factory.mktemp("captioning"), shared_cache)


@pytest.fixture
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("blip2")


def line(folder: Path, *further: str) -> tuple[str, ...]:
    return (
        *("model=hf", f"model.path={folder}", "objective=captioning", "data=shapes"),
        *("data.rows=200", "data.sequence=9"),
        *("tracking=none", "callbacks=[none]", "launch.isolation=process", *SGD),
        *("trainer.global_batch=11", "trainer.clip_norm=0.1", *further),
    )


def alone(job: Job, folder: Path, *further: str) -> Folder:
    return job.of(*line(folder, *further, "trainer.micro_batch=12"))


def theirs(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder)


def asked(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns a batch as transformers reads it: the picture's tokens, the first one, the text."""
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    labels_BT = batch["labels"]
    before = torch.tensor([[IMAGE] * QUERIES + [0]]).expand(len(labels_BT), -1)
    return {
        "pixel_values": (batch["inputs"] / 255 - mean) / std,
        "input_ids": torch.cat([before, labels_BT.clamp(min=0)], dim=1),
        "attention_mask": torch.cat([before >= 0, labels_BT >= 0], dim=1).long(),
        "labels": torch.cat([torch.full_like(before, -100), labels_BT], dim=1),
    }


def batches(folder: Path, steps: int) -> Loader:
    run = compose([*line(folder, "trainer.micro_batch=11")])
    rows = run.data.prepare(32, run.seed).train
    return Loader(rows, Share(11, 11, 0, 1), seed=run.seed, steps=steps)


def test_loss_and_gradients_are_those_of_transformers(folder: Path) -> None:
    spec, peer = HuggingFace(path=str(folder)), theirs(folder)
    assert [*spec.complaints()] == []
    assert spec.parameters == peer.num_parameters()
    assert (spec.image_size, spec.context, spec.facts.starts) == (32, 60, (0, 2, 5))
    ours, (batch,) = spec.build(1), [*batches(folder, 1)]
    wanted = peer(**asked(batch))
    logits, real_BT = ours(batch["inputs"], batch["labels"]), batch["labels"] != -100
    their_own = wanted.logits[:, QUERIES:-1][real_BT]
    torch.testing.assert_close(logits[real_BT], their_own, rtol=1e-5, atol=1e-5)
    run = compose([*line(folder, "trainer.micro_batch=11")])
    loss = run.objective.summed(logits, batch["labels"]) / real_BT.sum()
    torch.testing.assert_close(loss, wanted.loss)
    loss.backward()
    wanted.loss.backward()
    own = dict(peer.named_parameters())
    assert {ours.theirs(name) for name, _ in ours.named_parameters()} == {*own}
    for name, parameter in ours.named_parameters():
        want = own[ours.theirs(name)].grad
        # A softmax has no gradient for the bias of all keys: of that there is noise alone.
        atol = 1e-5 * max(float(want.abs().max()), 1e-3)
        torch.testing.assert_close(parameter.grad, want, rtol=1e-5, atol=atol)


def test_flops_are_those_that_torch_counts(folder: Path) -> None:
    """Of attention it counts 12 where flash attention's backward makes 14."""
    spec, sequence = HuggingFace(path=str(folder)), 9
    module = spec.build(1)
    pixels, labels = torch.zeros((1, 3, 32, 32), dtype=torch.uint8), torch.ones((1, sequence))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        module(pixels, labels.long()).sum().backward()
    assert spec.facts.picture is not None
    pairs = spec.facts.picture.pairs + 2 * (sequence + QUERIES) ** 2 * spec.query_width
    told = spec.flops(sequence) * sequence
    assert counted.get_total_flops() == pytest.approx(told - 2 * pairs, rel=1e-9)


def test_gradients_that_stop_before_an_adapter_are_not_counted(folder: Path) -> None:
    run = compose([*line(folder), "adapter=lora", "model.init=random", "model.depth=8"])
    module = SingleLayout(DeviceKind.cpu).build(run)
    pixels, labels = torch.zeros((1, 3, 32, 32), dtype=torch.uint8), torch.ones((1, 9))
    with FlopCounterMode(display=False) as counted:  # it counts no attention on the CPU
        module(pixels, labels.long()).sum().backward()
    assert isinstance(run.model, HuggingFace)
    assert run.model.facts.picture is not None
    written = 14.0 * 8 * (9 + QUERIES) ** 2 * run.model.query_width
    attention = 4.0 * run.model.facts.picture.pairs + written
    # The first block's inputs are frozen: gradients end in its first adapted layers.
    found = counted.get_total_flops()
    assert 9 * run.flops_per_token - attention == pytest.approx(found, rel=0.02)


def test_plans_are_by_trace(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("experiment=finetune/captioning_tiny", "hardware=h100", "tracking=none")
    assert cli.main(["plan", *tiny]) == 0
    said = capsys.readouterr().out
    assert "all 6 layers" in said
    assert "a model that reads pictures is known by trace" in said
    for line in ("parameters ", "optimizer state ", "activations ", "gradients "):
        assert f"\n{line}" in said
    assert cli.main(["plan", *tiny, "plan.method=ledger"]) == 2
    assert "knows nothing of several stacks" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_given_a_cure(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("experiment=finetune/captioning_tiny", "hardware=cpu", "tracking=none")
    small = "hardware.memory_gib=0.012"
    assert cli.main(["plan", *tiny, small]) == 3
    said = capsys.readouterr().out
    assert "out_of_memory, " in said
    smaller = "trainer.micro_batch=16 trainer.global_batch=64"
    assert f"to make it fit: {smaller}\n" in said
    assert cli.main(["plan", *tiny, small, *smaller.split()]) == 0


def test_fresh_weights_are_drawn_for_as_many_layers(folder: Path) -> None:
    spec = HuggingFace(path=str(folder), init=Init.random, depth=4)
    assert (spec.layers, spec.facts.starts) == (12, (0, 4, 8))
    one, other = (dict(spec.build(7).named_parameters()) for _ in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert one["head.query_tokens"].std().item() == pytest.approx(0.02, rel=0.2)


@LONG
def test_steps_are_those_of_transformers_in_a_hand_loop(folder: Path, job: Job) -> None:
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
    assert_close(theirs(to).state_dict(), model.state_dict(), "weights")


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each == "fsdp" else LONG) for each in TAKEN]
)
def test_a_layout_takes_the_steps_of_one_device(layout: str, folder: Path, job: Job) -> None:
    parts = LAYOUTS[layout]
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
def test_what_changes_no_step_changes_none(way: str, layout: str, folder: Path, job: Job) -> None:
    parts = (f"parallelism={layout}", "trainer.micro_batch=6", *WAYS[way])
    assert_equal(job.of(*line(folder, *parts)), alone(job, folder))


LORA = ("adapter=lora", "adapter.rank=4")


@LONG
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_an_adapter_takes_the_steps_of_one_device(layout: str, folder: Path, job: Job) -> None:
    found = job.of(*line(folder, *LORA, *LAYOUTS[layout], "trainer.micro_batch=3"))
    assert_equal(found, alone(job, folder, *LORA))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own use
def test_lora_is_what_peft_makes_of_the_architecture(folder: Path) -> None:
    run = compose([*line(folder, "adapter=lora")])
    peer = get_peft_model(theirs(folder), LoraConfig(r=8))
    wanted = {name for name, parameter in peer.named_parameters() if parameter.requires_grad}
    spec = run.model
    assert isinstance(spec, HuggingFace)
    module = spec.build(1)
    ours = [weight.name for weight in run.census() if weight.trainable]
    assert {f"base_model.model.{module.theirs(name)}" for name in ours} == wanted
    assert len(ours) == len(wanted) == 2 * 2 * 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own use
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=LONG),
        *(
            pytest.param(more, marks=LONG)
            for more in (LORA, ("adapter=ia3",), ("adapter=dora",), (*LORA, "model.init=random"))
        ),
    ],
    ids=str,
)
def test_what_was_trained_is_asked_and_exported_and_goes_on(
    more: tuple[str, ...], folder: Path, job: Job
) -> None:
    sharded = (*LAYOUTS["fsdp"], *more, "trainer.micro_batch=6", "checkpoint.every=2")
    found = job.of(*line(folder, *sharded))
    told = recorded(found.path)
    module = live.model(told, torch.device("cpu"))
    (batch,) = batches(folder, 1)
    real_BT = batch["labels"] != -100
    with torch.no_grad():
        logits = module(batch["inputs"], batch["labels"])[real_BT]
        begun = theirs(folder)(**asked(batch)).logits[:, QUERIES:-1][real_BT]
    assert not torch.equal(logits, begun)
    to = found.path / "exported"
    exports.write(told, to, Form.merged)
    models = [theirs(to)]
    if more:
        exports.write(told, found.path / "adapter", Form.alone)
        base = found.path / "adapter" / "base" if "model.init=random" in more else folder
        models.append(PeftModel.from_pretrained(theirs(base), found.path / "adapter"))
    for model in models:
        with torch.no_grad():
            wanted = model.eval()(**asked(batch)).logits[:, QUERIES:-1][real_BT]
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    again = job.of(*line(folder, *more, "trainer.micro_batch=12"), resume=found.checkpoint(2))
    assert_close(again.weights(), found.weights(), "weights after step 2")


def test_captions_are_held_out_and_written_as_by_transformers(folder: Path) -> None:
    run, peer = compose([*line(folder)]), theirs(folder)
    rows = run.data.prepare(32, run.seed).validation
    assert rows is not None
    module = HuggingFace(path=str(folder)).build(1)
    assert isinstance(module, ImageTextModule)
    found = captions.measured(module, rows, 10, 4, {0})
    (batch,) = Loader(rows, Share(10, 10), seed=None, steps=1)
    given = asked(batch)
    with torch.no_grad():
        assert found.loss == pytest.approx(peer(**given).loss.item(), rel=1e-5)
    assert found.labels == int((batch["labels"] != -100).sum())
    tokens = captions.written(module, batch["inputs"], 0.0, 1)
    ids_BT = torch.stack([next(tokens) for _ in range(9)], dim=1)
    how: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "use_cache": False}
    wanted_BT = peer.generate(given["pixel_values"], eos_token_id=None, **how)
    assert torch.equal(ids_BT, wanted_BT[:, -9:])
    assert found.told[0][1] == captions.until(ids_BT[0].tolist(), {0})


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
@pytest.mark.parametrize("further", PLANNED, ids=str)
def test_the_peak_is_the_one_traced(further: tuple[str, ...], job: Job) -> None:
    overrides = (
        *(*RANDOM_BLIP2, "objective=captioning", "data=shapes", "data.rows=200"),
        *("tracking=none", "callbacks=[none]", "checkpoint=none", "launch.isolation=process"),
        *("trainer.max_steps=3", "trainer.log_every=3", "schedule.warmup_steps=1"),
        *("trainer.micro_batch=8", *further),
    )
    run = compose(overrides)
    assert refusal(run) is None
    foreseen = traced(run, whole=True).peak
    found = job.of(*overrides).summary["metrics"]["memory/peak_bytes"]
    print(f"{' '.join(further)}: {foreseen / found - 1:+.2%}")
    assert abs(foreseen / found - 1) < 0.02
