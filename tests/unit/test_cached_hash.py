"""Hashes that frozen dataclasses compute once."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, fields, replace

import pytest

from scalewise.cached_hash import ATTRIBUTE, cache_hash
from scalewise.optimizers import AdamWConfig

HASHED: list[str] = []


class Text(str):
    """Text that records when it is hashed."""

    __slots__ = ()

    def __hash__(self) -> int:
        HASHED.append(str(self))
        return super().__hash__()


@cache_hash
@dataclass(frozen=True)
class Named:
    """Dataclass with one field."""

    name: str = "x"


@cache_hash
@dataclass(frozen=True)
class Unhashable:
    """Dataclass with a field that has no hash."""

    values: dict[str, int] = field(default_factory=dict)


def test_hash_is_computed_once_and_equal_for_equal_instances() -> None:
    HASHED.clear()
    named = Named(Text("a"))
    assert {named: 1}[named] == 1
    assert hash(named) == hash(Named("a"))
    assert HASHED == ["a"]


@pytest.mark.parametrize("duplicate", [copy.copy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_and_pickles_leave_the_hash_out(duplicate: object) -> None:
    optimizer = AdamWConfig()
    assert hash(optimizer) == vars(optimizer)[ATTRIBUTE]
    copied = duplicate(optimizer)  # type: ignore[operator]  # parametrized by functions
    assert copied == optimizer
    assert ATTRIBUTE not in vars(copied)
    assert ATTRIBUTE not in {entry.name for entry in fields(optimizer)}


def test_changed_copy_has_its_own_hash() -> None:
    optimizer = AdamWConfig()
    assert hash(replace(optimizer, offload=True)) != hash(optimizer)


def test_unhashable_dataclass_stays_unhashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Unhashable())
