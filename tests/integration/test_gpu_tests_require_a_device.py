"""Tests marked gpu fail on a machine without a CUDA device: on the CPU most of them would pass."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_gpu_tests_fail_without_a_cuda_device() -> None:
    case = "tests/gpu/test_cuda.py::test_phase_timer_measures_device_time"
    command = [sys.executable, "-m", "pytest", case, "-m", "gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "tests marked gpu require a CUDA device" in result.stdout
