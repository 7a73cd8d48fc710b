"""Reasons why a process cannot load the fake CUDA device; tests/dry_cuda trains on it."""

import sys
from pathlib import Path

import pytest

from scalewise.tracing import fake_cuda
from scalewise.tracing.fake_cuda import FakeCudaError, load_fake_cuda


def test_torch_must_not_be_imported() -> None:
    assert "torch" in sys.modules
    with pytest.raises(FakeCudaError, match="torch is imported already"):
        load_fake_cuda()


def test_torch_must_not_have_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(fake_cuda, "_torch_folder", lambda: tmp_path)
    with pytest.raises(FakeCudaError, match="this build of torch has CUDA itself"):
        load_fake_cuda()


def test_compiler_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(fake_cuda, "_has_cuda", lambda: False)
    monkeypatch.setattr(fake_cuda.shutil, "which", lambda name: None)
    with pytest.raises(FakeCudaError, match=r"g\+\+ is not installed"):
        load_fake_cuda()


def test_error_of_the_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "fake_cuda.cpp"
    source.write_text("no C++")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fake_cuda, "_has_cuda", lambda: False)
    monkeypatch.setattr(fake_cuda, "SOURCE", source)
    with pytest.raises(FakeCudaError, match=r"g\+\+ fails: .*error"):
        load_fake_cuda()
