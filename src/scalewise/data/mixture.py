"""Mixture of data sources: named sources with weights, repetition limits and stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any

from scalewise.data.base import DataConfig, TokenizedDataConfig
from scalewise.data.text import PretokenizedData
from scalewise.data.tokenizer import END_OF_TEXT
from scalewise.errors import ConfigIssue, did_you_mean
from scalewise.registry import option_name, register_option, with_fields

NAME_PATTERN = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Pattern of names of sources and stages, which are parts of override keys and of metrics."""
SHARED_FIELDS = ("sequence", "tokenizer", "vocabulary", "end_of_text")
"""Options that all sources take from the mixture."""


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture."""

    data: DataConfig
    """Option of the data group, added by ``+data@data.sources.NAME.data=text``."""
    weight: float | None = None
    """Relative number of samples from the source; null in all sources: the size of each."""
    max_repetitions: float | None = None
    """Most passes over the source, in epochs; other sources replace it then. null: no limit."""


@dataclass(frozen=True)
class MixtureStage:
    """A later part of training with other weights, such as annealing."""

    start: float = 0.0
    """Start of the stage, as a fraction of the optimizer steps."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights by source; an omitted source keeps its own weight."""


@register_option("data", "mixture")
@dataclass(frozen=True)
class MixtureData(TokenizedDataConfig):
    """Samples of several sources in fixed proportions, each source shuffled by itself.

    All sources have the sequence length and the tokenizer of the mixture. Without a given
    tokenizer, one is trained on the texts of all sources.
    """

    sequence: int = 256
    """Sequence length of all sources, in tokens."""
    sources: Mapping[str, MixtureSource] = field(default_factory=dict)
    """Sources by name."""
    stages: Mapping[str, MixtureStage] = field(default_factory=dict)
    """Later stages of training with other weights, by name; before the first one, sources have
    their own weights."""
    temperature: float = 1.0
    """Temperature of the weights, which become ``weight ** (1 / temperature)``; above 1, rare
    sources are read more often."""
    tokenizer: str | None = None
    """Path of a tokenizer.json or of a tokenizer's folder; null: train a byte-level BPE on the text
    of all sources."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    end_of_text: str = END_OF_TEXT
    """Token between documents, by its name in the given tokenizer."""

    implementation = "scalewise.data.mixture_splits"

    @property
    def packing(self) -> bool:  # type: ignore[override]  # a field of other options
        """Whether a sequence of some source contains several texts."""
        return any(source.data.packing for source in self.sources.values())

    @property
    def special_tokens(self) -> bool:  # type: ignore[override]  # a field of other options
        """Whether documents of every source get the special tokens of a given tokenizer."""
        return all(getattr(source.data, "special_tokens", True) for source in self.sources.values())

    @property
    def is_continuous_text(self) -> bool:
        """Whether any part of a sequence of every source can be trained on alone."""
        return all(source.data.is_continuous_text for source in self.sources.values())

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is trained on the texts, since none is given."""
        return self.tokenizer is None and any(
            isinstance(source.data, TokenizedDataConfig) for source in self.sources.values()
        )

    @property
    def required_vocabulary(self) -> int | None:
        """Largest vocabulary of the tokenizer and the sources; None if the data decide it."""
        sizes = [data.required_vocabulary for data in self.source_configs().values()]
        return max((size for size in sizes if size is not None), default=None)

    def source_configs(self) -> dict[str, DataConfig]:
        """Config of each source, with the sequence length and the tokenizer of the mixture."""
        return {name: self._with_shared(source.data) for name, source in self.sources.items()}

    def _with_shared(self, data: DataConfig) -> DataConfig:
        shared: dict[str, Any] = {name: getattr(self, name) for name in _shared_fields(data)}
        return with_fields(data, **shared)

    def stage_weights(self, sizes: Mapping[str, int]) -> list[tuple[float, dict[str, float]]]:
        """Start and weights of each stage, in order, with the temperature applied.

        Args:
            sizes: Number of samples of each source.
        """
        weights = {
            name: float(sizes[name]) if source.weight is None else source.weight
            for name, source in self.sources.items()
        }
        stages = sorted(self.stages.values(), key=lambda stage: stage.start)
        starts = [
            (0.0, weights),
            *((stage.start, {**weights, **stage.weights}) for stage in stages),
        ]
        return [
            (start, {name: weight ** (1 / self.temperature) for name, weight in entries.items()})
            for start, entries in starts
        ]

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues of the weights, the stages and each source."""
        yield from super().validate()
        if not self.sources:
            fix = "add +data@data.sources.NAME.data=text for each source"
            yield ConfigIssue("data.sources", "{}", "is empty", fix)
        if not self.temperature > 0:
            fix = "set data.temperature=1"
            yield ConfigIssue("data.temperature", self.temperature, "must be positive", fix)
        for kind, names in (("sources", self.sources), ("stages", self.stages)):
            for name in names:
                if not NAME_PATTERN.fullmatch(name):
                    reason = "must consist of letters, digits and underscores"
                    yield ConfigIssue(f"data.{kind}", name, reason, "rename it")
        for name, source in self.sources.items():
            yield from self._source_issues(name, source)
        yield from self._weight_issues()
        yield from self._tokenizer_issues()

    def _source_issues(self, name: str, source: MixtureSource) -> Iterator[ConfigIssue]:
        """Yield issues of a source: an option that cannot be mixed, and its own issues."""
        key, data = f"data.sources.{name}", source.data
        if (repetitions := source.max_repetitions) is not None and not repetitions > 0:
            fix = f"set {key}.max_repetitions=null"
            yield ConfigIssue(f"{key}.max_repetitions", repetitions, "must be positive", fix)
        if reason := _unmixable_reason(data):
            fix = f"set data@{key}.data=text, tokens, hf, corpus, chat or synthetic"
            yield ConfigIssue(f"{key}.data", option_name(data), reason, fix)
            return
        if getattr(data, "streaming", False):
            reason = "is not supported in a mixture, which shuffles each source"
            fix = f"set {key}.data.streaming=false"
            yield ConfigIssue(f"{key}.data.streaming", True, reason, fix)
        defaults = {entry.name: entry.default for entry in fields(data)}  # type: ignore[arg-type]  # a config is a dataclass
        for shared in _shared_fields(data):
            if (value := getattr(data, shared)) not in (defaults[shared], getattr(self, shared)):
                reason = "is an option of the mixture, for all sources"
                fix = f"set data.{shared}={value}, and remove it here"
                yield ConfigIssue(f"{key}.data.{shared}", value, reason, fix)
        for issue in self._with_shared(data).validate():
            if issue.key.removeprefix("data.") not in SHARED_FIELDS:  # an issue of the mixture
                yield source_issue(name, issue)

    def _weight_issues(self) -> Iterator[ConfigIssue]:
        """Yield weights that are negative, missing, unknown or never positive."""
        keys = {f"data.sources.{name}.weight": it.weight for name, it in self.sources.items()}
        for stage, config in self.stages.items():
            if not 0 <= config.start < 1:
                key = f"data.stages.{stage}.start"
                reason = "must be a fraction of the steps, at least 0 and below 1"
                yield ConfigIssue(key, config.start, reason, f"set {key}=0.8")
            for name, weight in config.weights.items():
                if name not in self.sources:
                    key, fix = f"data.stages.{stage}.weights", did_you_mean(name, self.sources)
                    yield ConfigIssue(key, name, "is not a source of the mixture", fix)
                keys[f"data.stages.{stage}.weights.{name}"] = weight
        invalid = [
            ConfigIssue(key, weight, "must be a finite number of 0 or more", f"set {key}=1")
            for key, weight in keys.items()
            if weight is not None and not (isfinite(weight) and weight >= 0)
        ]
        yield from invalid
        unset = [name for name, source in self.sources.items() if source.weight is None]
        if 0 < len(unset) < len(self.sources):
            key, reason = (
                f"data.sources.{unset[0]}.weight",
                "is null, but other sources have weights",
            )
            yield ConfigIssue(key, None, reason, f"set {key}=1, or null in all sources")
        elif unset and (incomplete := self._stage_without_all_weights()):
            reason = "omits sources whose weight is null"
            key, weights = (
                f"data.stages.{incomplete}.weights",
                dict(self.stages[incomplete].weights),
            )
            yield ConfigIssue(key, weights, reason, f"set {key}.NAME for all sources")
        elif not invalid:
            yield from self._zero_weight_issues()

    def _stage_without_all_weights(self) -> str | None:
        incomplete = (
            name
            for name, stage in self.stages.items()
            if self.sources.keys() - stage.weights.keys()
        )
        return next(incomplete, None)

    def _zero_weight_issues(self) -> Iterator[ConfigIssue]:
        """Yield sources that are never read, and stages that read none."""
        weights = {
            name: 1.0 if it.weight is None else it.weight for name, it in self.sources.items()
        }
        tables = {
            f"data.stages.{name}.weights": {**weights, **stage.weights}
            for name, stage in self.stages.items()
        }
        if not any(stage.start <= 0 for stage in self.stages.values()):
            tables = {"data.sources": weights, **tables}
        unread = [name for name in weights if not any(table.get(name) for table in tables.values())]
        for name in unread:
            key, reason = f"data.sources.{name}.weight", "is 0 in all stages: it is never read"
            yield ConfigIssue(key, 0, reason, f"set {key}=1, or remove the source")
        for key, table in tables.items():
            if table and not unread and not any(table.values()):
                reason = "have weight 0 only; it must be positive for one source"
                yield ConfigIssue(key, dict(table), reason, f"set {_weight_key(key)}=1")

    def _tokenizer_issues(self) -> Iterator[ConfigIssue]:
        """Yield an issue for sources that a trained tokenizer does not match."""
        if not self.trains_tokenizer:
            return
        configs = [source.data for source in self.sources.values()]
        fix = "set data.tokenizer=FOLDER/tokenizer.json"
        if any(isinstance(data, PretokenizedData) for data in configs):
            reason = "trains a tokenizer, which the token ids of data=tokens do not have"
            yield ConfigIssue("data.tokenizer", None, reason, fix)
        elif not any(trains_shared_tokenizer(data) for data in configs):
            reason = "requires the text of at least one source of data=text, hf or corpus"
            yield ConfigIssue("data.tokenizer", None, reason, fix)


def _weight_key(table_key: str) -> str:
    return "data.sources.NAME.weight" if table_key == "data.sources" else f"{table_key}.NAME"


def trains_shared_tokenizer(data: DataConfig) -> bool:
    """Whether the tokenizer of a mixture is trained on the text of a source."""
    return isinstance(data, TokenizedDataConfig) and not hasattr(data, "kind")


def _shared_fields(data: DataConfig) -> tuple[str, ...]:
    """Options of a source that the mixture sets."""
    return SHARED_FIELDS if isinstance(data, TokenizedDataConfig) else SHARED_FIELDS[:1]


def _unmixable_reason(data: DataConfig) -> str:
    """Reason why a data option cannot be a source; empty if it can."""
    if isinstance(data, MixtureData):
        return "is a mixture itself"
    causal = not (data.pairs or data.classes or data.target_length or data.image_size)
    if not causal or data.answer_length or data.is_user_defined:
        return "is not data of objective=causal_lm"
    return ""


def source_issue(name: str, issue: ConfigIssue) -> ConfigIssue:
    """Issue of a source's own config, with the keys of the mixture."""
    prefix = f"data.sources.{name}.data."
    fix = re.sub(r"(?<![\w.@])data\.", prefix, issue.fix)
    return replace(issue, key=re.sub(r"^data\.", prefix, issue.key), fix=fix)
