"""Rules between the objective, user-defined modules included, and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from scalewise.adapters.config import NoAdapterConfig
from scalewise.errors import ConfigIssue
from scalewise.models.op_graph import Recompute
from scalewise.objectives import (
    DPO,
    GRPO,
    Captioning,
    Classification,
    ObjectiveConfig,
    Seq2Seq,
    UserModule,
)
from scalewise.objectives.config import SetByModule
from scalewise.precision import FloatFormat
from scalewise.quantization.config import NoQuantizationConfig
from scalewise.run_config import RunConfig
from scalewise.trainer_config import TrainerConfig
from scalewise.typed_override import format_override

DEFAULT_OPTIONS = {
    "model": "decoder_nano",
    "data": "corpus",
    "optimizer": "adamw",
    "schedule": "cosine",
}
"""Config groups that a user-defined module replaces, with the option to use without one."""
MODEL_AXES = ("pipeline", "context", "tensor")
"""Mesh axes that partition the computation of a model, instead of its batch or parameters."""


def misplaced_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for ``GROUP=module`` without objective=module, and for other options with it."""
    for group, default in DEFAULT_OPTIONS.items():
        config = getattr(run, group)
        is_module = config.is_user_defined if group == "data" else isinstance(config, SetByModule)
        chosen = run.option(group)
        if is_module and not run.objective.is_user_defined:
            fix = f"set objective=module, or {group}={default}"
            yield ConfigIssue(group, chosen, "requires objective=module", fix)
        elif run.objective.is_user_defined and not is_module:
            reason = f"is not supported with objective=module: the module defines its own {group}"
            yield ConfigIssue(group, chosen, reason, f"leave it out, or set {group}=module")


