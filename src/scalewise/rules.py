"""The rules across the parts of a run that no part's own spec keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scalewise.data.templates import end_beside
from scalewise.data.tokenizing import SMALLEST_VOCABULARY
from scalewise.errors import Complaint
from scalewise.hardware import DeviceKind, ranks_on_this_machine, this_machine
from scalewise.precision import Number
from scalewise.typed_override import typed

if TYPE_CHECKING:
    from scalewise.run import Run


def of_formats(run: Run) -> Iterator[Complaint]:
    """Yields bf16 on a device without it."""
    formats = (run.precision.parameters, run.precision.compute)
    if Number.bf16 in formats and run.hardware.bf16_tflops == 0:
        chosen = run.choices.get("precision", "bf16")
        reason = f"{run.hardware.match or 'the device'} has no bf16"
        yield Complaint("precision", chosen, reason, "set precision=fp16_mixed")


def of_schedule(run: Run) -> Iterator[Complaint]:
    """Yields a warmup that takes all steps."""
    trainer = run.trainer
    if run.world_size < 1 or run.micro_batch < 1 or (trainer.global_batch or 1) < 1:
        return
    if run.data.sequence < 1 or (trainer.max_steps is None and trainer.max_tokens is None):
        return  # epochs have as many steps as the data has rows
    warmup, steps = run.schedule.warmup_steps, run.steps(rows=0)
    if warmup >= steps > 0:
        length = f"trainer.max_steps={steps}"
        if trainer.max_steps is None:
            length = f"the {steps} steps of trainer.max_tokens={trainer.max_tokens}"
        yield Complaint(
            "schedule.warmup_steps",
            warmup,
            f"is not below {length}",
            f"set schedule.warmup_steps={steps // 10}",
        )


def of_tokens(run: Run) -> Iterator[Complaint]:
    """Yields rows, ids and epochs that model and data do not share."""
    target = run.data.target_length  # an encoder and a decoder have a part each
    if max(run.data.sequence - target, target) > run.model.context:
        yield Complaint(
            "data.sequence",
            run.data.sequence,
            f"is longer than the model's context of {run.model.context} tokens",
            f"set data.sequence={run.model.context}",
        )
    needed = run.data.vocabulary_needed
    known = run.model.vocabulary
    grown = f"model.vocabulary={needed}" if run.model.has_key("vocabulary") else "another model"
    if needed is not None and needed > known and hasattr(run.data, "vocabulary"):
        reason = f"yields token ids beyond the model's vocabulary of {known}"
        enough = known >= SMALLEST_VOCABULARY
        cure = f"set data.vocabulary={known} or {grown}" if enough else f"set {grown}"
        yield Complaint("data.vocabulary", needed, reason, cure)
    elif needed is not None and needed > known:
        reason = f"is too small: the rows of data={run.choices.get('data')} have {needed} ids"
        yield Complaint("model.vocabulary", known, reason, f"set {grown}")
    yield from _of_tokenizer(run)
    if run.data.packing and run.data.pairs:
        reason = "would put answers beside each other, which are compared row by row"
        yield Complaint("data.packing", True, reason, "set data.packing=false")
    if run.trainer.max_epochs is not None and getattr(run.data, "streaming", False):
        yield Complaint(
            "trainer.max_epochs",
            run.trainer.max_epochs,
            "a stream has no last row to count epochs by",
            "set trainer.max_steps, or data.streaming=false",
        )


def _of_tokenizer(run: Run) -> Iterator[Complaint]:
    """Yields a tokenizer trained anew, of whose ids pretrained weights know nothing."""
    if run.model.pretrained is None or not run.data.trains_tokenizer:
        return
    cure = "give data.tokenizer=PATH of the tokenizer.json that they were trained with"
    if file := run.model.tokenizer():
        cure, end = f"set {typed('data.tokenizer', file)}", end_beside(file)
        if end not in ("", getattr(run.data, "end_of_text", end)):
            cure += " " + typed("data.end_of_text", end)
    reason = f"trains one anew, whose ids mean nothing to the weights of {run.model.pretrained}"
    yield Complaint("data.tokenizer", None, reason, cure)


def of_devices(run: Run) -> Iterator[Complaint]:
    """Yields more ranks, or other devices, than the present machine has."""
    machine = this_machine()
    key, ranks = "parallelism", run.choices.get("parallelism", "")
    here = ranks_on_this_machine() or run.world_size
    if run.hardware.device is DeviceKind.cuda:
        if not machine.gpus:
            yield Complaint(
                "hardware",
                run.choices.get("hardware", "cuda"),
                "this machine has no CUDA device",
                "set hardware=auto or hardware=cpu",
            )
        elif here > len(machine.gpus):
            yield Complaint(
                key,
                ranks,
                f"needs {here} devices, this machine has {len(machine.gpus)}",
                "ask for fewer, or set hardware=cpu",
            )
        elif run.hardware.match and run.hardware.match not in machine.gpus[0]:
            yield Complaint(
                "hardware",
                run.choices.get("hardware", run.hardware.match),
                f"this machine has {machine.gpus[0]}",
                "set hardware=auto",
            )
    elif here > machine.max_cpu_ranks:
        yield Complaint(
            key,
            ranks,
            f"needs {here} CPU ranks; the {machine.cores} cores of this machine "
            f"carry at most {machine.max_cpu_ranks}",
            "ask for fewer",
        )


def of_numbers(run: Run) -> Iterator[Complaint]:
    """Yields fp16 on the CPU."""
    compute = run.precision.compute
    key, chosen = "precision", run.choices.get("precision", "")
    if not chosen.startswith(compute.value):
        key, chosen = "precision.compute", compute.value
    if run.hardware.device is DeviceKind.cpu and compute is Number.fp16:
        yield Complaint(
            key,
            chosen,
            "Lightning would compute in bf16 on the CPU without saying so",
            "set precision=bf16_mixed",
        )
