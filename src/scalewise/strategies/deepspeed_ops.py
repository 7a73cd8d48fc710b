"""DeepSpeed's native code: compiled once for a machine, loaded without its compiler and its locks.

Left to itself DeepSpeed compiles when a rank first needs it, and a process that is killed then
leaves a lock that every later one waits for. Here it is compiled before there are ranks, into a
folder that is complete or absent.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import psutil

from scalewise.console import print_lines
from scalewise.data.build_cache import build_cached, is_cached
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, this_machine

WATCH_SECONDS = 0.2

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}
"""DeepSpeed's class that knows the sources, by the name of what it builds."""

SECONDS = {"cpu_adam": 40, "async_io": 120}
"""How long compiling takes on two cores."""

CURES = {
    "cpu_adam": "install g++ and ninja, or set parallelism.offload_optimizer=none",
    "async_io": "apt-get install libaio-dev g++, or offload to cpu instead of nvme",
}


def build_extension(name: str, device: DeviceKind) -> Path:
    """Returns the folder of an extension's libraries; the first to ask compiles, others wait.

    It is keyed by what the code is compiled against and for. Raises ``ConfigError`` with the
    compiler's last word.
    """
    key = {
        "deepspeed": version("deepspeed"),
        "torch": version("torch"),
        "python": sys.implementation.cache_tag,
        "processor": this_machine().processor,  # compiled with -march=native
        "device": device.value,
    }
    if not is_cached(name, key, subfolder="extensions"):
        print_lines(f"compiling DeepSpeed's {name}, once: about {SECONDS[name]} s")
    return build_cached(
        name, key, lambda folder: _build_in_process(name, device, folder), subfolder="extensions"
    )


def load_extension(name: str, device: DeviceKind) -> None:
    """Gives DeepSpeed an extension of ours, so that it neither compiles nor locks."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    libraries = {library.stem: library for library in build_extension(name, device).glob("*.so")}
    for part in sorted(libraries, key=name.__eq__):  # what it links to comes first
        if part not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[part] = _import_library(part, libraries[part])
            if part == "pin_memory":
                from deepspeed.ops.op_builder import PinMemoryBuilder

                PinMemoryBuilder().load()  # makes its symbols global


def _import_library(name: str, library: Path) -> object:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_in_process(name: str, device: DeviceKind, folder: Path) -> None:
    """Compiles in a process of its own, which takes its compilers along when it has to end."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "DS_ACCELERATOR": device.value, "PATH": tools}
    process = subprocess.Popen(  # noqa: S603 (this very module)
        [sys.executable, "-P", "-m", __name__, name, str(folder), str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate()
    except BaseException:
        _end_tree(psutil.Process(process.pid))
        process.wait()
        raise
    if process.returncode:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        raise ConfigError.for_key(
            "parallelism", name, f"DeepSpeed's code does not compile: {last}", CURES[name]
        )


def end_with_parent(parent: int) -> None:
    """Waits until this process has another parent, then ends it and its compilers.

    Whoever takes the lock after a killed builder has the machine for its own.
    """
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    for child in psutil.Process().children():
        _end_tree(child)
    os._exit(1)


def _end_tree(process: psutil.Process) -> None:
    """Ends a process and all below it; ninja's compilers are in process groups of their own."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()  # so that it starts nothing more while its children are listed
        for child in process.children():
            _end_tree(child)
        process.kill()


def _compile(name: str, folder: Path) -> None:
    """Puts an extension's libraries, and those that it links to, into ``folder``."""
    # A folder of its own: what is left of a killed builder lies where nobody looks.
    with tempfile.TemporaryDirectory(dir=folder) as room:
        os.environ["TORCH_EXTENSIONS_DIR"] = room
        from deepspeed.ops import op_builder

        getattr(op_builder, BUILDERS[name])().load(verbose=False)
        for library in Path(room).rglob("*.so"):
            shutil.copy2(library, folder)


if __name__ == "__main__":
    Thread(target=end_with_parent, args=[int(sys.argv[3])], daemon=True).start()
    _compile(sys.argv[1], Path(sys.argv[2]))
