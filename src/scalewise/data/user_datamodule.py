"""User-defined LightningDataModule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scalewise.data.base import DataConfig
from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


@register_option("data", "module")
@dataclass(frozen=True)
class UserDataModule(DataConfig):
    """A user-defined LightningDataModule; one sample counts as one token."""

    target: str = ""
    """Import path of the class, ``package.module.Class``; empty: the loaders of the user-defined
    module."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""

    split_iterable: bool = True
    """Whether each rank reads every N-th sample of an iterable dataset; false: the dataset splits
    by rank itself."""

    sequence = 1
    is_user_defined = True

    @property
    def required_vocabulary(self) -> int | None:
        """None: a batch need not contain token ids."""
        return None

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield nothing: the class is checked with the run."""
        yield from ()
