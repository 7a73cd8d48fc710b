"""Precision: supported pairs of storage and compute formats."""

import pytest
import torch

from scalewise.precision import FloatFormat, Precision


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
