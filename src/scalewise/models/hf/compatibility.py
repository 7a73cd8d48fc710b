"""What goes with models of transformers, and what is written for the suite's own decoder alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from scalewise.errors import ConfigIssue
from scalewise.models.hf.model_info import COLUMN, SPLITS
from scalewise.precision import FloatFormat
from scalewise.torch_compile import CompileScope

if TYPE_CHECKING:
    from scalewise.models.hf.config import HuggingFaceConfig
    from scalewise.run_config import RunConfig

ENCODES = "an encoder with a decoder"


def hf_issues(model: HuggingFaceConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields what is written for the suite's own decoder alone."""
    chosen = run.choices
    sizes = getattr(run.parallelism, "sizes", {})
    if len(model.info.stack_starts) > 1:
        yield from _stack_issues(model, run)
    reasons = dict.fromkeys(("context", "pipeline"), "does not cut models of transformers")
    reasons["tensor"] = _tensor_parallel_obstacle(model)
    for axis, reason in reasons.items():
        if sizes.get(axis, 1) > 1 and reason:
            fix = "set parallelism=fsdp, hsdp, ddp or deepspeed_zero3"
            yield ConfigIssue(f"parallelism.{axis}", sizes[axis], reason, fix)
    if sizes.get("tensor", 1) > 1:
        yield from _tensor_parallel_issues(run)
    biases = {f"blocks.0.{name}.bias" for name, _ in model.info.linear_layers}
    biases &= {weight.name for weight in model.weight_census()}
    if (
        run.quantization.fake_quantized_layers(model)
        and biases
        and len(model.info.stack_starts) == 1
    ):
        option = chosen.get("quantization", "qat_int4")
        reason = (
            f"rounds layers without biases, as Llama's, and {model.info.model_type} has some with"
        )
        yield ConfigIssue("quantization", option, reason, "set quantization=none")
    if run.adapter.prompt_tokens or run.adapter.prefix_tokens:
        option = chosen.get("adapter", "prompt")
        reason = "puts nothing before what transformers' models embed or attend to"
        yield ConfigIssue("adapter", option, reason, "set adapter=lora")
    if run.data.packing:
        reason = "is not read by models of transformers"
        yield ConfigIssue("data.packing", True, reason, "set data.packing=false")


def _stack_issues(model: HuggingFaceConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields an objective about one stack alone, and what is not proven for several."""
    what, known, data = f"is {ENCODES}", run.objective.needs_encoder_decoder, "seq2seq"
    if model.image_size:
        what, known, data = "reads pictures", run.objective.reads_images, "captions"
        if run.precision.parameters is FloatFormat.bf16:
            option = run.choices.get("precision", "bf16_true")
            reason = f"holds all weights in bf16, and {model.info.model_type} a Q-Former in fp32"
            yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    if not known:
        objective = "captioning" if model.image_size else data
        reason, fix = f"{what} ({model.info.model_type})", f"set objective={objective} data={data}"
        yield ConfigIssue("model.path", model.path, reason, fix)
    what = f"a model that {what}" if model.image_size else ENCODES
    reason = f"is not proven for {what}"
    if run.parallelism.flattens_parameters:
        option = run.choices.get("parallelism", "deepspeed")
        yield ConfigIssue("parallelism", option, reason, "set parallelism=fsdp, hsdp or ddp")
    if run.precision.fp8_layers(model):
        option = run.choices.get("precision", "fp8")
        yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    if run.memory.offload:
        yield ConfigIssue("memory.offload", True, reason, "set memory=checkpoint_full")
    if run.optimizer.in_backward:
        yield ConfigIssue("optimizer.in_backward", True, reason, "set optimizer.in_backward=false")
    if run.compile.scope is not CompileScope.none:
        option = run.choices.get("compile", "block")
        yield ConfigIssue("compile", option, reason, "set compile=none")
    if run.quantization.packed_layers(model) or run.quantization.fake_quantized_layers(model):
        option = run.choices.get("quantization", "nf4")
        yield ConfigIssue("quantization", option, reason, "set quantization=none")


def _tensor_parallel_obstacle(model: HuggingFaceConfig) -> str:
    """Returns why tensor parallelism cannot cut the model; empty: it can."""
    kind, plan = model.info.model_type, dict(model.info.hf_tp_plan)
    if not plan:
        return f"has no plan for {kind} in transformers (tp_plan)"
    for name in plan | dict(model.info.linear_layers):
        if (how := plan.get(name, "nothing")) not in SPLITS:
            return f"has a plan for {kind} in transformers that cuts {name} by {how}"
    cuts = [plan.get(name) for name in model.info.layer_order]
    if ("rowwise", COLUMN) in pairwise(cuts):
        return f"does not cut blocks whose two halves read the same ({kind})"
    return ""


def _tensor_parallel_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields what does not go with tensor parallelism."""
    if getattr(run.parallelism, "sequence_parallel", False):
        reason = "leaves a rank some of the tokens, which transformers' models count themselves"
        fix = "set parallelism.sequence_parallel=false"
        yield ConfigIssue("parallelism.sequence_parallel", True, reason, fix)
    if run.has_frozen_weights:
        option = run.choices.get("adapter", "lora")
        reason = "is not put on models of transformers that tensor parallelism cuts"
        yield ConfigIssue(
            "adapter", option, reason, "set adapter=none, or parallelism=fsdp parallelism.tensor=1"
        )
