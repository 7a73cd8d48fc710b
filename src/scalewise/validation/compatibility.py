"""The rules across the parts of a run that no part's own spec keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scalewise.data.chat_templates import read_end_of_text
from scalewise.data.tokenization import SMALLEST_VOCABULARY
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind, local_world_size, this_machine
from scalewise.precision import FloatFormat
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


def format_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields bf16 on a device without it."""
    formats = (run.precision.parameters, run.precision.compute)
    if FloatFormat.bf16 in formats and run.hardware.bf16_tflops == 0:
        chosen = run.choices.get("precision", "bf16")
        reason = f"{run.hardware.match or 'the device'} has no bf16"
        yield ConfigIssue("precision", chosen, reason, "set precision=fp16_mixed")


def schedule_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields a warmup that takes all steps."""
    trainer = run.trainer
    if run.world_size < 1 or run.micro_batch < 1 or (trainer.global_batch or 1) < 1:
        return
    if run.data.sequence < 1 or (trainer.max_steps is None and trainer.max_tokens is None):
        return  # epochs have as many steps as the data has rows
    warmup, steps = run.schedule.warmup_steps, run.num_steps(samples=0)
    if warmup >= steps > 0:
        length = f"trainer.max_steps={steps}"
        if trainer.max_steps is None:
            length = f"the {steps} steps of trainer.max_tokens={trainer.max_tokens}"
        yield ConfigIssue(
            "schedule.warmup_steps",
            warmup,
            f"is not below {length}",
            f"set schedule.warmup_steps={steps // 10}",
        )


def token_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields rows, ids and epochs that model and data do not share."""
    target = run.data.target_length  # an encoder and a decoder have a part each
    if max(run.data.sequence - target, target) > run.model.context:
        yield ConfigIssue(
            "data.sequence",
            run.data.sequence,
            f"is longer than the model's context of {run.model.context} tokens",
            f"set data.sequence={run.model.context}",
        )
    needed = run.data.required_vocabulary
    known = run.model.vocabulary
    grown = f"model.vocabulary={needed}" if run.model.has_key("vocabulary") else "another model"
    if needed is not None and needed > known and hasattr(run.data, "vocabulary"):
        reason = f"yields token ids beyond the model's vocabulary of {known}"
        enough = known >= SMALLEST_VOCABULARY
        fix = f"set data.vocabulary={known} or {grown}" if enough else f"set {grown}"
        yield ConfigIssue("data.vocabulary", needed, reason, fix)
    elif needed is not None and needed > known:
        reason = f"is too small: the rows of data={run.choices.get('data')} have {needed} ids"
        yield ConfigIssue("model.vocabulary", known, reason, f"set {grown}")
    yield from _tokenizer_issues(run)
    if run.data.packing and run.data.pairs:
        reason = "would put answers beside each other, which are compared row by row"
        yield ConfigIssue("data.packing", True, reason, "set data.packing=false")
    if run.trainer.max_epochs is not None and getattr(run.data, "streaming", False):
        yield ConfigIssue(
            "trainer.max_epochs",
            run.trainer.max_epochs,
            "a stream has no last row to count epochs by",
            "set trainer.max_steps, or data.streaming=false",
        )


def _tokenizer_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields a tokenizer trained anew, of whose ids pretrained weights know nothing."""
    if run.model.pretrained_path is None or not run.data.trains_tokenizer:
        return
    fix = "give data.tokenizer=PATH of the tokenizer.json that they were trained with"
    if file := run.model.find_tokenizer_file():
        fix, end = f"set {format_override('data.tokenizer', file)}", read_end_of_text(file)
        if end not in ("", getattr(run.data, "end_of_text", end)):
            fix += " " + format_override("data.end_of_text", end)
    reason = (
        f"trains one anew, whose ids mean nothing to the weights of {run.model.pretrained_path}"
    )
    yield ConfigIssue("data.tokenizer", None, reason, fix)


def device_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields more ranks, or other devices, than the present machine has."""
    machine = this_machine()
    key, ranks = "parallelism", run.choices.get("parallelism", "")
    here = local_world_size() or run.world_size
    if run.hardware.device is DeviceKind.cuda:
        if not machine.gpus:
            yield ConfigIssue(
                "hardware",
                run.choices.get("hardware", "cuda"),
                "this machine has no CUDA device",
                "set hardware=auto or hardware=cpu",
            )
        elif here > len(machine.gpus):
            yield ConfigIssue(
                key,
                ranks,
                f"needs {here} devices, this machine has {len(machine.gpus)}",
                "ask for fewer, or set hardware=cpu",
            )
        elif run.hardware.match and run.hardware.match not in machine.gpus[0]:
            yield ConfigIssue(
                "hardware",
                run.choices.get("hardware", run.hardware.match),
                f"this machine has {machine.gpus[0]}",
                "set hardware=auto",
            )
    elif here > machine.max_cpu_ranks:
        yield ConfigIssue(
            key,
            ranks,
            f"needs {here} CPU ranks; the {machine.cores} cores of this machine "
            f"carry at most {machine.max_cpu_ranks}",
            "ask for fewer",
        )


def fp16_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields fp16 on the CPU."""
    compute = run.precision.compute
    key, chosen = "precision", run.choices.get("precision", "")
    if not chosen.startswith(compute.value):
        key, chosen = "precision.compute", compute.value
    if run.hardware.device is DeviceKind.cpu and compute is FloatFormat.fp16:
        yield ConfigIssue(
            key,
            chosen,
            "Lightning would compute in bf16 on the CPU without saying so",
            "set precision=bf16_mixed",
        )
