"""Validation rules between config groups, and between a run and this machine."""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.data.chat_templates import read_end_of_text
from scalewise.data.tokenizer import SMALLEST_VOCABULARY
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind, local_world_size, this_machine
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override


def format_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for bf16 on a device without it."""
    formats = (run.precision.parameters, run.precision.compute)
    if FloatFormat.bf16 in formats and run.hardware.bf16_tflops == 0:
        chosen = run.option("precision")
        reason = f"is not supported: {run.hardware.match or 'the device'} has no bf16"
        yield ConfigIssue("precision", chosen, reason, "set precision=fp16_mixed")


def schedule_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for a warmup that is as long as training."""
    trainer = run.trainer
    if run.world_size < 1 or run.micro_batch < 1 or (trainer.global_batch or 1) < 1:
        return
    if run.data.sequence < 1 or (trainer.max_steps is None and trainer.max_tokens is None):
        return  # the steps of an epoch depend on the data
    warmup, steps = run.schedule.warmup_steps, run.num_steps(samples=0)
    if warmup >= steps > 0:
        length = f"trainer.max_steps={steps}"
        if trainer.max_steps is None:
            length = f"the {steps} steps of trainer.max_tokens={trainer.max_tokens}"
        yield ConfigIssue(
            "schedule.warmup_steps",
            warmup,
            f"must be below {length}",
            f"set schedule.warmup_steps={steps // 10}",
        )


def token_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of sequence length, vocabulary and epochs between model and data."""
    target = run.data.target_length  # source and target go to the encoder and the decoder
    if max(run.data.sequence - target, target) > run.model.context:
        yield ConfigIssue(
            "data.sequence",
            run.data.sequence,
            f"exceeds the context of the model, {run.model.context} tokens",
            f"set data.sequence={run.model.context}",
        )
    needed = run.data.required_vocabulary
    vocabulary = run.model.vocabulary
    grown = f"model.vocabulary={needed}" if run.model.has_key("vocabulary") else "another model"
    if needed is not None and needed > vocabulary and hasattr(run.data, "vocabulary"):
        reason = f"exceeds the vocabulary of the model, {vocabulary} tokens"
        is_large_enough = vocabulary >= SMALLEST_VOCABULARY
        fix = f"set data.vocabulary={vocabulary} or {grown}" if is_large_enough else f"set {grown}"
        yield ConfigIssue("data.vocabulary", needed, reason, fix)
    elif needed is not None and needed > vocabulary:
        reason = f"is too small: data={run.option('data')} has {needed} token ids"
        yield ConfigIssue("model.vocabulary", vocabulary, reason, f"set {grown}")
    yield from _tokenizer_issues(run)
    if run.data.packing and run.data.pairs:
        reason = "is not supported with preference pairs, whose answers are compared one by one"
        yield ConfigIssue("data.packing", True, reason, "set data.packing=false")
    if run.trainer.max_epochs is not None and getattr(run.data, "streaming", False):
        yield ConfigIssue(
            "trainer.max_epochs",
            run.trainer.max_epochs,
            "is not supported with a stream, whose length is unknown",
            "set trainer.max_steps, or data.streaming=false",
        )


def _tokenizer_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for a new tokenizer with pretrained weights."""
    if run.model.pretrained_path is None or not run.data.trains_tokenizer:
        return
    fix = "set data.tokenizer=PATH to the tokenizer.json of the pretrained model"
    if file := run.model.find_tokenizer_file():
        fix, end = f"set {format_override('data.tokenizer', file)}", read_end_of_text(file)
        if end not in ("", getattr(run.data, "end_of_text", end)):
            fix += " " + format_override("data.end_of_text", end)
    reason = (
        f"trains a new tokenizer, which does not match the weights of {run.model.pretrained_path}"
    )
    yield ConfigIssue("data.tokenizer", None, reason, fix)


def device_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for devices and ranks that this machine does not have."""
    machine = this_machine()
    key, ranks = "parallelism", run.option("parallelism")
    local_ranks = local_world_size() or run.world_size
    if run.hardware.device is DeviceKind.cuda:
        if not machine.gpus:
            yield ConfigIssue(
                "hardware",
                run.option("hardware"),
                "requires a CUDA device, which this machine does not have",
                "set hardware=auto or hardware=cpu",
            )
        elif local_ranks > len(machine.gpus):
            yield ConfigIssue(
                key,
                ranks,
                f"requires {local_ranks} devices; this machine has {len(machine.gpus)}",
                "reduce the number of ranks, or set hardware=cpu",
            )
        elif run.hardware.match and run.hardware.match not in machine.gpus[0]:
            yield ConfigIssue(
                "hardware",
                run.option("hardware"),
                f"does not match this machine, which has {machine.gpus[0]}",
                "set hardware=auto",
            )
    elif local_ranks > machine.max_cpu_ranks:
        yield ConfigIssue(
            key,
            ranks,
            f"requires {local_ranks} CPU ranks; this machine has {machine.cores} cores and "
            f"supports at most {machine.max_cpu_ranks}",
            "reduce the number of ranks",
        )


def fp16_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for fp16 on the CPU."""
    compute = run.precision.compute
    key, chosen = "precision", run.option("precision")
    if not chosen.startswith(compute.value):
        key, chosen = "precision.compute", compute.value
    if run.hardware.device is DeviceKind.cpu and compute is FloatFormat.fp16:
        yield ConfigIssue(
            key,
            chosen,
            "is not supported on the CPU, where Lightning silently uses bf16",
            "set precision=bf16_mixed",
        )


def planning_issues(run: RunConfig, subject: str) -> Iterator[ConfigIssue]:
    """Yield issues for options that require the analytic memory model.

    Args:
        run: Config of the run.
        subject: Kind of models that the analytic memory model does not cover, in the plural.
    """
    planning_options = {
        "plan.search": (run.plan.search.value, "none"),
        "plan.fit": (run.plan.fit.value, "none"),
        "launch.refuse_unfit": (run.launch.refuse_unfit, False),
    }
    for key, (value, neutral) in planning_options.items():
        if value != neutral:
            reason = f"requires the analytic memory model, which does not cover {subject}"
            yield ConfigIssue(key, value, reason, f"set {format_override(key, neutral)}")
