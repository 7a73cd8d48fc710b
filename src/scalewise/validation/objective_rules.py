"""Rules between the objective and the data, model, adapter and planning options of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from scalewise.activation_checkpointing import AutoCheckpointing
from scalewise.errors import ConfigIssue
from scalewise.objectives import (
    DPO,
    GRPO,
    Captioning,
    Classification,
    ObjectiveConfig,
    Seq2Seq,
    UserModule,
)
from scalewise.run_config import RunConfig
from scalewise.trainer_config import AUTO, SIZE
from scalewise.validation.compatibility import planning_issues
from scalewise.validation.user_module_rules import user_module_issues


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
    """Yield issues for a model without encoder, for data without encoder inputs, and planning."""
    yield from _encoder_issues(run)
    yield from _trace_only_issues(objective, run)


@objective_issues.register(Captioning)
def _captioning_issues(objective: Captioning, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for a model or data without images, for other image sizes, and planning."""
    yield from _image_issues(run)
    yield from _trace_only_issues(objective, run)


@objective_issues.register(UserModule)
def _user_module_issues(objective: UserModule, run: RunConfig) -> Iterator[ConfigIssue]:
    yield from user_module_issues(run)


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


def _trace_only_issues(objective: Seq2Seq, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for options that require the analytic memory model."""
    yield from planning_issues(run, objective.model_kind)
    reason = f"requires the analytic memory model, which does not cover {objective.model_kind}"
    if isinstance(run.memory, AutoCheckpointing):
        yield ConfigIssue("memory", "auto", reason, "set memory=checkpoint_full")
    if run.trainer.micro_batch == AUTO:
        yield ConfigIssue(SIZE, AUTO, reason, f"set {SIZE}=1")
