"""Published measurements as runs: devices, frameworks, models and memory of a row."""

from __future__ import annotations

from math import ceil

import pytest
from fixtures.published_rows import ROW, profiles

from scalewise.bench import (
    published_devices,
    published_frameworks,
    published_runs,
)
from scalewise.errors import ConfigError
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import NormKind
from scalewise.models.op_graph import OpWork, Recompute
from scalewise.parallelism.mesh import MeshConfig, PipelineSchedule, ShardedState
from scalewise.planner.activation_liveness import model_op_graphs
from scalewise.planner.fit_check import check_fit
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.planner.step_time import predict_step_time
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.validation.run_issues import iter_issues


def build_run(row: dict[str, str]) -> RunConfig:
    return published_runs.build_run(row, profiles())


def test_published_row_becomes_a_run() -> None:
    run = build_run(ROW)
    assert run.model.num_parameters == 8_030_261_248
    assert (run.world_size, run.global_batch, run.accumulation) == (8, 16, 1)
    assert run.memory.recompute is Recompute.full
    assert (run.precision.parameters, run.precision.compute) == (FloatFormat.fp32, FloatFormat.bf16)
    assert list(iter_issues(run)) == []


@pytest.mark.parametrize(
    ("micro_bs", "grad_accum", "num_micro_batches", "sequences"),
    [("1", "64", 64, 1), ("2", "16", 16, 2), ("32", "1", 8, 4), ("4", "1", 4, 1)],
)
def test_published_accumulation_fills_the_pipeline(
    micro_bs: str, grad_accum: str, num_micro_batches: int, sequences: int
) -> None:
    row = ROW | {"pp": "8", "micro_bs": micro_bs, "grad_accum": grad_accum}
    run = build_run(row)
    assert run.accumulation == 1
    assert run.tokens_per_step == int(micro_bs) * int(grad_accum) * 8 * 8192
    memory = build_rank_memory(run.parallelism, run)
    assert memory.num_pipeline_micro_batches == num_micro_batches
    assert memory.forward_spec.sequences == sequences
    step = predict_step_time(run)
    assert step is not None
    compute_s = step.matmul + step.attention + step.pointwise + step.recompute
    assert step.pipeline_bubble == pytest.approx(compute_s * 7 / num_micro_batches, rel=0.5)


def test_published_framework_is_identified_by_source() -> None:
    kempner_run = build_run(ROW | {"source": "KempnerInstitute/KempnerForge", "tp": "2"})
    assert kempner_run.precision.parameters is FloatFormat.bf16  # for any GPU name in the rows
    assert (
        build_rank_memory(kempner_run.parallelism, kempner_run).forward_spec.loss_element_bytes == 2
    )
    foundry_run = build_run(ROW | {"source": "mosaicml/llm-foundry", "precision": "amp_bf16"})
    foundry_memory = build_rank_memory(foundry_run.parallelism, foundry_run)
    assert foundry_memory.forward_spec.loss_element_bytes == 0
    framework = published_frameworks.framework_of(ROW | {"source": "somebody/else"})
    assert framework.precision(ROW | {"precision": "bf16-true"}) == published_frameworks.BF16


@pytest.mark.parametrize(
    ("cells", "size", "is_gpt"),
    [
        ({"params_B": "8.03"}, 8_030_261_248, False),
        ({"params_B": "7.5"}, 7_504_924_672, False),
        (
            {"params_B": "0.124", "hidden": "768", "layers": "12", "heads": "12", "kv_heads": "12"}
            | {"ffn": "3072", "vocab": "50257", "seq": "1024"},
            124_439_808,
            True,
        ),
    ],
    ids=["llama", "tied", "gpt2"],
)
def test_published_size_determines_the_architecture(
    cells: dict[str, str], size: int, is_gpt: bool
) -> None:
    model = build_run(ROW | cells).model
    assert model.num_parameters == pytest.approx(size, rel=1e-3)
    assert (model.norm is NormKind.layernorm) == is_gpt


def test_published_size_that_no_architecture_has_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"params_B=70: the model of the row has 8\.03"):
        build_run(ROW | {"params_B": "70"})


