"""Plans compared with the formulas and headline sizes of the papers whose techniques they plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scalewise.config.compose import compose
from scalewise.models.op_graph import Recompute
from scalewise.planner.activation_liveness import model_op_graphs, simulate_part
from scalewise.planner.fit_check import FitStatus, check_fit
from scalewise.planner.peak_memory import worst_rank_breakdown
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.run_config import RunConfig
from scalewise.units import GIGA, MEGA

ONE_STEP = (
    *("data=synthetic", "tracking=none", "compile=none", "trainer.max_steps=10"),
    *("schedule.warmup_steps=0", "trainer.micro_batch=1", "trainer.global_batch=null"),
)
GPT_7B = (
    *("model=gpt2_124m", "model.width=4096", "model.heads=32", "model.layers=36"),
    *("model.feedforward=16384", "hardware=a100_80g_8", "hardware.nodes=8"),
)
GPT_175B = (
    *("model=gpt2_124m", "model.width=12288", "model.heads=96", "model.layers=96"),
    *("model.feedforward=49152", "model.context=2048", "data.sequence=2048", "hardware=h100"),
)
LLAMA_65B = (
    *("model=openllama_7b", "model.width=8192", "model.heads=64", "model.layers=80"),
    *("model.feedforward=22016", "data.sequence=512", "hardware=a6000"),
)
SEQUENCE, MICRO_BATCH, WIDTH, HEADS = 1024, 8, 768, 16


def plan(*overrides: str) -> RunConfig:
    """Compose a run that is only planned."""
    return compose([*ONE_STEP, *overrides], check_machine=False)


def bytes_by_entry(run: RunConfig) -> dict[str, int]:
    """Largest bytes of each entry of the memory breakdown."""
    return {
        entry.name: max(entry.bytes.values(), default=0)
        for entry in worst_rank_breakdown(run).entries
    }


def saved_per_sbh(
    *overrides: str, recompute: Recompute = Recompute.nothing, **megatron: bool
) -> float:
    """Bytes that a GPT block saves, per element of its input: without a tensor's statistics.

    These are fp32: the logsumexp of each head, and mean and deviation of two layer norms.
    ``megatron``: properties of Megatron's layers, fields of ``ForwardSpec``.
    """
    size = (
        f"data.sequence={SEQUENCE}",
        f"trainer.micro_batch={MICRO_BATCH}",
        f"model.heads={HEADS}",
    )
    gpt = ("model=gpt2_124m", "model.dropout=0.1", "model.vocabulary=50304", "precision=bf16_true")
    run = plan("hardware=h100_8", *gpt, *size, *overrides)
    forward_spec = replace(build_rank_memory(run.parallelism, run).forward_spec, **megatron)
    block = model_op_graphs(run.model, forward_spec).block
    saved = simulate_part(block, recompute, fresh_gradients=False).saved_bytes
    tokens = SEQUENCE * MICRO_BATCH
    norm_shards = forward_spec.tensor_ranks if forward_spec.sequence_parallel else 1
    heads = 0 if forward_spec.stores_scores else HEADS // forward_spec.tensor_ranks
    statistics = 4 * tokens * heads
    if recompute is Recompute.nothing:
        statistics += 4 * tokens * 4 // norm_shards
    return (saved - statistics) / (tokens * WIDTH)


def test_gpt_block_saves_34_sbh() -> None:
    """Korthikanti et al., 2022, equation 1, without the attention scores: the kernel is fused."""
    assert saved_per_sbh() == pytest.approx(34, rel=1e-9)


def test_gpt_block_without_dropout_saves_no_masks() -> None:
    assert saved_per_sbh("model.dropout=0") == pytest.approx(34 - 2, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tensor_parallelism_saves_10_plus_24_per_rank(ranks: int) -> None:
    """Korthikanti et al., 2022, equation 2: norms, dropouts and inputs of matmuls are whole."""
    overrides = ("parallelism=tensor", "parallelism.sequence_parallel=false")
    saved = saved_per_sbh(*overrides, f"parallelism.tensor={ranks}")
    assert saved == pytest.approx(10 + 24 / ranks, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sequence_parallelism_saves_4_plus_30_per_rank(ranks: int) -> None:
    """Korthikanti et al., 2022, equation 4 is 34 / t, with shards of the inputs of both sublayers.

    They are gathered again in backward there. torch saves the gathered inputs: 2 + 2 of the 34.
    """
    overrides = ("parallelism=tensor", f"parallelism.tensor={ranks}")
    assert saved_per_sbh(*overrides) == pytest.approx(4 + 30 / ranks, rel=1e-9)
    megatron = saved_per_sbh(*overrides, has_megatron_layers=True)
    assert megatron == pytest.approx(34 / ranks, rel=1e-9)


@pytest.mark.parametrize("ranks", [1, 4])
def test_stored_scores_add_5_as_per_h(ranks: int) -> None:
    """Korthikanti et al., 2022, equations 1 and 4: ``sbh / t * (34 + 5 a s / h)``."""
    overrides = ("parallelism=tensor", f"parallelism.tensor={ranks}") if ranks > 1 else ()
    saved = saved_per_sbh(*overrides, has_megatron_layers=True, stores_scores=True)
    assert saved == pytest.approx((34 + 5 * HEADS * SEQUENCE / WIDTH) / ranks, rel=1e-9)


def test_full_checkpointing_saves_2_sbh() -> None:
    """Korthikanti et al., 2022, table 2: the input of the block in 16 bits."""
    statistics = 4 * HEADS / WIDTH  # that saved_per_sbh subtracts, and nothing is saved of
    saved = saved_per_sbh(recompute=Recompute.full)
    assert saved + statistics == pytest.approx(2, rel=1e-9)


def test_model_states_without_zero_are_16_bytes_per_parameter() -> None:
    """Rajbhandari et al., 2020, figure 1: 120 GB for 7.5 B parameters."""
    run = plan(*GPT_7B, "precision=bf16_mixed", "parallelism=ddp", "parallelism.replicas=64")
    entries = bytes_by_entry(run)
    states = sum(entries[name] for name in ("parameters", "gradients", "optimizer state"))
    assert states == 16 * run.model.num_parameters
    assert states / GIGA == pytest.approx(120, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "paper_gigabytes", "fp32_gradients"),
    [(1, 31.4, 0), (2, 16.6, 1), (3, 1.88, 1)],
)
def test_zero_divides_model_states(stage: int, paper_gigabytes: float, fp32_gradients: int) -> None:
    """Rajbhandari et al., 2020, figure 1: 64 ranks, 2 + 2 + 12 bytes per parameter.

    DeepSpeed keeps the gradients of stages 2 and 3 in fp32, which adds 2 bytes per 64 parameters.
    """
    parallelism = (f"parallelism=deepspeed_zero{stage}", "parallelism.replicas=64")
    run = plan(*GPT_7B, "precision=bf16_mixed", *parallelism)
    entries = bytes_by_entry(run)
    names = ("parameters", "gradients", "optimizer state", "masters")
    states = sum(entries[name] for name in names)
    excess = fp32_gradients * 2 * run.model.num_parameters / 64
    assert (states - excess) / GIGA == pytest.approx(paper_gigabytes, rel=0.01)


def test_sharded_parameters_divide_model_states_by_the_ranks() -> None:
    """Rajbhandari et al., 2020, figure 1: 1.88 GB on 64 ranks, here by FSDP."""
    run = plan(*GPT_7B, "precision=bf16_mixed", "parallelism=fsdp", "parallelism.shards=64")
    entries = bytes_by_entry(run)
    states = sum(entries[name] for name in ("parameters", "gradients", "optimizer state"))
    assert states / GIGA == pytest.approx(1.88, rel=0.01)


def test_qlora_trains_65b_on_one_gpu_of_48_gb() -> None:
    """Dettmers et al., 2023, abstract; 16-bit training takes more than 780 GB.

    Those are 12 bytes per parameter: bf16 weights and gradients, fp32 moments. ``bf16_true`` has
    bf16 moments (8 bytes), ``bf16_mixed`` fp32 weights (16 bytes).
    """
    qlora = ("adapter=lora", "adapter.rank=64", "quantization=nf4", "memory=checkpoint_full")
    run = plan(*LLAMA_65B, "precision=bf16_true", *qlora)
    fit = check_fit(run)
    assert fit.status is FitStatus.fits
    assert fit.reserved[1] < 48 * GIGA
    packed = bytes_by_entry(run)["parameters"] / run.model.num_parameters
    assert packed == pytest.approx((4 + 0.127) / 8, rel=0.04)  # section 3: 0.127 bits of scales
    low, high = (
        worst_rank_breakdown(plan(*LLAMA_65B, f"precision={precision}")).peak / GIGA
        for precision in ("bf16_true", "bf16_mixed")
    )
    assert low < 780 < high
    assert (low + high) / 2 == pytest.approx(780, rel=0.02)


def test_lora_of_gpt3_trains_ten_thousand_times_fewer_parameters() -> None:
    """Hu et al., 2021, section 4.2: 350 GB instead of 1.2 TB, and checkpoints of 35 MB."""
    lora = ("adapter=lora", "adapter.rank=4", "adapter.targets=[attention.query,attention.value]")
    run = plan(*GPT_175B, "precision=bf16_true", *lora)
    entries = bytes_by_entry(run)
    assert entries["parameters"] / GIGA == pytest.approx(350, rel=0.01)
    trained = entries["gradients"] // 2
    assert 2 * trained / MEGA == pytest.approx(35, rel=0.1)
    assert run.model.num_parameters / trained == pytest.approx(10_000, rel=0.1)
