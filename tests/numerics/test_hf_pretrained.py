"""Pretrained weights: equal to those that transformers loads, or rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.hf_checkpoints import MORE_ARCHITECTURES, RARE_ARCHITECTURES, HFCheckpoints
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from scalewise.errors import CheckpointError
from scalewise.models.build import build_model, export_model
from scalewise.models.hf.config import HuggingFaceConfig

WEIGHTS_FILE = "model.safetensors"
Tensors = dict[str, Tensor]
Change = Callable[[Path, Tensors], Tensors | None]


def tokens() -> Tensor:
    return torch.randint(256, (2, 48), generator=torch.Generator().manual_seed(2))


def assert_same_logits(folder: Path) -> None:
    spec = HuggingFaceConfig(path=str(folder))
    assert [*spec.validate()] == []
    actual, expected = (
        build_model(spec, 1).eval(),
        AutoModelForCausalLM.from_pretrained(folder).eval(),
    )
    with torch.no_grad():
        torch.testing.assert_close(actual(tokens()), expected(tokens()).logits, rtol=0, atol=0)


def write_changed(hf_checkpoint: HFCheckpoints, family: str, change: Change, folder: Path) -> Path:
    """Copy a checkpoint with changed tensors; ``change`` may write files instead."""
    shutil.copytree(hf_checkpoint(family), folder)
    tensors = change(folder, load_file(folder / WEIGHTS_FILE))
    if tensors is not None:
        (folder / WEIGHTS_FILE).unlink()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def unchanged(folder: Path, tensors: Tensors) -> Tensors:
    return tensors


def renamed_head(folder: Path, tensors: Tensors) -> Tensors:
    return {name.replace("embed_out", "lm_head"): tensor for name, tensor in tensors.items()}


def both_heads(folder: Path, tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": torch.randn_like(tensors["embed_out.weight"])}


def neox_buffers(folder: Path, tensors: Tensors) -> Tensors:
    bias = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    more = {f"gpt_neox.layers.{n}.attention.bias": bias.clone() for n in range(4)}
    more |= {f"gpt_neox.layers.{n}.attention.masked_bias": torch.tensor(-1e9) for n in range(4)}
    return tensors | more | {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4)}


def llama_frequencies(folder: Path, tensors: Tensors) -> Tensors:
    return tensors | {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(4)
    }


def own_head(folder: Path, tensors: Tensors) -> Tensors:
    embedding = next(tensors[name] for name in tensors if name.endswith("embed_tokens.weight"))
    head_weight = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5)) * 0.3
    return tensors | {"lm_head.weight": head_weight}


def tied_with_own_head(folder: Path, tensors: Tensors) -> Tensors:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    text = json.dumps(config | {"tie_word_embeddings": True})
    (folder / "config.json").write_text(text, "utf-8")
    name = "embed_out.weight" if "embed_out.weight" in tensors else "lm_head.weight"
    head_weight = torch.randn(256, 32, generator=torch.Generator().manual_seed(5)) * 0.3
    return tensors | {name: head_weight}


def equal_head(folder: Path, tensors: Tensors) -> Tensors:
    embedding = next(tensors[name] for name in tensors if name.endswith("embed_tokens.weight"))
    return tensors | {"lm_head.weight": embedding.clone()}


def head_only(folder: Path, tensors: Tensors) -> Tensors:
    tensors = equal_head(folder, tensors)
    return {
        name: tensor for name, tensor in tensors.items() if not name.endswith("embed_tokens.weight")
    }


def without_prefix(folder: Path, tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def file_next_to_index(folder: Path, tensors: Tensors) -> None:
    """``model.safetensors`` has precedence over the index; other files are not read."""
    random_tensors = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(random_tensors, folder / "model-00001-of-00001.safetensors")
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def shard_outside_index(folder: Path, tensors: Tensors) -> None:
    """All tensors of a listed file are read, including those absent from the index."""
    (folder / WEIGHTS_FILE).rename(folder / "part.safetensors")
    save_file({"not.read": torch.ones(2)}, folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": {next(iter(tensors)): "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def file_named_in_config(folder: Path, tensors: Tensors) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "mine.safetensors")
    random_tensors = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(random_tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    text = json.dumps(config | {"transformers_weights": "mine.safetensors"})
    (folder / "config.json").write_text(text, "utf-8")


LOADED_CHECKPOINTS: list[tuple[str, Change]] = [
    ("gpt_neox", unchanged),
    ("gpt_neox", renamed_head),
    ("gpt_neox", both_heads),
    ("gpt_neox", neox_buffers),
    ("apertus", unchanged),
    ("llama", llama_frequencies),
    ("qwen2", own_head),
    ("qwen2", equal_head),
    ("qwen2", head_only),
    ("qwen2", without_prefix),
    ("llama", file_next_to_index),
    ("llama", shard_outside_index),
    ("llama", file_named_in_config),
    ("gemma2", own_head),
]


@pytest.mark.parametrize(
    ("family", "change"),
    LOADED_CHECKPOINTS,
    ids=[f"{family}-{it.__name__}" for family, it in LOADED_CHECKPOINTS],
)
def test_hf_pretrained_weights_equal_transformers(
    family: str, change: Change, hf_checkpoint: HFCheckpoints, tmp_path: Path
) -> None:
    assert_same_logits(write_changed(hf_checkpoint, family, change, tmp_path / family))


def adapter(folder: Path, tensors: Tensors) -> None:
    (folder / "adapter_config.json").write_text("{}", "utf-8")


def consolidated_only(folder: Path, tensors: Tensors) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "consolidated.safetensors")


def truncated(folder: Path, tensors: Tensors) -> None:
    (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-7])


def lfs_pointer(folder: Path, tensors: Tensors) -> None:
    (folder / WEIGHTS_FILE).write_text("version https://git-lfs.github.com/spec/v1\n", "utf-8")


def missing_shard(folder: Path, tensors: Tensors) -> None:
    (folder / WEIGHTS_FILE).unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def shard_outside_folder(folder: Path, tensors: Tensors) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    text = json.dumps(config | {"transformers_weights": "../other/model.safetensors"})
    (folder / "config.json").write_text(text, "utf-8")


REJECTED_CHECKPOINTS: list[tuple[Change, str, str]] = [
    (adapter, "contains an adapter (adapter_config.json)", "merge the adapter"),
    (consolidated_only, "has no safetensors weights", "save_pretrained"),
    (
        truncated,
        "model.safetensors cannot be read as safetensors: it is truncated",
        "copy the folder",
    ),
    (lfs_pointer, "model.safetensors is a Git LFS pointer", "git lfs pull"),
    (missing_shard, "model-00001-of-00002.safetensors is missing", "copy the folder"),
    (shard_outside_folder, "names weights outside of the folder", "remove transformers_weights"),
]


@pytest.mark.parametrize(
    ("change", "reason", "fix"),
    REJECTED_CHECKPOINTS,
    ids=[change.__name__ for change, *_ in REJECTED_CHECKPOINTS],
)
def test_hf_unusable_weight_files_are_rejected_before_the_start(
    change: Change, reason: str, fix: str, hf_checkpoint: HFCheckpoints, tmp_path: Path
) -> None:
    spec = HuggingFaceConfig(
        path=str(write_changed(hf_checkpoint, "llama", change, tmp_path / "llama"))
    )
    (issue,) = spec.validate()
    assert reason in issue.reason
    assert fix in issue.fix
    assert issue.key == "model.path"
    with pytest.raises(CheckpointError):
        build_model(spec, 1)


def test_hf_checkpoint_with_other_buffers_is_rejected(
    hf_checkpoint: HFCheckpoints, tmp_path: Path
) -> None:
    def change(folder: Path, tensors: Tensors) -> Tensors:
        return tensors | {"model.layers.0.mlp.act_fn.beta": torch.tensor(0.75)}

    folder = write_changed(hf_checkpoint, "apertus", change, tmp_path / "apertus")
    with pytest.raises(CheckpointError, match=r"a buffer model\.layers\.0\.mlp\.act_fn\.beta"):
        build_model(HuggingFaceConfig(path=str(folder)), 1)


@pytest.mark.parametrize(
    ("family", "change"),
    [("gpt_neox", unchanged), ("qwen2", own_head), ("apertus", unchanged), ("gpt2", unchanged)],
)
def test_hf_export_equals_transformers_save(
    family: str, change: Change, hf_checkpoint: HFCheckpoints, tmp_path: Path
) -> None:
    folder = write_changed(hf_checkpoint, family, change, tmp_path / family)
    spec, export_folder, saved_folder = (
        HuggingFaceConfig(path=str(folder)),
        tmp_path / "out",
        tmp_path / "saved",
    )
    export_model(spec, dict(build_model(spec, 1).state_dict()), export_folder)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    reference.save_pretrained(saved_folder)
    actual, expected = (
        load_file(export_folder / WEIGHTS_FILE),
        load_file(saved_folder / WEIGHTS_FILE),
    )
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    assert_same_logits(export_folder)
    tied = AutoConfig.from_pretrained(export_folder).tie_word_embeddings
    assert tied == (family == "gpt2"), "an own head is no longer called tied"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", RARE_ARCHITECTURES)
def test_hf_dense_architectures_equal_transformers(
    family: str, hf_checkpoint: HFCheckpoints
) -> None:
    assert_same_logits(hf_checkpoint(family))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [*MORE_ARCHITECTURES, *RARE_ARCHITECTURES])
def test_hf_tied_config_uses_the_head_of_the_checkpoint(
    family: str, hf_checkpoint: HFCheckpoints, tmp_path: Path
) -> None:
    folder = write_changed(hf_checkpoint, family, tied_with_own_head, tmp_path / family)
    assert_same_logits(folder)
