"""Builders are registered by the module that a config names, imported at the first call."""

import sys
from pathlib import Path

import pytest

from scalewise.lazy_dispatch import lazy_dispatch, lazy_dispatch_by, not_registered

MODULE = """
from lazy_dispatch_base import Config, build

@build.register(Config)
def _build(config: Config, scale: int) -> int:
    return config.size * scale
"""
BASE = """
from scalewise.lazy_dispatch import lazy_dispatch, lazy_dispatch_by, not_registered

class Config:
    implementation = "lazy_dispatch_builders"
    size = 3

@lazy_dispatch
def build(config: object, scale: int) -> int:
    \"\"\"Docstring of the default.\"\"\"
    raise NotImplementedError
"""


def test_dispatch_imports_the_implementation_at_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_dispatch_base.py").write_text(BASE)
    (tmp_path / "lazy_dispatch_builders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_dispatch_base", "lazy_dispatch_builders"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import lazy_dispatch_base  # type: ignore[import-not-found]

    assert "lazy_dispatch_builders" not in sys.modules
    assert lazy_dispatch_base.build(lazy_dispatch_base.Config(), scale=2) == 6
    assert "lazy_dispatch_builders" in sys.modules
    assert lazy_dispatch_base.build.__doc__ == "Docstring of the default."


def test_dispatch_inherits_registrations_and_falls_back_to_the_default() -> None:
    @lazy_dispatch
    def name(config: object) -> str:
        return "default"

    @name.register(int)
    def _name_integer(config: int) -> str:
        return "integer"

    assert name(True) == "integer"
    assert name("text") == "default"


def test_dispatch_error_names_function_and_type() -> None:
    @lazy_dispatch
    def build(config: object) -> None:
        raise not_registered(build, config)

    with pytest.raises(NotImplementedError, match="build supports no str: register one"):
        build("text")


def test_lazy_dispatch_by_imports_the_module_of_another_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        implementation = "module_that_does_not_exist"
        graphs = "lazy_dispatch_graphs"

    @lazy_dispatch_by("graphs")
    def build(config: object) -> bool:
        return "lazy_dispatch_graphs" in sys.modules

    (tmp_path / "lazy_dispatch_graphs.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazy_dispatch_graphs", raising=False)
    assert build(Config())
