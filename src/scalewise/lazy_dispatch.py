"""Builders of configs: functions dispatched on a config's type, whose code is imported when needed.

A config class imports no torch. It names the module of its builders instead, as the class
attribute ``implementation``; that module registers them::

    # models/build.py
    @lazy_dispatch
    def build_meta(config: ModelConfig, stage: StageSlice) -> ModelModule: ...

    # models/decoder/config.py
    class DecoderConfig(ModelConfig):
        implementation = "scalewise.models.decoder.model"

    # models/decoder/model.py
    @build_meta.register(DecoderConfig)
    def _build_decoder(config: DecoderConfig, stage: StageSlice) -> DecoderModule:
        return DecoderModule(config, stage)
"""

from collections.abc import Callable
from functools import partial, singledispatch, update_wrapper
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


class lazy_dispatch(Generic[C, P, R]):  # noqa: N801 (a decorator, as functools.singledispatch)
    """:func:`functools.singledispatch` that imports ``config.implementation`` before the call.

    Args:
        default: Decorated function, which is called for types without a registered one.
        attribute: Attribute of a config that names the module to import.
    """

    def __init__(
        self, default: Callable[Concatenate[C, P], R], attribute: str = "implementation"
    ) -> None:
        self._attribute = attribute
        self._dispatcher = singledispatch(default)
        self.register = self._dispatcher.register
        self.dispatch = self._dispatcher.dispatch
        update_wrapper(self, default)

    def __call__(self, config: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function that is registered for the type of ``config``."""
        return self.bind(config)(*args, **kwargs)

    def bind(self, config: C) -> Callable[P, R]:
        """Function that is registered for the type of ``config``, with its first argument set."""
        if module := getattr(config, self._attribute, ""):
            import_module(module)
        function: Callable[Concatenate[C, P], R] = self._dispatcher.dispatch(type(config))
        return partial(function, config)


def lazy_dispatch_by(
    attribute: str,
) -> Callable[[Callable[Concatenate[C, P], R]], lazy_dispatch[C, P, R]]:
    """Decorator :class:`lazy_dispatch` for functions of the module that ``attribute`` names."""
    return lambda default: lazy_dispatch(default, attribute)


def not_registered(function: Any, config: object) -> NotImplementedError:
    """Error of a dispatched ``function`` that has none for the type of ``config``."""
    name = type(config).__name__
    return NotImplementedError(f"{function.__name__} supports no {name}: register one")
