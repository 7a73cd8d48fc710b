"""LoRA of routed experts: a loop over experts, PEFT and one device as references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.decoder_configs import EXACT_TOLERANCE, EXPERT_DECODERS, hf_model, random_tokens
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import BATCHES, SGD, ReferenceRun, assert_same_training
from fixtures.strategies import STRATEGIES, TINY_DECODER, marks, mesh
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from scalewise import compose
from scalewise.adapters.build import apply_adapter, disable_adapter, merge_adapter
from scalewise.adapters.config import weight_census
from scalewise.adapters.lora_config import LoRAAdapterConfig, RSLoRAAdapterConfig
from scalewise.adapters.peft_export import export_adapter
from scalewise.checkpoints import peft_import
from scalewise.errors import ConfigError
from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.model import DecoderModule
from scalewise.models.decoder.moe import find_mixtures
from scalewise.models.decoder.moe_config import EXPERT_MATRICES
from scalewise.planner import peak_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]
"""PEFT emits them; it looks for the patterns of stacked experts among modules only."""

EXPERTS = "feedforward.experts.*"
ADAPTER = LoRAAdapterConfig(rank=3, alpha=6.0, targets=("attention.query", EXPERTS))
EXHAUSTIVE = pytest.mark.exhaustive


def adapted_model(spec: DecoderConfig, adapter: LoRAAdapterConfig) -> DecoderModule:
    """Adapted model whose factors are all random."""
    module = build_model(spec, 0)
    assert isinstance(module, DecoderModule)
    apply_adapter(adapter, module, spec)
    module.to_empty(device="cpu")
    fresh = build_model(spec, 0).state_dict()
    for name, tensor in module.state_dict().items():
        base_name = name.replace(".base_layer.", ".")
        tensor.copy_(fresh[base_name] if base_name in fresh else 0.1 * torch.randn(tensor.shape))
    module.init_buffers()
    return module.eval()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name.replace(".base_layer.", "."): it for name, it in module.state_dict().items()}


@pytest.mark.parametrize("adapter_class", [LoRAAdapterConfig, RSLoRAAdapterConfig])
def test_adapted_experts_equal_a_loop_over_experts(
    adapter_class: type[LoRAAdapterConfig],
) -> None:
    spec = replace(EXPERT_DECODERS["qwen3-moe"], initial_std=0.3)
    adapter = adapter_class(rank=3, alpha=6.0, targets=(EXPERTS,))
    mixture = find_mixtures(adapted_model(spec, adapter))[0]
    x = torch.randn(2, 7, spec.width, requires_grad=True)
    parts = {
        name: {
            "W": layer.base_layer.weight.unflatten(0, (spec.routed_experts, -1)),
            "A": layer.lora_A["default"].weight,
            "B": layer.lora_B["default"].weight,
        }
        for name in EXPERT_MATRICES
        for layer in [getattr(mixture.experts, name)]
    }
    factors = [parts[name][part] for name in EXPERT_MATRICES for part in "AB"]
    scale = 6.0 / 3 if adapter_class is LoRAAdapterConfig else 6.0 / 3**0.5

    def matrix(name: str, expert: int) -> Tensor:
        weight, rows = parts[name]["W"][expert], parts[name]["W"].shape[1]
        down = parts[name]["A"][3 * expert : 3 * (expert + 1)]
        up = parts[name]["B"][rows * expert : rows * (expert + 1)]
        return weight + scale * up @ down

    scores = (x @ mixture.router.weight.T).softmax(-1)
    picked, chosen = scores.topk(spec.experts_per_token)
    expected = torch.zeros_like(x)
    for expert in range(spec.routed_experts):
        weight = (picked / picked.sum(-1, keepdim=True) * (chosen == expert)).sum(-1)
        gate, up, down = (matrix(name, expert) for name in EXPERT_MATRICES)
        expected = expected + weight[..., None] * ((F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    actual, direction = mixture(x), torch.randn_like(x)
    torch.testing.assert_close(actual, expected, **EXACT_TOLERANCE)
    actual_gradients, expected_gradients = (
        torch.autograd.grad((output * direction).sum(), [x, *factors])
        for output in (actual, expected)
    )
    for index, gradient in enumerate(expected_gradients):
        assert gradient.abs().max() > 0, index
        torch.testing.assert_close(actual_gradients[index], gradient, **EXACT_TOLERANCE)


@pytest.mark.parametrize("targets", [(EXPERTS,), (".*",), ("feedforward.experts.down", "auto")])
def test_weight_census_equals_the_adapted_module(targets: tuple[str, ...]) -> None:
    spec, adapter = EXPERT_DECODERS["qwen3-moe"], replace(ADAPTER, targets=targets)
    module = build_model(spec, 0)
    apply_adapter(adapter, module, spec)
    actual = [
        (name.replace(".base_layer.", "."), tuple(parameter.shape), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    ]
    census = weight_census(adapter, spec)
    assert actual == [(weight.name, weight.shape, weight.trainable) for weight in census]


def test_disabled_adapter_leaves_experts_unchanged() -> None:
    spec = EXPERT_DECODERS["mixtral"]
    module, tokens = adapted_model(spec, ADAPTER), random_tokens(spec)
    with torch.no_grad():
        adapted = module(tokens)
        with disable_adapter(ADAPTER, module):
            disabled = module(tokens)
        assert torch.equal(disabled, build_model(spec, 0).eval()(tokens))
        assert torch.equal(module(tokens), adapted)
    assert (adapted - disabled).abs().max() > 1e-3


def test_merged_experts_have_the_same_logits() -> None:
    spec = EXPERT_DECODERS["mixtral"]
    module, tokens = adapted_model(spec, ADAPTER), random_tokens(spec)
    merged = build_model(spec, 1).eval()
    merged.load_state_dict(merge_adapter(ADAPTER, state_of(module), spec))
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens), module(tokens), **EXACT_TOLERANCE)


@pytest.mark.parametrize(
    ("family", "adapter_class", "targets"),
    [
        ("mixtral", LoRAAdapterConfig, ("attention.query", EXPERTS)),
        ("qwen3-moe", LoRAAdapterConfig, (EXPERTS,)),
        ("qwen3-moe-unnormalized", LoRAAdapterConfig, (".*",)),
    ],
)
def test_peft_loads_exported_experts_with_the_same_logits(
    family: str,
    adapter_class: type[LoRAAdapterConfig],
    targets: tuple[str, ...],
    tmp_path: Path,
) -> None:
    reference, spec = hf_model(EXPERT_DECODERS[family]), EXPERT_DECODERS[family]
    reference.save_pretrained(tmp_path / "base")
    spec = replace(spec, weights=str(tmp_path / "base"))
    adapter = adapter_class(rank=3, alpha=6.0, targets=targets)
    module, tokens = adapted_model(spec, adapter), random_tokens(spec)
    state = state_of(module)
    export_adapter(state, adapter, spec, tmp_path / "adapter", str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = module(tokens)
        assert (expected - reference(tokens).logits).abs().max() > 1e-3
        torch.testing.assert_close(loaded(tokens).logits, expected, **EXACT_TOLERANCE)

    inferred = peft_import.infer_config(tmp_path / "adapter", spec, adapter)
    assert inferred.adapted_layers(spec) == adapter.adapted_layers(spec)
    assert not list(peft_import.shape_issues(tmp_path / "adapter", adapter, spec))
    trained = [weight.name for weight in weight_census(adapter, spec) if weight.trainable]
    tensors = peft_import.load_tensors(tmp_path / "adapter", trained, spec)
    for name in trained:
        assert torch.equal(tensors[name], state[name]), name


def test_export_rejects_some_matrices_of_experts(tmp_path: Path) -> None:
    spec = EXPERT_DECODERS["mixtral"]
    adapter = replace(ADAPTER, targets=("feedforward.experts.down",))
    state = state_of(adapted_model(spec, adapter))
    with pytest.raises(ConfigError, match=r"leaves out feedforward\.experts\.gate") as error:
        export_adapter(state, adapter, spec, tmp_path / "out", "base")
    assert "adapter=merged" in error.value.issues[0].fix
    assert not (tmp_path / "out").exists()


def test_export_rejects_experts_trained_in_full(tmp_path: Path) -> None:
    spec = EXPERT_DECODERS["mixtral"]
    adapter = LoRAAdapterConfig(rank=3, trained=("feedforward.experts.up",))
    state = state_of(adapted_model(spec, adapter))
    with pytest.raises(ConfigError, match=r"trains feedforward\.experts\.up"):
        export_adapter(state, adapter, spec, tmp_path / "out", "base")


WITH_EXPERTS = ("model.experts=4", "model.expert_dim=16", "model.shared_experts=1")
LOSSES = ("model.aux_loss=0.1", "model.router_z_loss=0.01", "model.balance_rate=0.01")
LORA = ("adapter=lora", "adapter.rank=3", f"adapter.targets=[attention.query,{EXPERTS}]")
ALL_LAYERS = "adapter.targets=[.*]"
EVEN_RANK = "adapter.rank=4"
EXPERT_TENSOR = mesh(shards=2, expert=2, tensor=2)
STRATEGY_CASES = {
    "ddp": (STRATEGIES["ddp"], 2),
    "fsdp": (STRATEGIES["fsdp"], 2),
    "hsdp": (mesh(replicate=2, shards=2), 1),
    "pipeline_shards": (mesh(pipeline=2, shards=2), 2),
    "checkpointing": ((*STRATEGIES["fsdp"], "memory=checkpoint_full"), 2),
    "expert": (mesh(shards=2, expert=2), 2),
    "expert_shards": (mesh(shards=4, expert=2), 1),
    "expert_replicate": (mesh(replicate=2, shards=2, expert=2), 1),
    "expert_pipeline": (mesh(pipeline=2, shards=2, expert=2), 2),
    "expert_compile": ((*mesh(shards=2, expert=2), "compile=block"), 2),
    "deepspeed_zero3": (STRATEGIES["deepspeed_zero3"], 2),
    "tensor": (STRATEGIES["tensor"], 4),
    "tensor_all": ((*STRATEGIES["tensor"], ALL_LAYERS), 4),
    "tensor_no_sequence_parallel": ((*STRATEGIES["tensor_no_sequence_parallel"], ALL_LAYERS), 4),
    "tensor_shards": ((*mesh(shards=2, tensor=2), EVEN_RANK), 2),
    "tensor_attention": (
        (*mesh(shards=2, tensor=2), "adapter.targets=[attention.*]"),
        2,
    ),
    "tensor_pipeline": (mesh(pipeline=2, tensor=2), 4),
    "expert_tensor": ((*EXPERT_TENSOR, ALL_LAYERS), 2),
    "expert_tensor_shards": ((*mesh(shards=4, expert=2, tensor=2), EVEN_RANK), 1),
    "expert_tensor_attention": ((*EXPERT_TENSOR, "adapter.targets=[attention.*]"), 2),
    "expert_tensor_trained": (
        (*EXPERT_TENSOR, "adapter.trained=[feedforward.router,feedforward.shared.up,.*norm]"),
        2,
    ),
    "expert_tensor_dense_layers": ((*EXPERT_TENSOR, "model.dense_layers=1"), 2),
    "expert_tensor_checkpointing": ((*EXPERT_TENSOR, "memory=checkpoint_full"), 2),
}
"""Strategies and options with the micro-batch size, three of which are a step."""
IN_CI = ("fsdp", "expert_shards", "expert_tensor")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=(*marks(name), *(() if name in IN_CI else (EXHAUSTIVE,))))
        for name in STRATEGY_CASES
    ],
)
def test_adapted_experts_under_a_strategy_equal_one_device(
    name: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    strategy, micro_batch = STRATEGY_CASES[name]
    options = (*WITH_EXPERTS, *LORA, *(() if "deepspeed" in name else LOSSES))
    model_options = (it for it in strategy if it.startswith(("adapter.", "model.")))
    options = (*options, *model_options)
    run = JobRunner(tmp_path, shared_cache).without_defaults(
        *TINY_DECODER,
        *SGD,
        *BATCHES["clipped"],
        *strategy,
        *options,
        f"trainer.micro_batch={micro_batch}",
    )
    assert_same_training(run, reference_run("clipped", *options))


ONE_DEVICE = ("trainer.micro_batch=12",)


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((*STRATEGIES["tensor"], "trainer.micro_batch=4"), ONE_DEVICE),
        ((*mesh(shards=4, expert=2, tensor=2), "trainer.micro_batch=3"), ONE_DEVICE),
        (ONE_DEVICE, (*EXPERT_TENSOR, "trainer.micro_batch=6")),
    ],
    ids=" ".join,
)
def test_checkpoints_with_adapted_experts_resume_under_another_strategy(
    first: tuple[str, ...], second: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    train = (*TINY_DECODER, *BATCHES["clipped"], *WITH_EXPERTS, *LORA, EVEN_RANK, ALL_LAYERS)
    train = (*train, "trainer.max_steps=4", "trainer.validate_every=null", "checkpoint.every=2")
    full_run = run_job.without_defaults(*train, *first)
    resumed = run_job.without_defaults(*train, *second, resume=full_run.checkpoint(2))
    assert resumed.column("train/loss") == pytest.approx(full_run.column("train/loss"), rel=1e-5)
    expected, actual = full_run.weights(), resumed.weights()
    assert actual.keys() == expected.keys()
    for name in (name for name in expected if ".experts." in name and ".lora_" in name):
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


SIZES = ("model.width=64", "model.heads=4", "trainer.micro_batch=8", "trainer.max_steps=4")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param((f"adapter.targets=[{EXPERTS}]",), marks=EXHAUSTIVE),
        pytest.param(("parallelism=fsdp",), marks=EXHAUSTIVE),
        pytest.param(("memory=checkpoint_selective",), marks=EXHAUSTIVE),
        pytest.param(("precision=bf16_mixed",), marks=EXHAUSTIVE),
        *(
            pytest.param(overrides, marks=EXHAUSTIVE)
            for overrides in (
                STRATEGIES["tensor"],
                (*STRATEGIES["tensor"], ALL_LAYERS, "memory=checkpoint_full"),
                (*STRATEGIES["tensor"], "adapter.targets=[attention.*]"),
                (*mesh(shards=2, tensor=2), EVEN_RANK, ALL_LAYERS),
                (*EXPERT_TENSOR, ALL_LAYERS, "model.capacity_factor=2.0"),
            )
        ),
    ],
    ids=" ".join,
)
def test_memory_with_adapted_experts_equals_prediction(
    overrides: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    run = (*TINY_DECODER, *WITH_EXPERTS, *SIZES, *LORA, *overrides)
    predicted = peak_memory.worst_rank_breakdown(compose(run))
    folder = JobRunner(tmp_path, shared_cache).without_defaults(*run)
    error = predicted.peak / folder.summary["metrics"]["memory/peak_bytes"] - 1
    print(f"{' '.join(overrides)}: {error:+.2%} at {predicted.peak_phase}")
    assert abs(error) < 0.01


def test_flops_count_the_factors_of_the_experts_of_a_token() -> None:
    spec = EXPERT_DECODERS["qwen3-moe"]
    adapter = replace(ADAPTER, targets=(EXPERTS,))
    frozen = replace(ADAPTER, targets=("attention.query",))
    query = 3 * (spec.width + spec.query_width)
    factors = spec.experts_per_token * 3 * 3 * (spec.width + spec.hidden_dim)
    added = adapter.flops(spec, 16) - frozen.flops(spec, 16)
    assert added == pytest.approx(6.0 * spec.layers * (factors - query))
    active = adapter.active_parameters(spec) - spec.active_parameters
    assert active == spec.layers * factors
    assert frozen.active_parameters(spec) - spec.active_parameters == spec.layers * query
