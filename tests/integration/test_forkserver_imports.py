"""Imports of the forkserver: a process forked after CUDA has started cannot use it."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import torch

NAMES = (
    "is_available", "device_count", "current_device", "_lazy_init", "init", "set_device",
    "get_device_capability", "get_device_properties", "get_device_name", "current_stream",
    "synchronize", "is_bf16_supported", "mem_get_info",
)
calls = []

def recorded(name, function):
    def call(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)
    return call

for name in NAMES:
    setattr(torch.cuda, name, recorded(name, getattr(torch.cuda, name)))
import scalewise.launch.forkserver_preload
modules = [m for m in ("bitsandbytes", "deepspeed", "peft", "torchao") if m in sys.modules]
if sys.argv[1:]:
    torch.cuda.is_available()
print(json.dumps({"calls": calls, "modules": modules}))
"""


def imports(*arguments: str) -> dict[str, list[str]]:
    command = [sys.executable, "-P", "-c", SCRIPT, *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(completed.stdout)
    return found


def test_forkserver_asks_nothing_of_cuda() -> None:
    """bitsandbytes asks for the capability of devices when it is imported; PEFT imports it."""
    assert imports() == {"calls": [], "modules": []}


def test_question_to_cuda_is_noticed() -> None:
    assert imports("ask")["calls"] == ["is_available"]


def test_api_imports_no_charts() -> None:
    """Each rank imports the user's script, and with it the API; only its caller draws charts."""
    script = "import sys; from scalewise import train; print({'altair', 'torch'} & {*sys.modules})"
    command = [sys.executable, "-P", "-c", script]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout == "set()\n"
