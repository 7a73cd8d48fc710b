"""Hash of frozen dataclasses, computed once per instance.

The planner's caches look up the same configs thousands of times in a search. A generated
``__hash__`` reads every field at each lookup.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
ATTRIBUTE = "_cached_hash"
"""Name of the attribute that stores the hash; it is no field and is not pickled."""


def cache_hash(cls: Class) -> Class:
    """Class decorator of a frozen dataclass: each instance computes its hash once.

    A class without a hash is returned unchanged. The hash of a string differs between processes,
    so pickles and copies leave it out.
    """
    compute: Callable[[Any], int] | None = cls.__dict__.get("__hash__")
    if compute is None:
        return cls

    def cached_hash(self: Any) -> int:
        try:
            value: int = self.__dict__[ATTRIBUTE]
        except KeyError:
            value = self.__dict__[ATTRIBUTE] = compute(self)
        return value

    def state_without_hash(self: Any) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != ATTRIBUTE}

    changed: Any = cls
    changed.__hash__ = cached_hash
    if "__getstate__" not in cls.__dict__:
        changed.__getstate__ = state_without_hash
    return cls
