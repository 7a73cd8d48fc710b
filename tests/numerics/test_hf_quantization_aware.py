"""Quantization-aware training of transformers models: torchao as the reference, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.hf_checkpoints import HFCheckpoints
from fixtures.integer_export import (
    CPU,
    QAT_OVERRIDES,
    QAT_PARAMS,
    TOKENS_BT,
    assert_conversion_recorded,
    assert_evaluation_compares_fp32,
    assert_same_first_step,
    assert_transformers_multiplies_integers,
    export_run,
    torchao_config,
)
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    assert_same_training,
    transformers_overrides,
)
from fixtures.strategies import STRATEGIES
from torchao.quantization import IntxUnpackedToInt8Tensor, quantize_
from torchao.quantization.qat import QATConfig
from transformers import AutoModelForCausalLM

from scalewise import compose
from scalewise.checkpoints.trained_run import load_model
from scalewise.commands.run_arguments import load_trained
from scalewise.errors import CheckpointError
from scalewise.export import compressed_tensors
from scalewise.hardware import DeviceKind
from scalewise.models.build import export_model
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.op_graph import OpWork
from scalewise.planner.activation_liveness import model_op_graphs
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.quantization.fake import FakeQuantizedLinear
from scalewise.strategies.single import SingleDevice

EXHAUSTIVE = pytest.mark.exhaustive
FAMILIES = ("llama", "granite", "mistral")
"""Families whose linear layers have no biases."""


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("hf_integers"), shared_cache)


@pytest.mark.parametrize("name", QAT_OVERRIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hf_qat_logits_and_gradients_equal_torchao(
    family: str, name: str, hf_checkpoint: HFCheckpoints
) -> None:
    run = compose([*transformers_overrides(hf_checkpoint(family), *QAT_OVERRIDES[name])])
    actual = SingleDevice(DeviceKind.cpu).build(run)
    assert isinstance(actual, CausalLMModule)
    reference = AutoModelForCausalLM.from_pretrained(hf_checkpoint(family))
    prepare_config = QATConfig(torchao_config(run), step="prepare")
    linear = {
        actual.hf_name(f"{key}.weight").removesuffix(".weight")
        for key, item in actual.named_modules()
        if isinstance(item, FakeQuantizedLinear)
    }
    assert len(linear) == 7 * run.model.layers
    quantize_(reference, prepare_config, filter_fn=lambda _, key: key in linear)
    logits, expected = actual(TOKENS_BT), reference(TOKENS_BT).logits
    assert torch.equal(logits, expected)
    for item in (logits, expected):
        item.logsumexp(-1).sum().backward()
    for key, parameter in actual.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, reference.get_parameter(actual.hf_name(key)).grad), key


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            name, strategy, marks=() if (name, strategy) == ("qat_8da4w", "fsdp") else EXHAUSTIVE
        )
        for name in QAT_OVERRIDES
        for strategy in ("ddp", "fsdp", "fsdp_offload", "hsdp")
    ],
)
def test_hf_qat_under_each_strategy_equals_one_device(
    name: str, strategy: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    """Assert an equal first step: later, a last bit may change the rounding of a weight."""
    overrides = transformers_overrides(hf_checkpoint("llama"), *QAT_OVERRIDES[name])
    ranks = compose([*overrides, *STRATEGIES[strategy]]).parallelism.data_parallel_size
    run = run_job.without_defaults(
        *overrides, *STRATEGIES[strategy], f"trainer.micro_batch={12 // ranks // 3}"
    )
    single_run = run_job.without_defaults(*overrides, "trainer.micro_batch=12")
    assert_same_first_step(run, single_run)


@EXHAUSTIVE
@pytest.mark.parametrize("more", ["compile=block", "memory=checkpoint_full"])
def test_hf_qat_memory_options_change_no_step(
    more: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    overrides = transformers_overrides(
        hf_checkpoint("llama"), *QAT_OVERRIDES["qat_8da4w"], "trainer.micro_batch=12"
    )
    backend = ["compile.backend=aot_eager"] * ("compile" in more)
    assert_same_training(
        run_job.without_defaults(*overrides, more, *backend), run_job.without_defaults(*overrides)
    )


@pytest.mark.parametrize("name", QAT_OVERRIDES)
def test_hf_qat_operator_graph_separates_rounded_matmuls(
    name: str, hf_checkpoint: HFCheckpoints
) -> None:
    default_run, qat_run = (
        compose([*transformers_overrides(hf_checkpoint("llama"), *qat_overrides)])
        for qat_overrides in ((), QAT_OVERRIDES[name])
    )
    default_operators, qat_operators = (
        [
            operator
            for operator in model_op_graphs(
                run.model, build_rank_memory(run.parallelism, run).forward_spec
            ).block.operators
            if operator.work is OpWork.matmul
        ]
        for run in (default_run, qat_run)
    )
    assert [op.flops for op in qat_operators] == [op.flops for op in default_operators]
    assert all(min(op.cast_bytes) > 0 for op in qat_operators)


@pytest.fixture(scope="module")
def trained(hf_checkpoint: HFCheckpoints, run_job: JobRunner) -> dict[str, RunDir]:
    """Runs of a few steps, by name."""
    overrides = transformers_overrides(hf_checkpoint("llama"), "trainer.micro_batch=4")
    return {
        name: run_job.without_defaults(*overrides, *qat_overrides)
        for name, qat_overrides in QAT_OVERRIDES.items()
    }


@pytest.mark.parametrize("name", QAT_PARAMS)
def test_hf_qat_evaluation_compares_with_fp32(
    name: str, trained: dict[str, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_evaluation_compares_fp32(trained[name], capsys)


@pytest.mark.parametrize("name", QAT_PARAMS)
def test_hf_qat_export_has_the_validation_loss(
    name: str, trained: dict[str, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, to = trained[name], tmp_path / "export"
    output, exported = export_run(run, to)
    assert "model.layers.0.self_attn.q_proj.weight_scale" in exported

    module = compressed_tensors.load_compressed(to, output, CPU)
    matrices = [parameter for _, parameter in module.named_parameters()]
    assert sum(isinstance(matrix, IntxUnpackedToInt8Tensor) for matrix in matrices) == 28
    assert torch.equal(module(TOKENS_BT), load_model(output, CPU)(TOKENS_BT))
    config = json.loads((to / "config.json").read_text("utf-8"))
    assert config["quantization_config"]["format"] == "pack-quantized"

    assert_conversion_recorded(run, to)
    assert "28 weights in 4 bits: " in capsys.readouterr().out


@EXHAUSTIVE
@pytest.mark.parametrize("name", QAT_OVERRIDES)
def test_hf_qat_export_computes_in_transformers(
    name: str, trained: dict[str, RunDir], tmp_path: Path
) -> None:
    assert_transformers_multiplies_integers(trained[name], name, tmp_path)


def test_hf_qat_import_rejects_a_file_without_integers(
    trained: dict[str, RunDir], tmp_path: Path
) -> None:
    trained_run = load_trained(trained["qat_8da4w"].path)
    export_model(trained_run.model, trained_run.read_merged_state_dict(), tmp_path)
    with pytest.raises(CheckpointError, match="contains no integers of blocks"):
        compressed_tensors.load_compressed(tmp_path, trained_run, CPU)
