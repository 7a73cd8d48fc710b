"""``hardware=auto`` on a CUDA machine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from scalewise.commands import show_plan
from scalewise.config.compose import compose
from scalewise.hardware import Hardware, Machine
from scalewise.launch.job import JobSpec, begin_job
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.plan import build_plan
from scalewise.units import GIB

DetectHardware = Callable[..., Hardware]


@pytest.fixture
def detect_hardware(monkeypatch: pytest.MonkeyPatch) -> DetectHardware:
    """Function that returns the hardware of ``hardware=auto`` for given devices."""

    def detect(*gpus: str, overrides: tuple[str, ...] = ()) -> Hardware:
        for module in ("hardware", "run_config", "validation.run_issues"):
            machine = Machine(gpus, "", 8, 512 * GIB)
            monkeypatch.setattr(f"scalewise.{module}.this_machine", lambda machine=machine: machine)
        return compose(["hardware=auto", *overrides]).hardware

    return detect


@pytest.mark.parametrize(
    ("device", "profile", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 80),
        ("NVIDIA H100 PCIe", "h100_pcie", 80),
        ("NVIDIA H100 NVL", "h100_nvl", 93),
        ("NVIDIA H200", "h200", 139),
        ("NVIDIA H200 NVL", "h200_nvl", 139),
        ("NVIDIA A100-SXM4-80GB", "a100_80g", 80),
        ("NVIDIA A100-SXM-64GB", "a100_80g", 64),
        ("NVIDIA A100-SXM4-40GB", "a100_40g", 40),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80g", 80),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40g", 40),
        ("Tesla V100-SXM2-16GB", "v100", 16),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 24),
        ("NVIDIA GeForce RTX 3090", "rtx3090", 24),
        ("NVIDIA GeForce RTX 5090", "rtx5090", 31.8),
        ("NVIDIA RTX A6000", "a6000", 48),
        ("NVIDIA A10", "a10", 22),
        ("NVIDIA A10G", "a10g", 22),
        ("NVIDIA L4", "l4", 22),
        ("NVIDIA L40S", "l40s", 44),
        ("Tesla T4", "t4", 15),
        ("NVIDIA GH200 480GB", "gh200", 95),
        ("NVIDIA B200", "b200", 178),
        ("NVIDIA GB200", "gb200", 184),
        ("AMD Instinct MI300X", "mi300x", 191),
        ("NVIDIA GeForce RTX 2080 Ti", "", None),
        ("NVIDIA L40", "", None),
    ],
)
def test_profile_is_detected_by_device_name(
    device: str, profile: str, memory: float | None, detect_hardware: DetectHardware
) -> None:
    hardware = detect_hardware(device, device)
    assert (hardware.device, hardware.memory_gib, hardware.host_memory_gib) == ("cuda", memory, 512)
    assert (hardware.total_devices, hardware.nodes) == (None, 1)
    assert hardware.read_off.startswith(f"hardware={profile} for" if profile else "no profile for")
    if profile:
        profile_hardware = compose([f"hardware={profile}"], check_machine=False).hardware
        assert hardware.bf16_tflops == profile_hardware.bf16_tflops
        assert (hardware.match, hardware.step_scale) == (
            profile_hardware.match,
            profile_hardware.step_scale,
        )
        assert (profile_hardware.read_off, profile_hardware.host_memory_gib) == ("", None)


def test_profile_detection_takes_the_longest_match(
    detect_hardware: DetectHardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = {
        "short": {"match": "H100"},
        "long": {"match": "H100 NVL"},
        "other": {"match": "NVL"},
    }
    profiles = {name: {**profile, "memory_gib": 94.0} for name, profile in profiles.items()}
    monkeypatch.setattr(
        "scalewise.config.hardware_detection._single_device_profiles", lambda: profiles
    )
    assert detect_hardware("NVIDIA H100 NVL").match == "H100 NVL"


def test_profile_detection_keeps_typed_values(detect_hardware: DetectHardware) -> None:
    overrides = ("hardware.memory_gib=10", "hardware.host_memory_gib=64", "hardware.nodes=2")
    hardware = detect_hardware("NVIDIA H100 PCIe", overrides=overrides)
    assert (hardware.memory_gib, hardware.host_memory_gib, hardware.nodes) == (10, 64, 2)
    assert hardware.bf16_tflops == 756.5


def test_cpu_has_no_profile(detect_hardware: DetectHardware) -> None:
    hardware = detect_hardware()
    assert (hardware.device, hardware.match, hardware.read_off) == ("cpu", "", "")


def test_plan_with_detected_hardware_has_a_fit_status(
    detect_hardware: DetectHardware, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    detect_hardware("NVIDIA H100 80GB HBM3")
    run = compose(["hardware=auto", "tracking=none"])
    plan = build_plan(run)
    assert plan.fit.status is FitStatus.fits
    assert plan.step_time is not None
    show_plan.print_plan(plan)
    begin_job(JobSpec(run), tmp_path, None)
    message = "hardware=h100 for NVIDIA H100 80GB HBM3; host_memory_gib of this machine"
    stdout = capsys.readouterr().out
    assert f"hardware=auto: {message}" in stdout
    assert "of 512.00 GiB (" in stdout
    resolved = yaml.safe_load((tmp_path / "resolved.yaml").read_text("utf-8"))
    assert resolved["hardware"]["read_off"] == message


def test_host_memory_of_another_machine_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan.print_plan(build_plan(compose(["hardware=h100"], check_machine=False)))
    assert "not checked: set hardware.host_memory_gib" in capsys.readouterr().out
