"""A CUDA device without a GPU, on which traces run CUDA's operators with fake tensors.

A CPU build of torch aborts when autograd meets a CUDA tensor, even a fake one. ``fake_cuda.cpp``
registers a device that does nothing; torch must not be imported before it is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from scalewise.data.build_cache import build_cached, is_cached
from scalewise.errors import ScalewiseError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIBRARY = "libscalewise_fake_cuda.so"
COMPILE_SECONDS = 10
"""Compile time on one core."""

BACKENDS = ("math", "flash", "efficient", "cudnn")
"""Attention kernels by the value of torch's enumeration ``SDPBackend``."""


class FakeCudaError(ScalewiseError):
    """The fake CUDA device cannot be loaded in this process."""


class FakeCuda:
    """Loaded library of the fake device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.scalewise_backend_count.restype = ctypes.c_int64

    def prefer_cudnn(self, value: bool) -> None:
        """Whether attention prefers cuDNN, as with its versions above 9.15 on an H100."""
        self._library.scalewise_prefer_cudnn(int(value))

    def reset_backend_counts(self) -> None:
        """Forget the attention calls so far."""
        self._library.scalewise_reset_backend_counts()

    def backend_counts(self) -> dict[str, int]:
        """Number of attention calls by kernel since the last reset."""
        counts = {
            name: self._library.scalewise_backend_count(index)
            for index, name in enumerate(BACKENDS)
        }
        return {name: count for name, count in counts.items() if count}


_loaded: list[FakeCuda] = []


def loaded_fake_cuda() -> FakeCuda | None:
    """The library, if this process has loaded it."""
    return _loaded[0] if _loaded else None


def load_fake_cuda() -> FakeCuda:
    """Load the fake device, compiled once per machine and version of torch.

    Raises:
        FakeCudaError: torch is imported already or has CUDA itself, or nothing compiles.
    """
    if _loaded:
        return _loaded[0]
    if "torch" in sys.modules:
        raise FakeCudaError("torch is imported already")
    if _has_cuda():
        raise FakeCudaError("this build of torch has CUDA itself")
    library = ctypes.CDLL(str(_build() / LIBRARY), mode=ctypes.RTLD_GLOBAL)
    if not library.scalewise_start_fake_cuda():
        raise FakeCudaError("torch does not accept the fake device")
    _loaded.append(FakeCuda(library))
    return _loaded[0]


def _has_cuda() -> bool:
    return (_torch_folder() / "lib" / "libtorch_cuda.so").exists()


@cache
def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")  # does not import it
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def _build() -> Path:
    """Folder of the compiled library."""
    if (compiler := shutil.which("g++")) is None:
        raise FakeCudaError("g++ is not installed")
    key = {
        "torch": version("torch"),
        "folder": str(_torch_folder()),  # the library links to torch there
        "source": SOURCE.read_text("utf-8"),
    }
    if not is_cached("fake_cuda", key, subfolder="extensions"):
        logger.info(f"compiling the fake CUDA device, once: about {COMPILE_SECONDS} s")
    return build_cached(
        "fake_cuda", key, lambda folder: _compile(compiler, folder), subfolder="extensions"
    )


def _compile(compiler: str, folder: Path) -> None:
    torch_folder = _torch_folder()
    libraries = torch_folder / "lib"
    command = [
        *(compiler, "-shared", "-fPIC", "-std=c++20", "-O0", f"-I{torch_folder / 'include'}"),
        *(str(SOURCE), "-o", str(folder / LIBRARY), f"-L{libraries}", "-lc10", "-ltorch_cpu"),
        f"-Wl,-rpath,{libraries}",
    ]
    completed = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 (own source)
    if completed.returncode:
        errors = [line for line in completed.stderr.splitlines() if "error" in line]
        raise FakeCudaError(f"g++ fails: {next(iter(errors), completed.stderr[-200:])}")
