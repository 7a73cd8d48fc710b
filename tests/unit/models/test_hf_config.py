"""The config of a transformers model, and rejected ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.hf_checkpoints import (
    BLIP2,
    BLIP2_T5_TEXT,
    CONFIGS,
    LLAMA,
    NO_SEQUENCE_PARALLEL,
    OPT,
    RANDOM_LLAMA,
    HFCheckpoints,
)
from fixtures.rejections import (
    REJECTION_FIELDS,
    RejectionCase,
    assert_rejected,
    overrides_id,
    rejection_issues,
)
from safetensors.torch import load_file, save_file

from scalewise.errors import CheckpointError
from scalewise.models.build import build_model
from scalewise.models.hf.config import HuggingFaceConfig, InitKind
from scalewise.planner.layout_enumeration import axis_sizes
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.planner.search import search_runs
from scalewise.run_config import RunConfig

Compose = Callable[..., RunConfig]

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def describe_folder(folder: Path, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config), "utf-8")
    return str(folder)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("memory", ["none", "checkpoint_full"])
def test_hf_plan_of_8b_equals_the_decoder(
    strategy: str, memory: str, compose: Compose, tmp_path: Path
) -> None:
    """Both models have equal weights and matmuls; their blocks are implemented differently."""
    common_overrides = (
        "data=synthetic",
        "data.sequence=2048",
        f"parallelism={strategy}",
        f"memory={memory}",
    )
    path = describe_folder(tmp_path / "8b", **LLAMA_8B)
    overrides = ("model=hf", f"model.path={path}", "model.init=random", *common_overrides)
    run, decoder = (
        compose(*overrides, check_machine=False),
        compose("model=llama3_8b", *common_overrides, check_machine=False),
    )
    weight_shapes = sorted(weight.shape for weight in run.model.weight_census())
    assert weight_shapes == sorted(weight.shape for weight in decoder.model.weight_census())
    assert run.flops_per_token == decoder.flops_per_token
    actual, expected = (
        build_rank_memory(model_run.parallelism, model_run, 0) for model_run in (run, decoder)
    )
    assert actual.weight_bytes(4, actual.parameter_shards) == expected.weight_bytes(
        4, expected.parameter_shards
    )
    assert actual.state_bytes(run) == expected.state_bytes(decoder)


TENSOR = ["parallelism=tensor", "parallelism.tensor=2"]
DATA_OVERRIDES = ["data=synthetic", "data.sequence=64"]
REJECTED_OPTIONS: list[RejectionCase] = [
    (
        [*TENSOR, NO_SEQUENCE_PARALLEL, "adapter=lora"],
        "adapter",
        "is not supported with",
        "adapter=none",
    ),
    (
        ["parallelism=context"],
        "parallelism.context",
        "is not supported for Hugging Face models",
        "parallelism=fsdp",
    ),
    (
        ["parallelism=pipeline"],
        "parallelism.pipeline",
        "is not supported for Hugging Face models",
        "parallelism=fsdp",
    ),
    (["adapter=prompt"], "adapter", "is not supported for Hugging Face models", "adapter=lora"),
    (["adapter=prefix"], "adapter", "is not supported for Hugging Face models", "adapter=lora"),
    (["precision=fp8", "adapter=lora"], "adapter", "freezes matrices", "precision=bf16_mixed"),
    (
        [*TENSOR, NO_SEQUENCE_PARALLEL, "precision=fp8"],
        "parallelism.tensor",
        "fp8 scales per rank",
        "fsdp",
    ),
    (["quantization=nf4"], "quantization", "cannot be trained", "adapter=lora"),
    (["quantization=qat_int4", "adapter=lora"], "adapter", "freezes the matrices", "nf4"),
    (["quantization=qat_int4", "quantization.group=24"], "quantization.group", "divide", "=16"),
    (
        [*TENSOR, NO_SEQUENCE_PARALLEL, "quantization=qat_8da4w"],
        "parallelism.tensor",
        "scale",
        "fsdp",
    ),
    (["model.depth=0"], "model.depth", "must be positive", "model.depth=null"),
    (
        ["adapter=lora", "adapter.targets=[q_proj]"],
        "adapter.targets",
        "no linear layer",
        "did you mean",
    ),
]


@pytest.mark.parametrize(REJECTION_FIELDS, REJECTED_OPTIONS, ids=overrides_id)
def test_hf_rejects_incompatible_options(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected([*RANDOM_LLAMA, *DATA_OVERRIDES, *overrides], key, reason, fix)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "transformers does not have for gpt2"),
        ("opt", "transformers does not have for opt"),
        ("phi", "does not support blocks with parallel attention and feedforward (phi)"),
        ("phi3", "style colwise_gather_output of self_attn.qkv_proj"),
        ("olmo2", "style colwise_gather_output of self_attn.q_proj"),
    ],
)
def test_hf_model_without_tensor_plan_is_not_sharded(
    family: str, reason: str, hf_checkpoint: HFCheckpoints
) -> None:
    overrides = [
        "model=hf",
        f"model.path={hf_checkpoint(family)}",
        *DATA_OVERRIDES,
        *TENSOR,
        NO_SEQUENCE_PARALLEL,
    ]
    assert_rejected(overrides, "parallelism.tensor", reason, "parallelism=fsdp")


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2"])
def test_hf_qat_skips_layers_with_biases(family: str, hf_checkpoint: HFCheckpoints) -> None:
    overrides = [
        "model=hf",
        f"model.path={hf_checkpoint(family)}",
        *DATA_OVERRIDES,
        "quantization=qat_int4",
    ]
    reason = f"does not support linear layers with biases ({family})"
    assert_rejected(overrides, "quantization", reason, "quantization=none")


BLIP2_WITH_IMAGES = {**BLIP2, "model_type": "blip-2"}
UNSUPPORTED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no_start_token": ({"model_type": "t5"}, "does not set decoder_start_token_id"),
    "image": ({"model_type": "vit"}, "is not a supported language model (vit)"),
    "image_text": ({"model_type": "clip"}, "reads other inputs than text (clip)"),
    "blip2_no_start_token": (
        {**BLIP2_WITH_IMAGES, "text_config": {**BLIP2_T5_TEXT, "decoder_start_token_id": None}},
        "does not set decoder_start_token_id",
    ),
    "blip2_qformer_text": (
        {**BLIP2_WITH_IMAGES, "qformer_config": {"use_qformer_text_input": True}},
        "has a Q-Former that reads text",
    ),
    "blip2_partial_patches": (
        {**BLIP2_WITH_IMAGES, "vision_config": {"image_size": 30, "patch_size": 8}},
        "requires square images of full patches (image_size 30, patch_size 8)",
    ),
    "unknown": ({"model_type": "mine"}, "no config.json that transformers can read"),
    "code": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}},
        "requires custom code",
    ),
    "state_space": ({"model_type": "mamba"}, "does not set num_attention_heads"),
    "convolution": (
        {**LLAMA, "model_type": "jamba", "num_experts": 2, "use_mamba_kernels": False},
        "has convolutions over tokens (jamba)",
    ),
    "router_loss": (
        {**LLAMA, "model_type": "mixtral", "output_router_logits": True},
        "adds a loss of the router (output_router_logits=true), which is not computed",
    ),
    "values": (
        {**OPT, "model_type": "biogpt", "intermediate_size": 64},
        "fails in a forward pass on the meta device, which has no values of tensors (RuntimeError",
    ),
    "dynamic_rope": (
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type=dynamic computes its frequencies",
    ),
    "layerdrop": ({**OPT, "model_type": "opt", "layerdrop": 0.1}, "uses layerdrop"),
    "packed": ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "has quantized weights"),
    "torn": ({**LLAMA, "hidden_size": 33}, "no config.json that transformers can read"),
}


def test_hf_search_omits_incompatible_strategies(compose: Compose) -> None:
    overrides = (*RANDOM_LLAMA, *DATA_OVERRIDES, "plan.search=layout", "hardware=h100")
    run = compose(
        *overrides, "hardware.devices_per_node=4", "trainer.global_batch=4", check_machine=False
    )
    strategies = {
        axis_sizes(candidate.run.parallelism) for candidate in search_runs(run).candidates
    }
    assert {(1, 4, 1, 1, 1), (1, 2, 2, 1, 1), (1, 1, 4, 1, 1), (1, 1, 2, 1, 2)} <= strategies
    assert all(size[0] == size[3] == 1 for size in strategies)


@pytest.mark.parametrize("case", UNSUPPORTED_CONFIGS)
def test_hf_config_of_another_kind_is_rejected(case: str, tmp_path: Path) -> None:
    config, reason = UNSUPPORTED_CONFIGS[case]
    path = describe_folder(tmp_path / "model", **config)
    overrides = ["model=hf", f"model.path={path}", "model.init=random", *DATA_OVERRIDES]
    (issue,) = rejection_issues(overrides)
    assert issue.key == "model.path"
    assert reason in issue.reason
    assert "\n" not in str(issue)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is empty"),
        ("./nowhere", "does not exist"),
        ("nobody/nothing", "not in the Hub cache and cannot be downloaded"),
    ],
)
def test_hf_missing_path_is_rejected_in_one_line(
    path: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_rejected(
        ["model=hf", f"model.path='{path}'", *DATA_OVERRIDES], "model.path", reason, "model.path="
    )


def test_hf_packing_requires_a_mask_of_position_ids(
    hf_checkpoint: HFCheckpoints, compose: Compose
) -> None:
    for family in ("llama", "gpt2", "opt"):
        path = f"model.path={hf_checkpoint(family)}"
        overrides = ["model=hf", path, *DATA_OVERRIDES, "data.packing=true"]
        if family == "opt":
            reason = "is not supported for opt, whose mask ignores position ids"
            assert_rejected(overrides, "data.packing", reason, "data.packing=false")
        else:
            assert compose(*overrides).data.packing


def test_hf_name_is_found_in_the_hub_cache(
    hf_checkpoint: HFCheckpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache_folder = tmp_path / "models--somebody--small"
    (cache_folder / "refs").mkdir(parents=True)
    (cache_folder / "refs" / "main").write_text("0" * 40)
    (cache_folder / "snapshots").mkdir()
    (cache_folder / "snapshots" / ("0" * 40)).symlink_to(hf_checkpoint("llama"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = HuggingFaceConfig(path="somebody/small")
    assert [*spec.validate()] == []
    assert build_model(spec, 1).get_parameter("head.lm_head.weight").shape == (256, 32)


def test_hf_folder_without_weights_requires_random_init(tmp_path: Path) -> None:
    path = describe_folder(tmp_path / "bare", **LLAMA)
    (issue,) = HuggingFaceConfig(path=path).validate()
    assert "has no safetensors weights" in issue.reason
    assert "model.init=random" in issue.fix
    assert [*HuggingFaceConfig(path=path, init=InitKind.random).validate()] == []
    assert [
        config_issue.key for config_issue in HuggingFaceConfig(path=path, depth=9).validate()
    ] == [
        "model.depth",
        "model.path",
    ]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.weight", (32,), "has no tensor model.norm.weight"),
        (
            "model.norm.weight",
            (31,),
            "has a tensor of another shape: model.norm.weight [31], not [32]",
        ),
        ("model.more.weight", (2,), "has a tensor that the model does not have: model.more.weight"),
    ],
)
def test_hf_weights_of_another_model_are_rejected(
    name: str, shape: tuple[int, ...], message: str, hf_checkpoint: HFCheckpoints, tmp_path: Path
) -> None:
    import torch

    tensors = load_file(hf_checkpoint("llama") / "model.safetensors")
    tensors.pop(name, None)
    if "has no tensor" not in message:
        tensors[name] = torch.zeros(shape)
    path = describe_folder(tmp_path / "other", **CONFIGS["llama"][1])
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message.replace("[", r"\[")):
        build_model(HuggingFaceConfig(path=path), 1)


def test_hf_invalid_safetensors_are_rejected(tmp_path: Path) -> None:
    path = describe_folder(tmp_path / "torn", **LLAMA)
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        build_model(HuggingFaceConfig(path=path), 1)
