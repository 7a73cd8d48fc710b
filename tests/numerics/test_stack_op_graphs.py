"""Models with several stacks: analytic memory equals the trace, FLOPs equal torch's counter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.hf_checkpoints import BLIP2_CONFIG_DIR, GATED_T5
from torch.utils.flop_counter import FlopCounterMode

from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.op_graph import OpWork, build_op_graphs
from scalewise.planner import peak_memory
from scalewise.planner.fit_check import check_fit
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig
from scalewise.strategies.single import SingleDevice
from scalewise.tracing.stack_op_graphs import representative_layers
from scalewise.tracing.step_trace import trace_run

Compose = Callable[..., RunConfig]
EXHAUSTIVE = pytest.mark.exhaustive
BLIP2, BLIP2_T5, T5 = "blip2", "blip2_t5", "t5"
LORA = ("adapter=lora", "adapter.rank=4", "adapter.dropout=0.05")
ACCUMULATION = ("trainer.micro_batch=8", "trainer.global_batch=16")
T5_TEXT: dict[str, Any] = {
    **GATED_T5,
    "model_type": "t5",
    "num_layers": 5,
    "num_decoder_layers": 7,
    "dropout_rate": 0.1,
    "is_encoder_decoder": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


@pytest.fixture
def stack_run(compose: Compose, tmp_path: Path) -> Compose:
    """``stack_run(family, *overrides)``: run of a model whose stacks have 5 to 8 layers."""

    def compose_run(family: str, *overrides: str) -> RunConfig:
        config, data = dict(T5_TEXT), ("objective=seq2seq", "data=synthetic")
        data = (*data, "data.sequence=48", "data.target_length=16", "data.vocabulary=256")
        if family != T5:
            config = json.loads((BLIP2_CONFIG_DIR / "config.json").read_text())
            config["vision_config"]["num_hidden_layers"] = 7
            config["qformer_config"] |= {"num_hidden_layers": 8, "hidden_dropout_prob": 0.1}
            config["text_config"] |= {"num_hidden_layers": 5, "dropout": 0.1}
            if family == BLIP2_T5:
                config["text_config"] = T5_TEXT
            data = ("objective=captioning", "data=shapes", "data.sequence=16")
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = ("model=hf", f"model.path={tmp_path}", "model.init=random")
        steps = ("trainer.micro_batch=16", "trainer.global_batch=null", "hardware=cpu")
        return compose(*model, *data, *steps, *overrides, check_machine=False)

    return compose_run


def layer_shapes(spec: HuggingFaceConfig, layer: int) -> dict[str, tuple[int, ...]]:
    start = f"blocks.{layer}."
    return {
        weight.name.removeprefix(start): weight.shape
        for weight in spec.weight_census()
        if weight.layer == layer
    }


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (BLIP2, (0, 1, 1, 1, 1, 1, 3, 4, 5, 6, 5, 6, 5, 6, 7, 8, 9, 9, 9, 11)),
        (T5, (0, 1, 1, 1, 2, 3, 4, 4, 4, 4, 4, 5)),
    ],
)
def test_representative_layers_have_the_weights_of_all_layers(
    family: str, expected: tuple[int, ...], stack_run: Compose
) -> None:
    spec = stack_run(family).model
    assert isinstance(spec, HuggingFaceConfig)
    shallow, layers = representative_layers(spec)
    assert layers == expected
    for layer, representative in enumerate(layers):
        assert layer_shapes(shallow, representative) == layer_shapes(spec, layer), layer


@pytest.mark.parametrize("depth", [1, 2])
def test_stacks_without_middle_layers_represent_themselves(depth: int, stack_run: Compose) -> None:
    spec = stack_run(BLIP2, f"model.depth={depth}").model
    assert isinstance(spec, HuggingFaceConfig)
    assert representative_layers(spec) == (spec, tuple(range(3 * depth)))


MIXED = ("precision=bf16_mixed", *ACCUMULATION)
CASES_OF_CI: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((family, ()) for family in (BLIP2, BLIP2_T5, T5)),
    (BLIP2, MIXED),
    (T5, ("memory=checkpoint_full", *LORA)),
)
CASES: tuple[tuple[str, ...], ...] = (
    (),
    MIXED,
    ("memory=checkpoint_full", *LORA),
    LORA,
    ACCUMULATION,
    ("precision=bf16_true",),
    ("precision=bf16_true", "optimizer=adamw_8bit", "memory=checkpoint_full"),
    ("memory=checkpoint_selective",),
    ("memory=checkpoint_every_n", "memory.every=2"),
    ("trainer.micro_batch=3",),
    ("adapter=ia3",),
    (*LORA, "quantization=nf4", "precision=bf16_mixed"),
)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param(
            *(family, case),
            id=f"{family} {' '.join(case)}",
            marks=() if (family, case) in CASES_OF_CI else EXHAUSTIVE,
        )
        for family in (BLIP2, BLIP2_T5, T5)
        for case in CASES
    ],
)
def test_memory_of_stacks_equals_trace(
    family: str, overrides: tuple[str, ...], stack_run: Compose
) -> None:
    run = stack_run(family, *overrides)
    trace, predicted = trace_run(run), peak_memory.worst_rank_breakdown(run)
    print(f"{family} {' '.join(overrides)}: {predicted.peak / trace.peak - 1:+.3%}")
    assert trace.traced_depths == (run.model.layers,)
    assert predicted.peak == pytest.approx(trace.peak, rel=0.005)
    assert all(size >= 0 for entry in predicted.entries for size in entry.bytes.values())


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallelism=fsdp",),
        *(
            pytest.param(("parallelism=fsdp", *case), marks=EXHAUSTIVE)
            for case in (ACCUMULATION, LORA, ("precision=bf16_mixed",), ("parallelism.shards=4",))
        ),
        pytest.param(("parallelism=hsdp",), marks=EXHAUSTIVE),
        pytest.param(("parallelism=fsdp", "parallelism.shard=gradients"), marks=EXHAUSTIVE),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("family", [BLIP2, T5])
def test_memory_of_sharded_stacks_equals_trace(
    family: str, overrides: tuple[str, ...], stack_run: Compose
) -> None:
    run = stack_run(family, *overrides)
    trace, predicted = trace_run(run), peak_memory.worst_rank_breakdown(run)
    print(f"{family} {' '.join(overrides)}: {predicted.peak / trace.peak - 1:+.3%}")
    assert predicted.peak == pytest.approx(trace.peak, rel=0.05)


@pytest.mark.parametrize("family", [BLIP2, BLIP2_T5, T5])
@pytest.mark.parametrize("overrides", [(), LORA], ids=str)
def test_flops_of_stacks_equal_torch_counter(
    overrides: tuple[str, ...], family: str, stack_run: Compose
) -> None:
    run = stack_run(family, *overrides, "trainer.micro_batch=2")
    module = SingleDevice(run.hardware.device).build(run)
    inputs = torch.zeros((2, 3, 32, 32), dtype=torch.uint8)
    if family == T5:
        inputs = torch.ones((2, 32), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:  # omits fused attention on the CPU
        module(inputs, torch.ones((2, 16), dtype=torch.long)).sum().backward()
    graphs = build_op_graphs(run.model, build_rank_memory(run.parallelism, run).forward_spec)
    predicted_flops = sum(
        operator.flops + operator.backward_flops
        for graph in (graphs.embedding, *graphs.blocks, graphs.head)
        for operator in graph.operators
        if operator.work is OpWork.matmul
    )
    assert predicted_flops == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("family", [BLIP2, T5])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "deepspeed_zero2_offload"])
def test_states_of_stacks_count_every_weight(
    strategy: str, family: str, stack_run: Compose
) -> None:
    run = stack_run(family, f"parallelism={strategy}")
    memory, weights = build_rank_memory(run.parallelism, run), run.weight_census()
    assert memory.numel(1) == sum(weight.numel for weight in weights) == run.model.num_parameters
    assert memory.numel(2) == sum(weight.shard_numel(2) for weight in weights)
    state_bytes = sum(
        run.optimizer.state_bytes(weight, memory.state_shards, 4) for weight in weights
    )
    assert memory.state_bytes(run) == state_bytes


def test_step_time_of_stacks_is_linear_in_layers(stack_run: Compose) -> None:
    overrides = ("hardware=a100_80g", "compile=none")
    runs = [stack_run(BLIP2, *overrides, f"model.depth={depth}") for depth in (6, 8, 10)]
    steps = [predict_step_time(run) for run in runs]
    seconds = [step.seconds for step in steps if step is not None]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=1e-6)
    assert seconds[1] - seconds[0] > 0.1 * seconds[0]


def test_plan_of_stacks_on_cuda_counts_boolean_dropout_masks(stack_run: Compose) -> None:
    on_cpu, on_cuda = (
        check_fit(stack_run(BLIP2, f"hardware={hardware}", "compile=none")).breakdown
        for hardware in ("cpu", "a100_80g")
    )
    tokens, width, layers = 16 * (8 + 16), 64, 5
    opt_masks = 3 * tokens * width * 2 * layers  # 1 instead of 4 bytes, two per block
    saved_on_cpu, saved_on_cuda = (
        max(entry.max_bytes for entry in breakdown.entries if entry.name == "activations of blocks")
        for breakdown in (on_cpu, on_cuda)
    )
    assert saved_on_cpu - saved_on_cuda > opt_masks
