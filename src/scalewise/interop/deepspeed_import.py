"""DeepSpeed's JSON config as overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from scalewise import regular_files
from scalewise.errors import ConfigError
from scalewise.interop.translation import KeyReader, Translation
from scalewise.units import MIB

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "muon": "muon", "sgd": "sgd"}
"""Option of ``optimizer`` by DeepSpeed's type, in lower case."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""Option of ``schedule`` by DeepSpeed's type."""
REASONS = {
    "activation_checkpointing": "choose the recomputed blocks by memory=checkpoint_full",
    "allgather_bucket_size": "equals the bucket of the reduction, parallelism.bucket_mib",
    "stage3_prefetch_bucket_size": "equals parallelism.bucket_mib",
    "stage3_max_live_parameters": "is DeepSpeed's default",
    "stage3_max_reuse_distance": "is DeepSpeed's default",
    "stage3_gather_16bit_weights_on_model_save": "scalewise export writes whole weights",
    "zero_allow_untested_optimizer": "is always true",
    "steps_per_print": "set trainer.log_every",
    "wall_clock_breakdown": "phases of a step are always measured",
    "pin_memory": "is DeepSpeed's default",
    "tensor_parallel": "set parallelism=tensor, which is not DeepSpeed's",
    "wandb": "set tracking",
    "warmup_type": "the warm-up is linear",
}
"""Reason why a key has no counterpart."""


def read_file(path: Path) -> Mapping[str, object]:
    """Read a config file. Raises ``ConfigError`` if that is not possible."""
    try:
        values = json.loads(regular_files.read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError.for_key("", "", f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError.for_key("", "", f"{path} is no JSON object")
    return values


def translate(config: Mapping[str, object]) -> Translation:
    """Translate a DeepSpeed config. Raises ``ConfigError`` for a value of a wrong type."""
    translation = Translation()
    reader = KeyReader(config)
    _translate_zero(reader.take_section("zero_optimization"), translation)
    _translate_precision(reader, translation)
    _translate_batch(reader, translation)
    _translate_optimizer(reader.take_section("optimizer"), translation)
    _translate_schedule(reader.take_section("scheduler"), translation)
    clip_norm = reader.take_number("gradient_clipping")
    if clip_norm is not None:
        translation.overrides["trainer.clip_norm"] = clip_norm or None
    reader.note_remaining(translation, REASONS)
    return translation


def _translate_zero(zero: KeyReader, translation: Translation) -> None:
    stage = zero.take_number("stage", 0)
    overrides = translation.overrides
    if stage == 0:
        overrides["parallelism"] = "ddp"
        zero.note_remaining(translation, REASONS)
        return
    overrides["parallelism"] = f"deepspeed_zero{stage}"
    legacy_offload = zero.take_flag("cpu_offload")
    for key, option in (
        ("offload_optimizer", "offload_optimizer"),
        ("offload_param", "offload_parameters"),
    ):
        section = zero.take_section(key)
        device = section.take("device", "cpu" if legacy_offload and "opt" in key else "none")
        if device != "none":
            overrides[f"parallelism.{option}"] = device
        if device == "nvme" and (path := section.take("nvme_path")):
            overrides["parallelism.nvme_path"] = path
        section.note_remaining(translation, REASONS)
    bucket = zero.take_number("reduce_bucket_size")
    if bucket:
        overrides["parallelism.bucket_mib"] = round(bucket * 4 / MIB, 3)
    for key, option in (
        ("overlap_comm", "overlap_comm"),
        ("contiguous_gradients", "contiguous_gradients"),
        ("zero_quantized_weights", "quantized_weights"),
        ("zero_quantized_gradients", "quantized_gradients"),
    ):
        if (value := zero.take(key)) is not None:
            overrides[f"parallelism.{option}"] = str(value).lower() == "true"
    for key, option in (
        ("stage3_param_persistence_threshold", "keep_whole_below"),
        ("zero_hpz_partition_size", "hierarchical"),
    ):
        if (value := zero.take_number(key)) is not None:
            overrides[f"parallelism.{option}"] = value
    zero.note_remaining(translation, REASONS)


def _translate_precision(reader: KeyReader, translation: Translation) -> None:
    bf16, fp16 = reader.take_section("bf16"), reader.take_section("fp16")
    autocast = reader.take_section("torch_autocast")
    is_auto = bf16.is_auto("enabled") or fp16.is_auto("enabled")
    precision = "" if is_auto else "fp32"
    if fp16.take_flag("enabled"):
        precision = "fp16_mixed"
    if autocast.take_flag("enabled"):
        precision = "fp16_mixed" if autocast.take("dtype") == "float16" else "bf16_mixed"
    if bf16.take_flag("enabled"):
        whole = bf16.take_flag("bf16_master_weights_and_grads")
        precision = "bf16_true" if whole else "bf16_mixed"
    if precision:
        translation.overrides["precision"] = precision
    for section in (bf16, fp16, autocast):
        section.note_remaining(translation, REASONS, ignored=("dtype",))


def _translate_batch(reader: KeyReader, translation: Translation) -> None:
    """Translate the batch sizes; two of them and their product give the number of ranks."""
    total = reader.take_number("train_batch_size")
    micro = reader.take_number("train_micro_batch_size_per_gpu")
    accumulation = reader.take_number("gradient_accumulation_steps")
    overrides = translation.overrides
    if micro is not None:
        overrides["trainer.micro_batch"] = micro
    if total is not None:
        overrides["trainer.global_batch"] = total
    if total and micro and accumulation and not total % (micro * accumulation):
        overrides["parallelism.replicas"] = int(total // (micro * accumulation))
    elif accumulation is not None and accumulation != 1:
        reason = "set trainer.global_batch to trainer.micro_batch x ranks x this number"
        translation.note("gradient_accumulation_steps", accumulation, reason)


def _translate_optimizer(optimizer: KeyReader, translation: Translation) -> None:
    name = str(optimizer.take("type", ""))
    parameters = optimizer.take_section("params")
    overrides = translation.overrides
    if not name:
        return
    option = OPTIMIZERS.get(name.lower())
    if option is None:
        reason = "is no option of optimizer; scalewise explain optimizer lists them"
        translation.note("optimizer.type", name, reason)
    else:
        overrides["optimizer"] = option
        if name.lower() == "adam" and not parameters.take_flag("adam_w_mode", default=True):
            reason = "weight decay is decoupled; set optimizer.weight_decay=0"
            translation.note("optimizer.params.adam_w_mode", False, reason)
    for key, value in (
        ("lr", parameters.take_number("lr")),
        ("weight_decay", parameters.take_number("weight_decay")),
    ):
        if value is not None:
            overrides[f"optimizer.{key}"] = value
    if option in ("adamw", "lion"):
        betas = parameters.take("betas")
        if isinstance(betas, list) and len(betas) == 2:
            overrides |= {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}
    if option == "adamw" and (epsilon := parameters.take_number("eps")) is not None:
        overrides["optimizer.epsilon"] = epsilon
    if option == "sgd" and (momentum := parameters.take_number("momentum")) is not None:
        overrides["optimizer.momentum"] = momentum
    parameters.note_remaining(translation, REASONS)
    optimizer.note_remaining(translation, REASONS)


def _translate_schedule(scheduler: KeyReader, translation: Translation) -> None:
    name = str(scheduler.take("type", ""))
    parameters = scheduler.take_section("params")
    if not name:
        return
    overrides = translation.overrides
    if name in SCHEDULES:
        overrides["schedule"] = SCHEDULES[name]
        if (lr := parameters.take_number("warmup_max_lr")) is not None:
            overrides["optimizer.lr"] = lr
        if (warmup := parameters.take_number("warmup_num_steps")) is not None:
            overrides["schedule.warmup_steps"] = warmup
        if (steps := parameters.take_number("total_num_steps")) is not None:
            overrides["trainer.max_steps"] = steps
        if name == "WarmupCosineLR":
            final = parameters.take_number("cos_min_ratio", 0.0001)
            overrides["schedule.final"] = final
        if lowest := parameters.take_number("warmup_min_lr", 0):
            translation.note("scheduler.params.warmup_min_lr", lowest, "the warm-up starts at 0")
    else:
        reason = "is no option of schedule; scalewise explain schedule lists them"
        translation.note("scheduler.type", name, reason)
    parameters.note_remaining(translation, REASONS)
    scheduler.note_remaining(translation, REASONS)
