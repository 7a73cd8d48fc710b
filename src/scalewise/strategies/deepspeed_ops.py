"""DeepSpeed's native extensions: compiled once per machine, loaded without DeepSpeed's lock.

DeepSpeed compiles an extension when a rank first needs it; a process that is killed meanwhile
leaves a lock for which all later processes wait. Here, extensions are compiled before ranks start,
into a folder that is complete or absent.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import psutil

from scalewise.compat.deepspeed import loaded_extensions
from scalewise.data.build_cache import build_cached, is_cached
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, this_machine

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}
"""DeepSpeed's op builder of each extension."""

COMPILE_SECONDS = {"cpu_adam": 40, "async_io": 120}
"""Compile time on two cores."""

FIXES = {
    "cpu_adam": "install g++ and ninja, or set parallelism.offload_optimizer=none",
    "async_io": "apt-get install libaio-dev g++, or offload to cpu instead of nvme",
}


def build_extensions(names: Iterable[str], device: DeviceKind) -> None:
    """Compile the extensions that this machine has not compiled yet."""
    for name in names:
        build_extension(name, device)


def build_extension(name: str, device: DeviceKind) -> Path:
    """Folder of an extension's libraries, compiled by the first process that needs it.

    Other processes wait for it. The cache key contains all versions and the target processor.
    Raises ``ConfigError`` with the compiler's last line.
    """
    key = {
        "deepspeed": version("deepspeed"),
        "torch": version("torch"),
        "python": sys.implementation.cache_tag,
        "processor": this_machine().processor,  # compiled with -march=native
        "device": device.value,
    }
    if not is_cached(name, key, subfolder="extensions"):
        logger.info(f"compiling DeepSpeed's {name}, once: about {COMPILE_SECONDS[name]} s")
    return build_cached(
        name, key, lambda folder: _build_in_process(name, device, folder), subfolder="extensions"
    )


def load_extension(name: str, device: DeviceKind) -> None:
    """Register a compiled extension with DeepSpeed, so that it neither compiles nor locks."""
    libraries = {library.stem: library for library in build_extension(name, device).glob("*.so")}
    for part in sorted(libraries, key=name.__eq__):  # libraries that it links to come first
        if part not in (extensions := loaded_extensions()):
            extensions[part] = _import_library(part, libraries[part])
            if part == "pin_memory":
                from deepspeed.ops.op_builder import PinMemoryBuilder

                PinMemoryBuilder().load()  # loads its symbols globally


def _import_library(name: str, library: Path) -> object:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_in_process(name: str, device: DeviceKind, folder: Path) -> None:
    """Compile in a subprocess; its compilers end with it."""
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "DS_ACCELERATOR": device.value, "PATH": search_path}
    process = subprocess.Popen(  # noqa: S603 (this very module)
        [sys.executable, "-P", "-m", __name__, name, str(folder), str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        _end_tree(psutil.Process(process.pid))
        process.wait()
        raise
    if process.returncode:
        last_line = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        raise ConfigError.for_key(
            "parallelism", name, f"DeepSpeed's code does not compile: {last_line}", FIXES[name]
        )


def end_with_parent(parent: int) -> None:
    """Wait until the parent process ends, then end this process and its compilers.

    They would slow down the next process that acquires the build lock.
    """
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    for child in psutil.Process().children():
        _end_tree(child)
    os._exit(1)


def _end_tree(process: psutil.Process) -> None:
    """End a process and its descendants; ninja's compilers have process groups of their own."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()  # so that it starts nothing more while its children are listed
        for child in process.children():
            _end_tree(child)
        process.kill()


def _compile(name: str, folder: Path) -> None:
    """Copy an extension's libraries, and those that it links to, to ``folder``."""
    # A temporary folder: files of a killed build are never used.
    with tempfile.TemporaryDirectory(dir=folder) as build_folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = build_folder
        from deepspeed.ops import op_builder

        getattr(op_builder, BUILDERS[name])().load(verbose=False)
        for library in Path(build_folder).rglob("*.so"):
            shutil.copy2(library, folder)


if __name__ == "__main__":
    Thread(target=end_with_parent, args=[int(sys.argv[3])], daemon=True).start()
    _compile(sys.argv[1], Path(sys.argv[2]))
