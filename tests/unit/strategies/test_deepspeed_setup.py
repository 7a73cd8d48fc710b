"""The DeepSpeed config: rejections with fixes, and the settings passed to DeepSpeed."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from fixtures.cli_runner import CliRunner, cli_environment
from fixtures.strategies import needs_deepspeed

from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig
from scalewise.strategies.deepspeed_setup import SwapFolder, build_deepspeed_config
from scalewise.validation.parallelism_rules import parallelism_machine_issues

Compose = Callable[..., RunConfig]

ZERO_3 = ("parallelism=deepspeed_zero3",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("stage=4",), "parallelism.stage=4: ZeRO has stages 1, 2 and 3"),
        (("replicas=0",), "parallelism.replicas=0: must be 1 or more"),
        (("bucket_mib=0.5",), "parallelism.bucket_mib=0.5: must be 1 or more"),
        (("keep_whole_below=-1",), "parallelism.keep_whole_below=-1: must be 0 or more"),
        (("stage=3", "replicas=4", "hierarchical=3"), "does not divide the 4 replicas"),
        (
            ("offload_optimizer=nvme",),
            "set parallelism.stage=3, or parallelism.offload_optimizer=cpu",
        ),
        (
            ("offload_parameters=cpu",),
            "set parallelism.stage=3, or parallelism.offload_parameters=none",
        ),
        (("hierarchical=2",), "set parallelism.stage=3, or parallelism.hierarchical=1"),
        (
            ("stage=3", "quantized_weights=true"),
            "DeepSpeed has no CPU kernel for quantization; set ",
        ),
    ],
)
def test_deepspeed_rejects_invalid_settings(
    overrides: tuple[str, ...], message: str, compose: Compose
) -> None:
    overrides_of_group = [f"parallelism.{override}" for override in overrides]
    with pytest.raises(ConfigError) as excinfo:
        compose(
            "parallelism=deepspeed_zero2", "hardware=cpu", *overrides_of_group, check_machine=False
        )
    assert message in str(excinfo.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("precision=fp16_mixed", "hardware=h100"), "set precision=bf16_mixed, or parallelism=ddp"),
        (("optimizer=sgd", "parallelism.offload_optimizer=cpu"), "set optimizer=adamw, or"),
        (
            ("callbacks=[ema]", "parallelism.offload_optimizer=nvme"),
            "set parallelism.offload_optimizer=cpu, or remove it",
        ),
    ],
)
def test_deepspeed_rejects_incompatible_options(
    overrides: tuple[str, ...], message: str, compose: Compose
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        compose(*ZERO_3, *overrides, check_machine=False)
    assert message in str(excinfo.value)


def test_deepspeed_missing_extra_is_named(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compose(*ZERO_3, check_machine=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    issues = [str(issue) for issue in parallelism_machine_issues(run.parallelism, run)]
    reason = "parallelism=deepspeed_zero3: deepspeed is not installed"
    assert issues == [f"{reason}; pip install 'scalewise[deepspeed]'"]


def test_deepspeed_config_is_derived_from_the_run(compose: Compose) -> None:
    run = compose(
        *ZERO_3,
        "parallelism.overlap_comm=false",
        "parallelism.bucket_mib=1",
        "parallelism.offload_parameters=cpu",
        "parallelism.replicas=4",
        "parallelism.hierarchical=2",
        "precision=bf16_mixed",
        "trainer.micro_batch=2",
        "trainer.global_batch=24",
        "trainer.clip_norm=0.5",
        check_machine=False,
    )
    deepspeed_config = build_deepspeed_config(
        run.parallelism, run, "/disk", run.model.num_parameters, run.trainable_parameters
    )  # DeepSpeed only
    assert deepspeed_config["gradient_accumulation_steps"] == 3
    assert deepspeed_config["gradient_clipping"] == 0.5
    assert deepspeed_config["bf16"]["enabled"]
    assert not deepspeed_config["bf16"]["bf16_master_weights_and_grads"]
    zero = deepspeed_config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["reduce_bucket_size"] == 2**18
    assert zero["overlap_comm"] is False
    assert zero["zero_hpz_partition_size"] == 2
    assert zero["offload_param"] == {"device": "cpu", "nvme_path": "/disk"}


def test_deepspeed_swap_files_of_killed_ranks_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal; from scalewise.strategies.deepspeed_setup import SwapFolder;"
        f"SwapFolder({str(tmp_path)!r}).open().joinpath('state').write_text('x');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed_process = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed_process.returncode == -signal.SIGKILL
    (remaining_folder,) = tmp_path.iterdir()
    first_swap, second_swap = SwapFolder(str(tmp_path)), SwapFolder(str(tmp_path))
    folders = {first_swap.open(), second_swap.open()}
    assert set(tmp_path.iterdir()) == folders
    assert remaining_folder not in folders
    first_swap.close()
    second_swap.close()
    assert not list(tmp_path.iterdir())


BUILDER = """
    #!{python}
    import subprocess, sys
    line = "sleep 300 & echo $! > $0.new; mv $0.new $0; wait"
    subprocess.Popen(["sh", "-c", line, sys.argv[-2] + "/compiler"], process_group=0).wait()
    """
INTERRUPTED = """
    import sys
    from pathlib import Path
    from scalewise.hardware import DeviceKind
    from scalewise.launch import signals
    from scalewise.strategies import deepspeed_ops
    folder = Path(sys.argv[1])
    sys.executable = str(folder / "builder")
    with signals.raise_on_signals("while it compiles"):
        deepspeed_ops._build_in_process("cpu_adam", DeviceKind.cpu, folder)
    """


def test_signal_ends_extension_compilers(tmp_path: Path) -> None:
    """Ninja starts each compiler in a new process group, which a signal to the builder's misses."""
    builder = tmp_path / "builder"
    builder.write_text(textwrap.dedent(BUILDER).lstrip().format(python=sys.executable))
    builder.chmod(0o755)
    runner = CliRunner(tmp_path, cli_environment(tmp_path, tmp_path))
    with closing(runner):
        command = runner.start_process(
            [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(tmp_path)]
        )
        command.wait_for_file("compiler")
        command.signal(signal.SIGTERM)
        assert "Interrupted: SIGTERM while it compiles" in command.wait(30).err
        assert command.remaining_processes() == []


