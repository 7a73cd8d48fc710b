"""Configs of training objectives; losses.py computes their losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, ClassVar, NoReturn

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.registry import register_option

IGNORED = -100
"""Label of positions without a loss."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Config of a training objective.

    An objective computes sums over a batch: the loss and its ``extra_metrics``. They are divided by
    the number of targets of the global batch.
    """

    loss_chunk: int | None = None
    """Chunk size of the loss: logits of at most this many positions exist at once, in tokens;
    null: all."""

    implementation: ClassVar[str] = ""
    """Module that registers functions of ``objectives.losses``; empty: that one itself."""
    pairs: ClassVar[bool] = False
    """Whether a sample is a pair of sequences, the first of which is preferred."""
    extra_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that are computed with the loss, as suffixes of metric keys."""
    is_user_defined: ClassVar[bool] = False
    """Whether a user-defined module replaces model, data, optimizer and schedule."""
    needs_encoder_decoder: ClassVar[bool] = False
    """Whether the model must be an encoder-decoder model."""
    reads_images: ClassVar[bool] = False
    """Whether the model inputs are images."""
    is_scalar: ClassVar[bool] = False
    """Whether ``sum_over_tokens`` returns a scalar."""
    supports_compile: ClassVar[bool] = True
    """Whether the blocks of its models can be compiled."""
    trace_only: ClassVar[bool] = False
    """Whether only a trace can plan the run, not the analytic memory and time models."""
    model_kind: ClassVar[str] = ""
    """Kind of models of the objective, for messages."""

    @property
    def rollouts_per_sample(self) -> int:
        """Number of answers that the model samples for each sample; 0: it samples none."""
        return 0

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Suffixes of the metric keys of the loss and its extra metrics."""
        return ("loss", *self.extra_metrics)

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        if self.loss_chunk is not None and self.loss_chunk < 1:
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, "must be 1 or more, or null")

    @property
    def reference_objective(self) -> ObjectiveConfig | None:
        """Objective that the reference model evaluates; None: there is no reference model."""
        return None

    @property
    def unregularized(self) -> ObjectiveConfig:
        """Objective of validation, without regularization."""
        return self


@register_option("objective", "causal_lm")
@dataclass(frozen=True)
class CausalLM(ObjectiveConfig):
    """Next-token prediction: cross-entropy, in nats."""

    is_scalar: ClassVar[bool] = True

    label_smoothing: float = 0.0
    """Fraction of the target probability that is spread over the whole vocabulary."""
    z_loss: float = 0.0
    """Coefficient of the mean over labels of ``log(Z)^2``, with Z the sum of the exponentials of
    the logits, which is added to the loss; PaLM uses 1e-4 (Chowdhery et al., 2022, section 5)."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        yield from super().validate()
        if not 0 <= self.label_smoothing < 1:
            reason = "must be a fraction in [0, 1)"
            yield ConfigIssue("objective.label_smoothing", self.label_smoothing, reason)
        if not (isfinite(self.z_loss) and self.z_loss >= 0):
            reason, fix = "must be a number of 0 or more", "set objective.z_loss=1e-4"
            yield ConfigIssue("objective.z_loss", self.z_loss, reason, fix)

    @property
    def unregularized(self) -> CausalLM:
        """Objective without label smoothing and z-loss."""
        return replace(self, label_smoothing=0.0, z_loss=0.0)