def test_published_columns_of_memory_and_time_are_planned() -> None:
    def run(**cells: str) -> RunConfig:
        return build_run(ROW | {"compile": "0"} | cells)

    eager = run()
    assert run(compile="1").is_compiled
    assert not eager.is_compiled
    assert run(quant="float8-rowwise").precision.fp8_layers(eager.model)
    assert run(precision="fp8").precision.fp8_layers(eager.model)
    assert not eager.precision.fp8_layers(eager.model)
    zero1 = run(zero_stage="1", dp="8", fsdp="1").parallelism
    assert isinstance(zero1, MeshConfig)
    assert (zero1.sizes["shards"], zero1.shard) == (8, ShardedState.optimizer)


@pytest.mark.parametrize(
    ("cells", "schedule", "num_stages"),
    [
        ({"pp": "4"}, PipelineSchedule.one_f_one_b, 4),
        ({"pp": "4", "notes": "VP=3; asyncTP"}, PipelineSchedule.interleaved_1f1b, 12),
        ({"pp": "4", "notes": "interleaved1F1B"}, PipelineSchedule.interleaved_1f1b, 8),
        ({"pp": "1", "notes": "VP=3"}, PipelineSchedule.one_f_one_b, 1),
    ],
)
def test_published_notes_state_the_stages_per_rank(
    cells: dict[str, str], schedule: PipelineSchedule, num_stages: int
) -> None:
    mesh = build_run(ROW | cells).parallelism
    assert isinstance(mesh, MeshConfig)
    assert (mesh.pipeline_schedule, mesh.num_stages) == (schedule, num_stages)


def test_published_megatron_fuses_its_kernels() -> None:
    run = build_run(ROW | {"source": "NVIDIA/NeMo docs", "precision": "fp8"})
    assert run.is_compiled
    assert build_rank_memory(run.parallelism, run).forward_spec.is_loss_compiled


def test_published_megatron_reuses_stage_buffers_and_torch_does_not() -> None:
    row = ROW | {"precision": "fp16-mixed", "pp": "2", "grad_accum": "64"}
    torch_run = build_run(row)
    assert build_rank_memory(torch_run.parallelism, torch_run).num_stage_buffers == 64
    megatron_run = build_run(row | {"source": "bigscience-workshop/bigscience"})
    assert build_rank_memory(megatron_run.parallelism, megatron_run).num_stage_buffers == 2
    nemo = {"source": "NVIDIA/NeMo docs", "notes": "VP=4", "layers": "32"}
    interleaved = build_rank_memory((run := build_run(row | nemo)).parallelism, run)
    assert interleaved.in_flight > 4  # of its four stages
    assert interleaved.num_stage_buffers == ceil(interleaved.in_flight / 4)


def test_published_fp8_of_megatron_has_gradients_in_bf16() -> None:
    nemo = ROW | {"source": "NVIDIA/NeMo docs", "zero_stage": "1", "dp": "2", "fsdp": "1"}
    runs = [build_run(nemo | {"precision": precision}) for precision in ("bf16", "fp8")]
    memories = [build_rank_memory(run.parallelism, run).fsdp for run in runs]
    assert [memory and memory.reduced_element_bytes for memory in memories] == [4, 2]


def test_published_transformer_engine_saves_inputs_once_in_fp8() -> None:
    row = ROW | {"precision": "fp8", "act_ckpt": "none", "source": "NVIDIA/NeMo docs", "tp": "2"}
    run = build_run(row)
    spec = build_rank_memory(run.parallelism, run).forward_spec
    block = model_op_graphs(run.model, spec).block
    assert isinstance(run.model, DecoderConfig)
    inputs = 2 * run.model.width + (run.model.width + run.model.feedforward)
    saved = [tensor for op in block.operators for tensor in op.saved if tensor in op.writes[1:]]
    fp8_bytes = sum(
        block.sizes[tensor]
        for op in block.operators
        if op.work is OpWork.matmul_fp8
        for tensor in op.saved
    )
    assert fp8_bytes == spec.num_tokens // 2 * inputs
    assert len(saved) == len(set(saved))