@singledispatch
def objective_issues(objective: ObjectiveConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for data or a model head of another objective."""
    chosen = run.option("data")
    if run.data.pairs:
        reason = "contains preference pairs, which this objective does not support"
        yield ConfigIssue("data", chosen, reason, "set objective=dpo, or data=chat")
    if run.data.classes:
        reason = "contains class labels, which this objective does not support"
        yield ConfigIssue("data", chosen, reason, "set objective=classification, or data=text")
    if run.data.target_length:
        reason = "contains encoder inputs, which this objective does not support"
        yield ConfigIssue("data", chosen, reason, "set objective=seq2seq, or data=chat")
    if run.data.image_size:
        reason = "contains images, which this objective does not support"
        yield ConfigIssue("data", chosen, reason, "set objective=captioning, or data=text")
    if run.model.classes:
        reason = "replaces the token logits, which this objective requires"
        fix = "set model.classes=null, or objective=classification"
        yield ConfigIssue("model.classes", run.model.classes, reason, fix)


@objective_issues.register(DPO)
def _dpo_issues(objective: DPO, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for data without preference pairs."""
    if not run.data.pairs:
        chosen = run.option("data")
        reason = "contains no preference pairs"
        fix = "set data=preference 'data.paths=[my/*.jsonl]', or objective=causal_lm"
        yield ConfigIssue("data", chosen, reason, fix)


@objective_issues.register(GRPO)
def _grpo_issues(objective: GRPO, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for data without a reward, and for a KL penalty without a reference model."""
    if not run.data.answer_length:
        chosen = run.option("data")
        reason = "does not define a reward of answers"
        fix = "set data=reversal, or objective=causal_lm"
        yield ConfigIssue("data", chosen, reason, fix)
    if objective.beta > 0 and not run.adapter.can_disable:
        reason = "requires a reference model: an adapter that can be disabled"
        fix = "set adapter=lora, or objective.beta=0"
        yield ConfigIssue("objective.beta", objective.beta, reason, fix)


@objective_issues.register(Classification)
def _classification_issues(objective: Classification, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for data without classes, and for a head of another size or a frozen one."""
    if not (num_classes := len(run.data.classes)):
        chosen = run.option("data")
        reason = "contains no class labels"
        fix = "set data=corpus_classes, or objective=causal_lm"
        yield ConfigIssue("data", chosen, reason, fix)
    elif run.model.classes != num_classes:
        class_names = ", ".join(run.data.classes)
        reason = f"differs from the {num_classes} classes of data.classes: {class_names}"
        fix = f"set model.classes={num_classes} model.tied=false"
        if not run.model.has_key("classes"):
            fix = f"set model=decoder_nano {fix[4:]}, or choose another decoder of scalewise"
        yield ConfigIssue("model.classes", run.model.classes, reason, fix)
    elif not any(w.trainable for w in run.adapter.weights(run.model) if w.role == "head"):
        reason = "freezes the randomly initialized classification head"
        has_option = "trained" in vars(run.adapter)
        override = "'adapter.trained=[head]'"
        fix = f"set {override}" if has_option else f"set adapter=lora {override}"
        yield ConfigIssue("adapter", run.option("adapter"), reason, fix)


@objective_issues.register(Seq2Seq)
def _seq2seq_issues(objective: Seq2Seq, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for a model without encoder, for data without encoder inputs."""
    yield from _encoder_issues(run)


@objective_issues.register(Captioning)
def _captioning_issues(objective: Captioning, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for a model or data without images, for other image sizes."""
    yield from _image_issues(run)


def _encoder_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for a model without encoder, and for data without encoder inputs."""
    if not run.model.is_encoder_decoder:
        chosen = run.option("model")
        reason = "has no encoder"
        fix = "set model=hf model.path=FOLDER of a model such as T5, or objective=causal_lm"
        yield ConfigIssue("model", chosen, reason, fix)
    if not run.data.target_length:
        chosen = run.option("data")
        reason = "contains no encoder inputs"
        fix = "set data=seq2seq 'data.paths=[my/*.jsonl]', or objective=causal_lm"
        yield ConfigIssue("data", chosen, reason, fix)


def _image_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for a model or data without images, and for different image sizes."""
    model_size, data_size = run.model.image_size, run.data.image_size
    if not model_size:
        chosen = run.option("model")
        fix = "set model=hf model.path=FOLDER of a model such as BLIP-2, "
        fix += "or objective=causal_lm"
        yield ConfigIssue("model", chosen, "does not accept images", fix)
    if not data_size:
        chosen = run.option("data")
        fix = "set data=captions 'data.paths=[my/*.jsonl]', or data=shapes"
        yield ConfigIssue("data", chosen, "contains no images", fix)
    if model_size and data_size and model_size != data_size:
        reason = f"differs from the image size of the model, {model_size}"
        fix = f"set data.image_size={model_size}"
        yield ConfigIssue("data.image_size", data_size, reason, fix)


@objective_issues.register(UserModule)
def _user_module_issues(objective: UserModule, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for options without effect on the module, and for incompatible strategies."""
    yield from _module_group_issues(run)
    yield from _module_trainer_issues(run.trainer)
    yield from _module_parallelism_issues(run)
    yield from _planning_issues(run, "user-defined modules")


def _module_group_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    recompute = getattr(run.memory, "recompute", None)
    for group, is_set in (
        ("adapter", not isinstance(run.adapter, NoAdapterConfig)),
        ("quantization", not isinstance(run.quantization, NoQuantizationConfig)),
        ("memory", recompute is not Recompute.nothing or run.memory.offload),
        ("compile", run.is_compiled),
    ):
        if is_set:
            reason = "is not supported with a user-defined module, which scalewise does not modify"
            yield ConfigIssue(group, run.option(group), reason, f"set {group}=none")


def _module_trainer_issues(trainer: TrainerConfig) -> Iterator[ConfigIssue]:
    defaults = TrainerConfig()
    if trainer.micro_batch != defaults.micro_batch:
        reason = "is not supported: a user-defined data loader sets the batch size"
        fix = f"set trainer.micro_batch={defaults.micro_batch}, and the batch size in "
        fix += "data.arguments"
        yield ConfigIssue("trainer.micro_batch", trainer.micro_batch, reason, fix)
    if trainer.global_batch is not None:
        reason = "is not supported: a user-defined module takes one step per batch of its loader"
        fix = "set trainer.global_batch=null"
        yield ConfigIssue("trainer.global_batch", trainer.global_batch, reason, fix)
    for key, reason in (
        ("batch_warmup", "a user-defined module takes one step per batch of its loader"),
        ("sequence_warmup", "batches of a user-defined data loader need not contain sequences"),
    ):
        if stages := getattr(trainer, key):
            fix = f"set {format_override(f'trainer.{key}', {})}"
            yield ConfigIssue(f"trainer.{key}", [*stages], f"is not supported: {reason}", fix)
    if trainer.max_tokens is not None:
        reason = "is not supported: a user-defined module does not report its tokens"
        fix = "set trainer.max_steps"
        yield ConfigIssue("trainer.max_tokens", trainer.max_tokens, reason, fix)
    if trainer.validation_rows != defaults.validation_rows:
        reason = "is not supported: a user-defined module validates on its whole data loader"
        fix = f"set trainer.validation_rows={defaults.validation_rows}"
        yield ConfigIssue("trainer.validation_rows", trainer.validation_rows, reason, fix)
    epochs = trainer.max_epochs
    if epochs is not None and epochs % 1:
        fix = f"set trainer.max_epochs={max(1, round(epochs))}"
        yield ConfigIssue("trainer.max_epochs", epochs, "is not a whole number of epochs", fix)


def _module_parallelism_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    parallelism = run.parallelism
    yield from parallelism.validate_on_device(run.hardware.device)
    sizes = getattr(parallelism, "sizes", {})
    for axis in MODEL_AXES:
        if sizes.get(axis, 1) > 1:
            reason = "cannot partition a user-defined module: only data parallelism and sharding "
            reason += "of parameters are supported"
            fix = "set parallelism=fsdp, hsdp, ddp or deepspeed_zero3"
            yield ConfigIssue(f"parallelism.{axis}", sizes[axis], reason, fix)
    for key in ("cpu_offload", "offload_optimizer", "offload_parameters"):
        if (value := getattr(parallelism, key, "none")) not in (False, "none"):
            reason = "does not offload a user-defined module"
            fix = f"set parallelism.{key}={'false' if value is True else 'none'}"
            yield ConfigIssue(f"parallelism.{key}", value, reason, fix)
    is_fp16 = run.precision.compute is FloatFormat.fp16
    if is_fp16 and (sizes or parallelism.flattens_parameters):
        chosen = run.option("precision")
        reason = "requires gradient scaling, which this parallelism strategy does not support"
        yield ConfigIssue("precision", chosen, reason, "set precision=bf16_mixed")


def _planning_issues(run: RunConfig, subject: str) -> Iterator[ConfigIssue]:
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
