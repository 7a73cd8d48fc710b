"""Initial weights are drawn from name and seed: a stage has those of the full model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.decoder_configs import (
    GPT2,
    LLAMA,
    for_each_decoder,
    random_tokens,
)

from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta, build_model, init_weights
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.model import DecoderModule
from scalewise.models.decoder.state_dict_adapter import export_folder


@for_each_decoder
def test_init_after_meta_device_equals_direct_build(spec: DecoderConfig) -> None:
    with torch.device("meta"):
        late = build_model(spec, 0)
    assert {p.device.type for p in late.parameters()} == {"meta"}
    late.to_empty(device="cpu")
    late.init_weights(3)
    fresh = build_model(spec, 3)
    torch.testing.assert_close(late.state_dict(), fresh.state_dict(), rtol=0, atol=0)
    batch = random_tokens(spec)
    torch.testing.assert_close(late(batch), fresh(batch), rtol=0, atol=0)


@for_each_decoder
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_have_the_weights_of_the_full_model(spec: DecoderConfig, count: int) -> None:
    whole, batch = build_model(spec, 5).eval(), random_tokens(spec)
    named, seen, x = dict(whole.named_parameters()), set(), batch
    for part in spec.split_stages(count, batch.shape[1]):
        module = build_meta(spec, part)
        assert {p.device.type for p in module.parameters()} == {"meta"}, part
        module.to_empty(device="cpu")
        init_weights(spec, module.eval(), 5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter, named[name], rtol=0, atol=0)
            assert name not in seen or name in spec.tied_weights, name
            seen.add(name)
        assert len(module.layers()) == len(part.layers), part
        with torch.no_grad():
            x = module(x)
    assert seen == named.keys()
    with torch.no_grad():
        torch.testing.assert_close(x, whole(batch), rtol=0, atol=0)


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_stages_of_loaded_weights_equal_the_full_model(spec: DecoderConfig, tmp_path: Path) -> None:
    export_folder(build_model(spec, 1).state_dict(), spec, tmp_path)
    given = replace(spec, weights=str(tmp_path))
    named = build_model(given, 0).state_dict()
    for part in given.split_stages(3, 16):
        module = build_meta(given, part).to_empty(device="cpu")
        init_weights(given, module, 0)
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(tensor, named[name], rtol=0, atol=0)


def test_weights_differ_by_matrix_and_seed() -> None:
    one, again, other = build_model(LLAMA, 3), build_model(LLAMA, 3), build_model(LLAMA, 4)
    drawn = [name for name, parameter in one.named_parameters() if parameter.ndim == 2]
    heads = {name: one.get_parameter(name).flatten()[:8] for name in drawn}
    assert len({tuple(head.tolist()) for head in heads.values()}) == len(drawn)
    for name in drawn:
        assert torch.equal(one.get_parameter(name), again.get_parameter(name)), name
        assert not torch.equal(one.get_parameter(name), other.get_parameter(name)), name


def test_build_does_not_advance_the_global_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    build_model(LLAMA, 3)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_drawn_in_fp32_for_every_dtype(dtype: torch.dtype) -> None:
    held = build_meta(LLAMA, StageSlice(range(LLAMA.layers))).to(dtype).to_empty(device="cpu")
    init_weights(LLAMA, held, 3)
    for name, parameter in build_model(LLAMA, 3).named_parameters():
        assert torch.equal(held.get_parameter(name), parameter.to(dtype)), name


def test_weights_have_the_configured_deviation() -> None:
    module = build_model(replace(LLAMA, width=256, feedforward=512), 0)
    block = module.blocks["0"]
    assert isinstance(module, DecoderModule)
    for weight, std in [
        (module.embedding.weight, 0.02),
        (block.attention.query.weight, 0.02),
        (block.attention.output.weight, 0.02 / 6**0.5),
        (block.feedforward.down.weight, 0.02 / 6**0.5),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.05), std
