"""Small configs: hardware figures, precision, optimizers and schedules compared with torch."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scalewise import hardware
from scalewise.config import paths
from scalewise.hardware import (
    EMULATED_BF16_RATE,
    DeviceKind,
    Hardware,
    Machine,
    processor_tflops,
    resolve_for_machine,
)
from scalewise.lr_schedules import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    ScheduleConfig,
    WarmupStableDecayConfig,
)
from scalewise.models.base import Weight
from scalewise.objectives import IGNORED, CausalLM
from scalewise.objectives.losses import sum_over_tokens
from scalewise.optimizers import AdamWConfig, OptimizerConfig, SGDConfig
from scalewise.optimizers.base import FixedStateOptimizerConfig
from scalewise.optimizers.build import build_optimizer
from scalewise.precision import FloatFormat, Precision
from scalewise.run_config import RunConfig
from scalewise.training.lightning_module import build_lr_scheduler

DEVICES = [name for name in paths.option_names("hardware") if name not in ("auto", "cpu")]


class TestHardware:
    @pytest.mark.parametrize("name", DEVICES)
    def test_hardware_profiles_are_consistent(
        self, name: str, compose: Callable[..., RunConfig]
    ) -> None:
        spec = compose(f"hardware={name}", check_machine=False).hardware
        rates = [spec.fp32_tflops, spec.tf32_tflops, spec.bf16_tflops, spec.fp16_tflops]
        assert all(rate is not None for rate in rates)
        assert spec.fp16_tflops >= max(rate for rate in rates if rate is not None)
        assert spec.fp8_tflops in (0, pytest.approx(2 * spec.fp16_tflops, rel=1e-3))
        assert 10 < spec.fp32_tflops < 100
        assert 16 < spec.memory_gib < 300
        assert spec.link_gb_per_s < spec.memory_gb_per_s
        assert spec.match
        head = (paths.project_root() / "conf/hardware" / f"{name}.yaml").read_text().splitlines()[0]
        assert "Figures: NVIDIA" in head

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

    def test_hardware_auto_takes_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = Machine((), "", 2, 8 * 1024**3)
        monkeypatch.setattr(hardware, "this_machine", lambda: machine)
        resolved = hardware.resolve_for_machine(Hardware())
        assert (resolved.device, resolved.memory_gib) == ("cpu", 8.0)
        assert machine.max_cpu_ranks == 8
        unchanged = hardware.resolve_for_machine(Hardware(memory_gib=4, fp32_tflops=1.0))
        assert (unchanged.memory_gib, unchanged.fp32_tflops) == (4, 1.0)

    def test_hardware_auto_takes_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hardware, "this_machine", lambda: Machine(("H100",), "", 2, 1))
        assert hardware.resolve_for_machine(Hardware()).device == "cuda"
        assert (
            hardware.resolve_for_machine(Hardware(device=hardware.DeviceKind.cpu)).device == "cpu"
        )


class TestPrecision:
    @pytest.mark.parametrize(
        ("storage", "compute", "plugin", "peak"),
        [
            ("fp32", "fp32", "32-true", "fp32"),
            ("fp32", "bf16", "bf16-mixed", "bf16"),
            ("bf16", "bf16", "bf16-true", "bf16"),
            ("fp32", "fp16", "16-mixed", "fp16"),
        ],
    )
    def test_precision_device_pairs_that_run(
        self, storage: str, compute: str, plugin: str, peak: str
    ) -> None:
        spec = Precision(FloatFormat(storage), FloatFormat(compute))
        assert list(spec.validate()) == []
        assert spec.lightning_precision() == plugin
        assert spec.peak_kind == peak

    def test_precision_device_pairs_that_are_rejected(self) -> None:
        rejected_pairs = [
            (storage, compute)
            for storage in FloatFormat
            for compute in FloatFormat
            if list(Precision(storage, compute).validate())
        ]
        assert len(rejected_pairs) == len(FloatFormat) ** 2 - 4

    def test_precision_bytes_equal_torch(self) -> None:
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        for number_format in FloatFormat:
            assert number_format.bytes == kinds[number_format].itemsize, number_format

    def test_precision_tf32_requires_fp32(self) -> None:
        assert Precision(tf32=True).peak_kind == "tf32"
        assert Precision(compute=FloatFormat.bf16, tf32=True).peak_kind == "bf16"

    def test_precision_sets_float32_matmul(self) -> None:
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision(Precision(tf32=True).matmul_precision)
            assert torch.get_float32_matmul_precision() == "high"
            torch.set_float32_matmul_precision(Precision().matmul_precision)
            assert torch.get_float32_matmul_precision() == "highest"
        finally:
            torch.set_float32_matmul_precision(before)


OPTIMIZERS: list[FixedStateOptimizerConfig] = [
    AdamWConfig(),
    AdamWConfig(fused=False),
    SGDConfig(),
    SGDConfig(momentum=0.0),
]


def weights_with_parameters(module: torch.nn.Module) -> list[tuple[Weight, torch.nn.Parameter]]:
    named_parameters = module.named_parameters()
    return [(Weight(name, tuple(p.shape), "attention"), p) for name, p in named_parameters]


class TestOptimizers:
    @pytest.mark.parametrize("spec", OPTIMIZERS, ids=repr)
    def test_optimizer_slots_equal_torch_state(self, spec: FixedStateOptimizerConfig) -> None:
        layer = torch.nn.Linear(5, 7)
        optimizer = build_optimizer(spec, weights_with_parameters(layer))
        layer(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        for parameter in layer.parameters():
            state = optimizer.state[parameter].values()
            state_tensors = [
                t for t in state if isinstance(t, torch.Tensor) and t.shape == parameter.shape
            ]
            assert len(state_tensors) == spec.state_slots

    @pytest.mark.parametrize(
        "spec", [AdamWConfig(weight_decay=0.3), SGDConfig(weight_decay=0.3)], ids=repr
    )
    def test_optimizer_decays_matrices_only(self, spec: OptimizerConfig) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        module[0].weight.requires_grad_(True)
        groups = build_optimizer(spec, weights_with_parameters(module)).param_groups
        dims_by_decay = {
            group["weight_decay"]: [p.ndim for p in group["params"]] for group in groups
        }
        assert dims_by_decay == {0.3: [2], 0.0: [1, 1, 1]}
        assert all(group["lr"] == spec.lr for group in groups)

    def test_optimizer_omits_frozen_parameters(self) -> None:
        layer = torch.nn.Linear(3, 4)
        layer.weight.requires_grad_(False)
        (group,) = build_optimizer(AdamWConfig(), weights_with_parameters(layer)).param_groups
        assert group["params"] == [layer.bias]

    def test_optimizer_fields_reach_torch(self) -> None:
        layer = torch.nn.Linear(3, 4)
        adamw = AdamWConfig(lr=1.0, beta1=0.1, beta2=0.2, epsilon=0.3, fused=False)
        defaults = build_optimizer(adamw, weights_with_parameters(layer)).defaults
        assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (1.0, (0.1, 0.2), 0.3)
        sgd = build_optimizer(
            SGDConfig(lr=2.0, momentum=0.5, nesterov=True), weights_with_parameters(layer)
        ).defaults
        assert (sgd["lr"], sgd["momentum"], sgd["nesterov"]) == (2.0, 0.5, True)
        assert (
            build_optimizer(AdamWConfig(), weights_with_parameters(layer)).defaults["fused"] is True
        )


SCHEDULES: list[ScheduleConfig] = [
    ConstantConfig(warmup_steps=7),
    CosineConfig(warmup_steps=7, final=0.2),
    LinearConfig(warmup_steps=7, final=0.3),
    WarmupStableDecayConfig(warmup_steps=7, decay=0.25, final=0.1),
]


def rates(spec: ScheduleConfig, steps: int) -> list[float]:
    return [spec.lr_factor(step, steps) for step in range(steps)]


class TestSchedules:
    @pytest.mark.parametrize("spec", SCHEDULES, ids=lambda spec: type(spec).__name__)
    def test_schedule_warms_up_to_the_peak(self, spec: ScheduleConfig) -> None:
        rates_by_step = rates(spec, 48)
        assert rates_by_step[:8] == pytest.approx([(step + 1) / 8 for step in range(8)])
        assert rates_by_step[7] == max(rates_by_step) == 1.0
        assert all(a >= b for a, b in itertools.pairwise(rates_by_step[7:]))
        assert rates_by_step[-1] == pytest.approx(getattr(spec, "final", 1.0))
        assert spec.lr_factor(1000, 48) == rates_by_step[-1]

    def test_schedule_wsd_is_constant_until_decay(self) -> None:
        rates_by_step = rates(WarmupStableDecayConfig(warmup_steps=0, decay=0.25, final=0.0), 41)
        assert rates_by_step[:31] == [1.0] * 31
        assert rates_by_step[31:] == pytest.approx([0.9 - 0.1 * step for step in range(10)])
        assert rates(WarmupStableDecayConfig(decay=0.0), 11) == [1.0] * 11
        assert rates(WarmupStableDecayConfig(decay=1.0), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]

    @pytest.mark.parametrize(
        ("spec", "torch_schedule"),
        [
            (
                CosineConfig(final=0.1),
                lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=30, eta_min=0.05),
            ),
            (
                LinearConfig(final=0.25),
                lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=30),
            ),
        ],
    )
    def test_schedule_shapes_equal_torch(
        self, spec: ScheduleConfig, torch_schedule: Callable[..., object]
    ) -> None:
        assert self._walk(lambda o: build_lr_scheduler(spec, o, 31), 30) == pytest.approx(
            self._walk(torch_schedule, 30)
        )

    def _walk(self, build: Callable[..., object], steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        schedule = build(optimizer)
        rates_by_step = []
        for _ in range(steps):
            rates_by_step.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return [*rates_by_step, optimizer.param_groups[0]["lr"]]

    def test_schedule_warmup_of_the_full_run(self) -> None:
        assert CosineConfig(warmup_steps=5).lr_factor(5, 5) == 1.0


class TestCausalLM:
    def test_causal_lm_loss_of_uniform_logits_is_log_vocabulary(self) -> None:
        loss = sum_over_tokens(
            CausalLM(), torch.zeros(2, 3, 11), torch.zeros(2, 3, dtype=torch.long)
        )
        assert loss.item() == pytest.approx(6 * math.log(11))

    def test_causal_lm_loss_is_the_sum_over_chunks(self) -> None:
        logits = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(24).reshape(4, 6) % 5
        labels[1, 2:] = IGNORED
        smoothed_loss = CausalLM(label_smoothing=0.1)
        sum_of_samples = sum(
            sum_over_tokens(smoothed_loss, logits[i : i + 1], labels[i : i + 1]) for i in range(4)
        )
        torch.testing.assert_close(sum_of_samples, sum_over_tokens(smoothed_loss, logits, labels))

    def test_causal_lm_loss_without_labels_is_zero(self) -> None:
        logits = torch.randn(1, 3, 5).requires_grad_()
        loss = sum_over_tokens(CausalLM(label_smoothing=0.1), logits, torch.full((1, 3), IGNORED))
        loss.backward()
        assert loss.item() == 0
        assert logits.grad is not None
        assert not logits.grad.any()

    def test_causal_lm_loss_omits_ignored_labels(self) -> None:
        logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([[1, IGNORED, 2, IGNORED]])
        expected = sum_over_tokens(CausalLM(), logits[:, ::2], labels[:, ::2])
        torch.testing.assert_close(sum_over_tokens(CausalLM(), logits, labels), expected)

    def test_causal_lm_loss_sums_in_fp32(self) -> None:
        logits = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
        assert (
            sum_over_tokens(CausalLM(), logits, torch.zeros(1, 2, dtype=torch.long)).dtype
            is torch.float32
        )

    def test_causal_lm_smoothing_equals_torch(self) -> None:
        logits = torch.tensor([[[2.0, 0.0, 0.0]]])
        labels = torch.zeros(1, 1, dtype=torch.long)
        smoothed_loss = sum_over_tokens(CausalLM(label_smoothing=0.3), logits, labels)
        log = torch.log_softmax(logits[0, 0], 0)
        expected = -(0.7 * log[0] + 0.3 * log.mean())
        torch.testing.assert_close(smoothed_loss, expected)