def test_published_unknown_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="gpu=TPU"):
        build_run(ROW | {"gpu": "TPU"})


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("H100", 80),
        ("NVIDIA H100 80GB HBM3", 80),
        ("h100-sxm", 80),
        ("H100-96GB-500W", 95),
        ("A100-SXM4-40GB", 40),
        ("A100", 80),
        ("RTX4090", 24),
        ("NVIDIA GeForce RTX 4090", 24),
        ("Tesla V100-SXM2-16GB", 16),
    ],
)
def test_published_device_aliases_are_known(name: str, gib: float) -> None:
    assert (
        published_devices.device_profile(name, published_frameworks.OTHER, profiles()).memory_gib
        == gib
    )


def test_published_device_has_the_rates_of_its_profile() -> None:
    h100 = profiles()["h100"]
    published = published_devices.device_profile(
        "H100-96GB-500W", published_frameworks.OTHER, profiles()
    )
    assert (published.link_gb_per_s, published.node_link_gb_per_s) == (h100.link_gb_per_s, 48)
    assert published.step_scale == 1.0
    assert published.product_share == pytest.approx(h100.product_share * (500 / 700) ** 0.45)
    bigscience = build_run(ROW | {"source": "bigscience-workshop/bigscience", "gpu": "A100"})
    assert bigscience.hardware.node_link_gb_per_s == 6.0
    foundry = build_run(ROW | {"source": "mosaicml/llm-foundry", "precision": "amp_bf16"})
    assert foundry.hardware.attention_share == pytest.approx(0.32 / 1.9)
    nemo = build_run(ROW | {"source": "NVIDIA/NeMo docs"})
    assert nemo.hardware.attention_share == h100.attention_share
    blackwell = build_run(ROW | {"source": "NVIDIA/NeMo docs", "gpu": "B200-180GB"})
    assert blackwell.hardware.attention_share == profiles()["b200"].attention_share


def test_published_transformer_engine_casts_less_than_torchao() -> None:
    row = ROW | {"precision": "fp8", "act_ckpt": "none", "compile": "1"}
    torchao, engine = (
        build_run(row | {"source": source}) for source in ("pytorch/torchtitan", "NVIDIA/NeMo docs")
    )
    steps = [predict_step_time(run) for run in (torchao, engine)]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[1].matmul < 0.85 * steps[0].matmul
    lora = build_run(row | {"source": "NVIDIA/NeMo docs", "peft": "lora"})
    assert lora.precision.parameters is FloatFormat.bf16
    adapted = predict_step_time(lora)
    assert adapted is not None  # without gradients of frozen weights
    assert adapted.matmul < 0.8 * steps[1].matmul


def test_published_litgpt_saves_fp32_norms_and_dropout_masks() -> None:
    row = ROW | {"precision": "bf16-true", "fsdp": "1", "peft": "lora", "act_ckpt": "none"}
    litgpt = build_run(row | {"source": "Lightning-AI/litgpt"})
    spec = build_rank_memory(litgpt.parallelism, litgpt).forward_spec
    assert spec.unfused_norms
    assert spec.adapter_dropout == 0.05
    other = check_fit(build_run(row | {"source": "somebody/else"})).peak
    fp32_bytes = 2 * 8192 * 4096 * 4  # of the input of a norm
    assert check_fit(litgpt).peak > other + 60 * fp32_bytes  # of 64 norms in blocks


def test_published_peak_includes_quantization_and_loading() -> None:
    row = ROW | {"source": "Lightning-AI/litgpt", "precision": "bf16-true", "quant": "bnb.nf4"}
    run = build_run(row | {"fsdp": "1"})
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    workspace_bytes = 100 * 2**30 - published_runs.measured_peak(
        row | {"fsdp": "1"}, run, 100 * 2**30
    )
    assert workspace_bytes == pytest.approx(linear * (2 - 0.5625))
    published_run = build_run(single_gpu_row := row | {"fsdp": "1", "act_ckpt": "none"})
    tokens = published_run.trainer.micro_batch * published_run.data.sequence
    inputs = tokens * (2 * 4096 + 14336) * 2 * 32
    assert (
        workspace_bytes
        - (100 * 2**30 - published_runs.measured_peak(single_gpu_row, published_run, 100 * 2**30))
        == inputs
    )
    peak = published_runs.measured_peak(
        row | {"quant": "", "fsdp": "2"}, build_run(row | {"fsdp": "2"}), 0
    )
    assert peak == 8_030_261_248 * 2 * 3 // 2
