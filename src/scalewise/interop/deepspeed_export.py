"""DeepSpeed's JSON config of a run."""

from __future__ import annotations

from scalewise.errors import ConfigError
from scalewise.interop.translation import ExternalConfig
from scalewise.lr_schedules import ConstantConfig, CosineConfig, LinearConfig
from scalewise.optimizers.config import AdamWConfig
from scalewise.optimizers.lr_transfer import LRTransfer
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.run_config import RunConfig
from scalewise.strategies.deepspeed_setup import build_deepspeed_config


def deepspeed_config(run: RunConfig) -> ExternalConfig:
    """Return the config that the engine of a run gets, with its optimizer and schedule.

    Raises ``ConfigError`` for a strategy without DeepSpeed.
    """
    parallelism = run.parallelism
    if not isinstance(parallelism, DeepSpeedConfig):
        reason = "is not DeepSpeed's"
        fix = "set parallelism=deepspeed_zero3, or use scalewise export accelerate"
        raise ConfigError.for_key("parallelism", run.option("parallelism"), reason, fix)
    counts = run.model.num_parameters, run.trainable_parameters
    folder = parallelism.nvme_path or "nvme"
    config = ExternalConfig(build_deepspeed_config(parallelism, run, folder, *counts))
    config.values["train_batch_size"] = run.global_batch
    if run.trainer.batch_warmup:
        config.notes.append("trainer.batch_warmup: the config has one batch size for all steps")
    if run.trainer.sequence_warmup:
        config.notes.append("trainer.sequence_warmup: the script has to truncate sequences")
    _add_optimizer(run, config)
    _add_schedule(run, config)
    config.notes.append("model, data and objective belong to the script")
    return config


def _add_optimizer(run: RunConfig, config: ExternalConfig) -> None:
    optimizer = run.optimizer
    if not isinstance(optimizer, AdamWConfig):
        name = run.option("optimizer")
        config.notes.append(f"optimizer={name}: pass it to deepspeed.initialize")
        return
    parameters = {
        "lr": optimizer.lr,
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }
    config.values["optimizer"] = {"type": "AdamW", "params": parameters}
    config.notes.append("optimizer.weight_decay: DeepSpeed also decays vectors, norms and biases")
    by_group = ["optimizer.lr_transfer=mup"] * (optimizer.lr_transfer is LRTransfer.mup)
    for name in ("lr_factors", "no_decay"):
        by_group += [f"optimizer.{name}"] * bool(getattr(optimizer, name))
    for key in by_group:
        config.notes.append(f"{key}: pass the parameter groups to deepspeed.initialize")


def _add_schedule(run: RunConfig, config: ExternalConfig) -> None:
    schedule, steps = run.schedule, run.trainer.max_steps
    if rewarmup := getattr(schedule, "rewarmup_steps", 0):
        config.notes.append(f"schedule.rewarmup_steps={rewarmup}: has no counterpart in DeepSpeed")
    parameters: dict[str, object] = {
        "warmup_num_steps": schedule.warmup_steps,
        "warmup_type": "linear",
    }
    if isinstance(schedule, ConstantConfig):
        name = "WarmupLR"
    elif isinstance(schedule, LinearConfig) and schedule.final == 0 and steps is not None:
        name = "WarmupDecayLR"
    elif isinstance(schedule, CosineConfig) and steps is not None:
        name = "WarmupCosineLR"
        parameters["cos_min_ratio"] = schedule.final
    else:
        config.notes.append(f"schedule={run.option('schedule')}: pass it to deepspeed.initialize")
        return
    if steps is not None and name != "WarmupLR":
        parameters["total_num_steps"] = steps
    if name != "WarmupCosineLR":
        parameters |= {"warmup_min_lr": 0, "warmup_max_lr": run.optimizer.lr}
    config.values["scheduler"] = {"type": name, "params": parameters}
