"""Rules between the model and the data, and between the model and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from itertools import pairwise

from scalewise.data.chat_templates import read_end_of_text
from scalewise.data.tokenizer import SMALLEST_VOCABULARY
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import QKNorm
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.hf.model_info import COLUMN, TP_STYLES
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override
from scalewise.validation.expert_rules import expert_issues, quantized_expert_issues

UNSUPPORTED = "is not supported for Hugging Face models"


@singledispatch
def model_issues(model: ModelConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of the model with other parts of the run: none."""
    yield from ()


@model_issues.register(HuggingFaceConfig)
def _hf_issues(model: HuggingFaceConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield features of the run that Hugging Face models do not support."""
    sizes = getattr(run.parallelism, "sizes", {})
    if len(model.info.stack_starts) > 1:
        yield from _stack_issues(model, run)
    if not model.has_equal_blocks:
        models = f"models with several kinds of blocks ({model.info.model_type})"
        if len(model.info.stack_starts) > 1:
            models = "vision-language models" if model.image_size else "encoder-decoder models"
        yield from _unequal_block_issues(models, run)
    if model.has_experts:
        yield from quantized_expert_issues(f"the experts of {model.info.model_type}", run)
    reasons = dict.fromkeys(("context", "pipeline"), UNSUPPORTED)
    reasons["tensor"] = _tensor_parallel_obstacle(model)
    for axis, reason in reasons.items():
        if sizes.get(axis, 1) > 1 and reason:
            fix = "set parallelism=fsdp, hsdp, ddp or deepspeed_zero3"
            yield ConfigIssue(f"parallelism.{axis}", sizes[axis], reason, fix)
    if sizes.get("tensor", 1) > 1:
        yield from _tensor_parallel_issues(run)
    biases = {f"blocks.0.{name}.bias" for name, _ in model.info.linear_layers}
    biases &= {weight.name for weight in model.weight_census()}
    if run.quantization.fake_quantized_layers(model) and biases and model.has_equal_blocks:
        option = run.option("quantization")
        reason = f"does not support linear layers with biases ({model.info.model_type})"
        yield ConfigIssue("quantization", option, reason, "set quantization=none")
    if run.adapter.prompt_tokens or run.adapter.prefix_tokens:
        option = run.option("adapter")
        yield ConfigIssue("adapter", option, UNSUPPORTED, "set adapter=lora")
    if run.data.packing and not model.info.packs_texts:
        reason = f"is not supported for {model.info.model_type}, whose mask ignores position ids"
        if len(model.info.stack_starts) > 1:
            reason = UNSUPPORTED
        yield ConfigIssue("data.packing", True, reason, "set data.packing=false")


@model_issues.register(DecoderConfig)
def _decoder_issues(model: DecoderConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield features of the run that options of the decoder do not support."""
    yield from expert_issues(model, run)
    ranks = getattr(run.parallelism, "sizes", {}).get("tensor", 1)
    if ranks > 1 and model.qk_norm is QKNorm.projection:
        reason = "normalizes over the heads of all tensor-parallel ranks"
        fix = "set parallelism=fsdp parallelism.tensor=1"
        yield ConfigIssue("model.qk_norm", model.qk_norm.value, reason, fix)
    if ranks > 1 and model.has_latent_attention:
        reason = "is not supported with model.kv_latent_dim, whose latents all heads read"
        fix = "set parallelism=fsdp parallelism.tensor=1"
        yield ConfigIssue("parallelism.tensor", ranks, reason, fix)
    if run.adapter.prefix_tokens and model.has_latent_attention:
        reason = "adds prefix keys, which latent attention (model.kv_latent_dim) has none of"
        yield ConfigIssue("adapter", run.option("adapter"), reason, "set adapter=lora")
    if not model.has_equal_blocks:
        yield from _unequal_block_issues("dense blocks before experts (model.dense_layers)", run)
    if run.adapter.prefix_tokens and model.window is not None:
        reason = "adds prefix keys, which a window of model.window tokens would hide"
        yield ConfigIssue("adapter", run.option("adapter"), reason, "set adapter=lora")


def _stack_issues(model: HuggingFaceConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield other objectives, and features that are not supported with several stacks."""
    kind, is_supported, data = (
        "is an encoder-decoder model",
        run.objective.needs_encoder_decoder,
        "seq2seq",
    )
    if model.image_size:
        kind, is_supported, data = "reads images", run.objective.reads_images, "captions"
    if not is_supported:
        objective = "captioning" if model.image_size else data
        reason, fix = f"{kind} ({model.info.model_type})", f"set objective={objective} data={data}"
        yield ConfigIssue("model.path", model.path, reason, fix)


def _unequal_block_issues(models: str, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield features that are not supported for ``models``, blocks with different weights."""
    model, reason = run.model, f"is not supported for {models}"
    if run.precision.fp8_layers(model):
        option = run.option("precision")
        yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    if run.memory.offload:
        yield ConfigIssue("memory.offload", True, reason, "set memory=checkpoint_full")
    if run.optimizer.in_backward:
        yield ConfigIssue("optimizer.in_backward", True, reason, "set optimizer.in_backward=false")
    if run.is_compiled:
        option = run.option("compile")
        yield ConfigIssue("compile", option, reason, "set compile=none")
    if run.quantization.fake_quantized_layers(model):
        option = run.option("quantization")
        yield ConfigIssue("quantization", option, reason, "set quantization=none")


def _tensor_parallel_obstacle(model: HuggingFaceConfig) -> str:
    """Return the reason why the model does not support tensor parallelism, or an empty string."""
    model_type, plan = model.info.model_type, dict(model.info.hf_tp_plan)
    if not plan:
        return f"requires a tp_plan, which transformers does not have for {model_type}"
    for name in plan | dict(model.info.linear_layers):
        if (style := plan.get(name, "none")) not in TP_STYLES:
            return f"does not support style {style} of {name} in the tp_plan of {model_type}"
    if not model.has_equal_blocks:
        return f"is not supported for models with several kinds of blocks ({model_type})"
    styles = [plan.get(name) for name in model.info.layer_order]
    if ("rowwise", COLUMN) in pairwise(styles):
        return f"does not support blocks with parallel attention and feedforward ({model_type})"
    return ""


def _tensor_parallel_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield options that tensor parallelism of Hugging Face models does not support."""
    if run.has_frozen_weights:
        option = run.option("adapter")
        reason = "is not supported with tensor parallelism of Hugging Face models"
        yield ConfigIssue(
            "adapter", option, reason, "set adapter=none, or parallelism=fsdp parallelism.tensor=1"
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
