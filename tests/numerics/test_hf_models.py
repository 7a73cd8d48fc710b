"""Models of transformers: logits, loading and export of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.hf_checkpoints import DECODER_MODELS, MORE_ARCHITECTURES, HFCheckpoints
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from scalewise.measure.allocated_bytes import LiveBytes
from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta, build_model, export_model, init_weights
from scalewise.models.hf.config import HuggingFaceConfig, InitKind


def tokens() -> torch.Tensor:
    return torch.randint(256, (2, 48), generator=torch.Generator().manual_seed(2))


def load_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
@pytest.mark.parametrize("family", [*DECODER_MODELS, "opt_narrow"])
@torch.no_grad()
def test_hf_logits_equal_transformers(
    family: str, shards: str, hf_checkpoint: HFCheckpoints
) -> None:
    folder = hf_checkpoint(family, shards)
    assert len([*folder.glob("*.safetensors")]) == 1 or shards == "20KB"
    spec = HuggingFaceConfig(path=str(folder))
    module, expected = build_model(spec, 1), load_transformers(folder)
    torch.testing.assert_close(module(tokens()), expected(tokens()).logits, rtol=0, atol=0)
    parameter_shapes = {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    }
    assert parameter_shapes == {weight.name: weight.shape for weight in spec.weight_census()}
    assert spec.num_parameters == expected.num_parameters()


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", MORE_ARCHITECTURES)
@torch.no_grad()
def test_hf_logits_of_more_architectures_equal_transformers(
    family: str, hf_checkpoint: HFCheckpoints
) -> None:
    folder = hf_checkpoint(family)
    spec = HuggingFaceConfig(path=str(folder))
    assert [*spec.validate()] == []
    actual, expected = build_model(spec, 1).eval(), load_transformers(folder)
    torch.testing.assert_close(actual(tokens()), expected(tokens()).logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", DECODER_MODELS)
def test_hf_initial_weights_do_not_depend_on_the_stage(
    family: str, hf_checkpoint: HFCheckpoints
) -> None:
    spec = HuggingFaceConfig(path=str(hf_checkpoint(family)), init=InitKind.random)
    full_parameters = dict(build_model(spec, 7).named_parameters())
    for stage in spec.split_stages(4, 32):
        chunk = build_meta(spec, stage)
        chunk.to_empty(device="cpu")
        init_weights(spec, chunk, 7)
        for name, parameter in chunk.named_parameters():
            torch.testing.assert_close(parameter, full_parameters.pop(name), rtol=0, atol=0)
    assert full_parameters == {}


@pytest.fixture
def eight_ranks() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield DeviceMesh("cpu", range(8))
    torch.distributed.destroy_process_group()


def test_hf_rank_never_stores_all_weights(
    eight_ranks: DeviceMesh, hf_checkpoint: HFCheckpoints
) -> None:
    spec = HuggingFaceConfig(path=str(hf_checkpoint("llama")))
    module = build_meta(spec, StageSlice(range(spec.layers)))
    for name, parameter in [*module.named_parameters()]:
        holder, _, key = name.rpartition(".")
        shard = distribute_tensor(parameter.detach(), eight_ranks, [Shard(0)])
        setattr(module.get_submodule(holder), key, torch.nn.Parameter(shard))
    module.to_empty(device="cpu")
    with LiveBytes() as live_bytes:
        init_weights(spec, module, 1)
    largest = max(weight.numel for weight in spec.weight_census()) * 4
    assert live_bytes.take_peak() <= 2 * largest < spec.num_parameters * 4 / 2
    head = module.get_parameter("head.lm_head.weight")
    assert isinstance(head, DTensor)
    expected = load_transformers(hf_checkpoint("llama")).lm_head.weight[: 256 // 8]
    torch.testing.assert_close(head.to_local(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", [*DECODER_MODELS, "opt_narrow"])
@torch.no_grad()
def test_hf_export_loads_in_transformers(
    family: str, hf_checkpoint: HFCheckpoints, tmp_path: Path
) -> None:
    spec = HuggingFaceConfig(path=str(hf_checkpoint(family)), init=InitKind.random, depth=3)
    module = build_model(spec, 5)
    export_model(spec, module.state_dict(), tmp_path / "export")
    exported = load_transformers(tmp_path / "export")
    assert exported.config.num_hidden_layers == 3
    torch.testing.assert_close(exported(tokens()).logits, module(tokens()), rtol=0, atol=0)
    exported_spec = HuggingFaceConfig(path=str(tmp_path / "export"))
    assert [*exported_spec.validate()] == []
    torch.testing.assert_close(
        build_model(exported_spec, 1)(tokens()), module(tokens()), rtol=0, atol=0
    )