BUILD = """
from scalewise.hardware import DeviceKind
from scalewise.strategies import deepspeed_ops
deepspeed_ops.build_extension("cpu_adam", DeviceKind.cpu)
deepspeed_ops.load_extension("cpu_adam", DeviceKind.cpu)
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
weight = torch.nn.Parameter(torch.ones(8))
weight.grad = torch.ones(8)
DeepSpeedCPUAdam([weight], lr=0.1).step()
print("stepped", float(weight[0]))
"""


def _within(folder: Path) -> list[psutil.Process]:
    """Processes whose working directory is in a folder."""
    matches = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(str(folder)):
                matches.append(process)
    return matches


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@needs_deepspeed
def test_killed_extension_build_does_not_block_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compilers of a killed build end with it."""
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    killed_process = subprocess.Popen(
        [sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True
    )
    while not (compiling := _within(tmp_path)):
        assert killed_process.poll() is None
        time.sleep(0.1)
    killed_process.kill()
    output, _ = killed_process.communicate()
    assert psutil.wait_procs(compiling, timeout=20)[1] == []
    assert "compiling DeepSpeed's cpu_adam, once" in output
    assert not list(tmp_path.glob("extensions/cpu_adam-*/*.so"))
    completed = subprocess.run(
        [sys.executable, "-c", BUILD], capture_output=True, text=True, check=True
    )
    assert completed.stdout.splitlines()[-1].startswith("stepped 0.8999")
    (library,) = tmp_path.rglob("*.so")
    assert library.name == "cpu_adam.so"
