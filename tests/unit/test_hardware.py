"""Hardware: profiles, peak rates of processors and detection of the machine."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalewise import hardware
from scalewise.config import paths
from scalewise.hardware import (
    DeviceKind,
    Hardware,
    Machine,
    resolve_for_machine,
)
from scalewise.processor import EMULATED_BF16_RATE, processor_tflops
from scalewise.run_config import RunConfig

DEVICES = [name for name in paths.option_names("hardware") if name not in ("auto", "cpu")]


def fake_nvml(shut_down: list[bool]) -> Callable[[str], SimpleNamespace]:
    """NVML with two devices; the name of the second cannot be read."""

    def write(pointer: Any, value: object, error: int = 0) -> int:
        getattr(pointer, "_obj", pointer).value = value
        return error

    functions: dict[str, Callable[..., object]] = {
        "nvmlInit_v2": lambda: 0,
        "nvmlDeviceGetCount_v2": lambda count: write(count, 2),
        "nvmlDeviceGetHandleByIndex_v2": lambda index, handle: write(handle, index + 1),
        "nvmlDeviceGetName": lambda handle, name, _: write(name, b"NVIDIA H200", handle.value == 2),
        "nvmlShutdown": lambda: shut_down.append(True),
    }
    return lambda library: SimpleNamespace(**functions)


class TestHardware:
    @pytest.mark.parametrize("name", DEVICES)
    def test_hardware_profiles_are_consistent(
        self, name: str, compose: Callable[..., RunConfig]
    ) -> None:
        spec = compose(f"hardware={name}", check_machine=False).hardware
        rates = [spec.fp32_tflops, spec.tf32_tflops, spec.bf16_tflops, spec.fp16_tflops]
        assert all(rate is not None for rate in rates)
        assert spec.fp16_tflops >= max(rate for rate in rates if rate is not None)
        rounding = 0.02 if name == "l40s" else 1e-3  # its datasheet has 362 and 733 TFLOP/s
        assert spec.fp8_tflops in (0, pytest.approx(2 * spec.fp16_tflops, rel=rounding))
        assert 8 < spec.fp32_tflops < 170
        assert 14 < spec.memory_gib < 300
        assert spec.link_gb_per_s < spec.memory_gb_per_s
        assert spec.match
        head = (paths.project_root() / "conf/hardware" / f"{name}.yaml").read_text().splitlines()[0]
        assert f"Figures: {'AMD' if name.startswith('mi300x') else 'NVIDIA'}" in head

    def test_hardware_without_peak_rate_has_none(self) -> None:
        spec = Hardware(bf16_tflops=0, fp32_tflops=15.7)
        assert spec.peak_flops("bf16") is None
        assert spec.peak_flops("fp16") is None
        assert spec.peak_flops("fp32") == 15.7e12

    @pytest.mark.parametrize(
        ("flags", "fp32", "bf16"),
        [
            ("avx2 fma", 32, 32 * EMULATED_BF16_RATE),
            ("avx2 fma avx_ne_convert", 32, 32),
            ("avx2", 0, 0),
            ("avx2 fma avx512f", 64, 64),
            ("avx2 fma avx512f avx512_bf16", 64, 128),
            ("avx2 fma avx512f avx512_bf16 amx_bf16", 64, 1024),
            ("", 0, 0),
        ],
    )
    def test_hardware_peak_rate_of_a_cpu(self, flags: str, fp32: int, bf16: float) -> None:
        resolved = processor_tflops({"flags": flags, "cpu MHz": "2500.0"}, cores=4)
        per_flop = 4 * 2.5e9 / 1e12
        expected = {"fp32_tflops": fp32 * per_flop, "bf16_tflops": bf16 * per_flop}
        assert resolved == (pytest.approx(expected) if fp32 else {})

    @pytest.mark.skipif(
        "flags" not in hardware._cpu_info(), reason="the kernel names x86 instructions"
    )
    def test_hardware_bf16_emulation_agrees_with_torch(self) -> None:
        resolved = resolve_for_machine(Hardware(device=DeviceKind.cpu))
        assert resolved.emulates_bf16 != torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def test_hardware_of_an_unknown_cpu(self) -> None:
        assert processor_tflops({}, 4) == {}
        assert processor_tflops({"flags": "avx2 fma"}, 4) == {}

    @pytest.mark.parametrize(
        ("visible_devices", "expected"),
        [
            (None, ("A", "B", "C")),
            ("", ()),
            ("-1", ()),
            ("1", ("B",)),
            ("2,0", ("C", "A")),
            (" 1 , 2 ", ("B", "C")),
            ("0,-1,1", ("A",)),
            ("7", ()),
            ("0,7", ("A",)),
            ("GPU-8932f937", ("A",)),
        ],
    )
    def test_hardware_respects_visible_devices(
        self, visible_devices: str | None, expected: tuple[str, ...], tmp_path: Path
    ) -> None:
        for index, name in enumerate("ABC"):
            folder = tmp_path / f"0000:0{index}:00.0"
            folder.mkdir()
            (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   1\nGPU UUID: x\n")
        environment = {} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}
        assert hardware._visible_gpus(environment, tmp_path) == expected

    def test_hardware_without_driver_files_asks_nvml_then_counts_device_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shut_down: list[bool] = []
        monkeypatch.setattr(hardware, "DEVICE_FILES", tmp_path)
        monkeypatch.setattr(hardware.ctypes, "CDLL", fake_nvml(shut_down))
        assert hardware._visible_gpus({}, tmp_path) == ("NVIDIA H200", "NVIDIA GPU")
        assert shut_down
        monkeypatch.setattr(hardware, "_nvml_names", list)
        assert hardware._visible_gpus({}, tmp_path) == ()
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        assert hardware._visible_gpus({}, tmp_path) == ("NVIDIA GPU", "NVIDIA GPU")

    def test_nvml_is_optional(self) -> None:
        assert hardware._nvml_names("libdoes-not-exist.so.1") == []

    def test_hardware_auto_takes_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = Machine((), "", 2, 8 * 1024**3)
        monkeypatch.setattr(hardware, "this_machine", lambda: machine)
        resolved = hardware.resolve_for_machine(Hardware())
        assert (resolved.device, resolved.memory_gib) == ("cpu", 8.0)
        assert machine.max_cpu_ranks == 8
        unchanged = hardware.resolve_for_machine(Hardware(memory_gib=4, fp32_tflops=1.0))
        assert (unchanged.memory_gib, unchanged.fp32_tflops) == (4, 1.0)

    def test_cpu_that_was_not_measured_gets_built_in_figures(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        info = {"flags": "avx2 fma", "cpu MHz": "2500.0"}
        machine = Machine((), "", 4, 8 * 1024**3, info)
        monkeypatch.setattr(hardware, "this_machine", lambda: machine)
        built_in = hardware.resolve_for_machine(Hardware())
        assert built_in.fp32_tflops == 0.32  # 4 cores x 2.5 GHz x 32 FLOPs
        assert built_in.memory_gb_per_s == 32  # 10 lines of 64 bytes in 80 ns on 4 cores
        assert built_in.launch_us > 0
        assert None not in (built_in.link_gb_per_s, built_in.link_latency_us)
        assert built_in.step_shortest < 0.5
        assert built_in.step_longest > 2
        assert built_in.read_off == hardware.BUILT_IN
        unmeasured = hardware.remove_built_in_figures(built_in)
        assert unmeasured == dataclasses.replace(
            Hardware(device=hardware.DeviceKind.cpu),
            memory_gib=8.0,
            fp32_tflops=built_in.fp32_tflops,
            bf16_tflops=built_in.bf16_tflops,
        )

    def test_figures_of_the_user_replace_built_in_figures(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        info = {"flags": "avx2 fma", "cpu MHz": "2500.0"}
        monkeypatch.setattr(hardware, "this_machine", lambda: Machine((), "", 4, 2**33, info))
        linked = hardware.resolve_for_machine(Hardware(link_gb_per_s=9.0))
        assert (linked.link_gb_per_s, linked.memory_gb_per_s) == (9.0, 32)
        assert hardware.remove_built_in_figures(linked).link_gb_per_s == 9.0
        measured = Hardware(device=hardware.DeviceKind.cpu, memory_gb_per_s=20.0)
        resolved = hardware.resolve_for_machine(measured)
        assert (resolved.memory_gb_per_s, resolved.launch_us, resolved.read_off) == (20.0, 0.0, "")
        assert hardware.remove_built_in_figures(resolved) == resolved

    def test_processor_with_unknown_rates_gets_no_built_in_figures(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = Machine((), "", 4, 2**33, {"Features": "asimd"})
        monkeypatch.setattr(hardware, "this_machine", lambda: machine)
        resolved = hardware.resolve_for_machine(Hardware())
        assert (resolved.memory_gb_per_s, resolved.read_off) == (None, "")

    def test_hardware_auto_takes_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hardware, "this_machine", lambda: Machine(("H100",), "", 2, 1))
        assert hardware.resolve_for_machine(Hardware()).device == "cuda"
        assert (
            hardware.resolve_for_machine(Hardware(device=hardware.DeviceKind.cpu)).device == "cpu"
        )