@register_option("objective", "seq2seq")
@dataclass(frozen=True)
class Seq2Seq(CausalLM):
    """Prediction of each answer token from the question: cross-entropy, in nats.

    The decoder input is the answer shifted right behind the model's start token, as in
    transformers' ``...ForConditionalGeneration``.
    """

    needs_encoder_decoder = True
    supports_compile = False
    model_kind = "encoder-decoder models"

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range, and of a chunked loss."""
        yield from super().validate()
        if self.loss_chunk is not None:
            reason = f"is not supported for {self.model_kind}"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)


@register_option("objective", "captioning")
@dataclass(frozen=True)
class Captioning(Seq2Seq):
    """Prediction of each caption token from the image: cross-entropy, in nats.

    Labels follow transformers' ``Blip2ForConditionalGeneration``: none on image tokens, nor on the
    token that starts the text.
    """

    reads_images = True
    model_kind = "vision-language models"


@register_option("objective", "classification")
@dataclass(frozen=True)
class Classification(CausalLM):
    """Classification of a text from its last token: cross-entropy, in nats.

    Only the head differs from a language model: it has one output per class, as in transformers'
    ``...ForSequenceClassification``.
    """

    extra_metrics = ("accuracy",)
    is_scalar = False


@dataclass(frozen=True)
class TokenLogProbabilities(ObjectiveConfig):
    """Log-probability of each token."""


@dataclass(frozen=True)
class LogProbabilities(TokenLogProbabilities):
    """Log-probability of each sequence."""


@dataclass(frozen=True)
class NextToken(ObjectiveConfig):
    """Logits of the token that follows one position of each sequence."""

    position: int = 0
    """Position in the sequence."""


@register_option("objective", "dpo")
@dataclass(frozen=True)
class DPO(LogProbabilities):
    """Direct preference optimization of chosen over rejected answers.

    ``-log sigmoid(beta ((log p - log p_ref)(chosen) - (log p - log p_ref)(rejected)))`` per pair
    (Rafailov et al., 2023, equation 7). The reference is the model before the first step.
    """

    beta: float = 0.1
    """Strength of the penalty for moving away from the reference model."""

    pairs = True
    extra_metrics = ("reward_margin", "reward_accuracy")

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        yield from super().validate()
        if not self.beta > 0:
            fix = "set objective.beta=0.1"
            yield ConfigIssue("objective.beta", self.beta, "must be positive", fix)

    @property
    def reference_objective(self) -> LogProbabilities:
        """Log-probability of each answer."""
        return LogProbabilities(self.loss_chunk)


@register_option("objective", "grpo")
@dataclass(frozen=True)
class GRPO(TokenLogProbabilities):
    """Group relative policy optimization: several answers per prompt, rewarded against their mean.

    The mean over tokens of ``1 - r - (ratio - 1) A + beta KL``, with ``A = (r - mean(r)) / std(r)``
    in a group and ``KL = p_ref / p - log(p_ref / p) - 1`` (Shao et al., 2024, DeepSeekMath,
    equations 3 and 4). Answers are used for one step, so that the ratio is 1 and never clipped.
    """

    answers: int = 8
    """Number of sampled answers per prompt and step."""
    beta: float = 0.0
    """Weight of the KL penalty against the reference, which is the model without its adapter."""

    extra_metrics = ("reward",)

    @property
    def rollouts_per_sample(self) -> int:
        """Number of sampled answers per prompt."""
        return self.answers

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Suffixes of the metric keys of the loss and its extra metrics."""
        return (*super().metric_keys, "kl") if self.beta else super().metric_keys

    @property
    def reference_objective(self) -> TokenLogProbabilities | None:
        """Log-probability of each token; None without KL penalty."""
        return TokenLogProbabilities() if self.beta else None

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        if self.loss_chunk is not None:
            reason = "is not supported: this loss weighs each token by the reward of its answer"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)
        if self.answers < 2:
            reason = "must be 2 or more: advantages compare the answers of a group"
            yield ConfigIssue("objective.answers", self.answers, reason, "set objective.answers=8")
        if not self.beta >= 0:
            fix = "set objective.beta=0"
            yield ConfigIssue("objective.beta", self.beta, "must be 0 or more", fix)


@register_option("objective", "module")
@dataclass(frozen=True)
class UserModule(ObjectiveConfig):
    """A user-defined LightningModule with its own steps, loss, optimizer and schedule."""

    target: str = ""
    """Import path of the class, ``package.module.Class``; its package must be in
    ``trusted_packages``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    held_out: str = "val_loss"
    """Name under which the module logs its validation loss."""

    is_user_defined = True
    supports_compile = False
    trace_only = True

    def validate(self) -> Iterator[ConfigIssue]:
        """Issue of a chunked loss: the module computes the loss itself."""
        if self.loss_chunk is not None:
            reason = "is not supported: a user-defined module computes its own loss"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)


@register_option("model", "module")
@register_option("optimizer", "module")
@register_option("schedule", "module")
@dataclass(frozen=True)
class SetByModule:
    """Placeholder for a group that a user-defined LightningModule decides itself.

    The analytic planner rejects it with a ``ConfigError``; use plan.method=trace.
    """

    imports: ClassVar[tuple[str, ...]] = ()
    """Packages that the option imports; those of the module are imported in its ranks."""

    def validate(self) -> Iterator[ConfigIssue]:
        """No issues: the option has no fields."""
        yield from ()

    validate_machine = validate

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # pickle and copy look up optional methods
            raise AttributeError(name)
        reason = "the analytic memory model does not cover user-defined modules"
        raise ConfigError.for_key("plan.method", "ledger", reason, "set plan.method=trace")
