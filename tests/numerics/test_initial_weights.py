"""Initial weights depend on name and seed: a stage has those of the full model."""

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
        late_built = build_model(spec, 0)
    assert {p.device.type for p in late_built.parameters()} == {"meta"}
    late_built.to_empty(device="cpu")
    late_built.init_weights(3)
    direct_model = build_model(spec, 3)
    torch.testing.assert_close(late_built.state_dict(), direct_model.state_dict(), rtol=0, atol=0)
    batch = random_tokens(spec)
    torch.testing.assert_close(late_built(batch), direct_model(batch), rtol=0, atol=0)


@for_each_decoder
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_have_the_weights_of_the_full_model(spec: DecoderConfig, count: int) -> None:
    full_model, batch = build_model(spec, 5).eval(), random_tokens(spec)
    full_parameters, stage_names, x = dict(full_model.named_parameters()), set(), batch
    for stage in spec.split_stages(count, batch.shape[1]):
        module = build_meta(spec, stage)
        assert {p.device.type for p in module.parameters()} == {"meta"}, stage
        module.to_empty(device="cpu")
        init_weights(spec, module.eval(), 5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter, full_parameters[name], rtol=0, atol=0)
            assert name not in stage_names or name in spec.tied_weights, name
            stage_names.add(name)
        assert len(module.layers()) == len(stage.layers), stage
        with torch.no_grad():
            x = module(x)
    assert stage_names == full_parameters.keys()
    with torch.no_grad():
        torch.testing.assert_close(x, full_model(batch), rtol=0, atol=0)


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_stages_of_loaded_weights_equal_the_full_model(spec: DecoderConfig, tmp_path: Path) -> None:
    export_folder(build_model(spec, 1).state_dict(), spec, tmp_path)
    pretrained_spec = replace(spec, weights=str(tmp_path))
    full_state = build_model(pretrained_spec, 0).state_dict()
    for stage in pretrained_spec.split_stages(3, 16):
        module = build_meta(pretrained_spec, stage).to_empty(device="cpu")
        init_weights(pretrained_spec, module, 0)
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(tensor, full_state[name], rtol=0, atol=0)


def test_weights_differ_by_matrix_and_seed() -> None:
    first_model, same_seed_model, other_seed_model = (
        build_model(LLAMA, 3),
        build_model(LLAMA, 3),
        build_model(LLAMA, 4),
    )
    random_names = [
        name for name, parameter in first_model.named_parameters() if parameter.ndim == 2
    ]
    heads = {name: first_model.get_parameter(name).flatten()[:8] for name in random_names}
    assert len({tuple(head.tolist()) for head in heads.values()}) == len(random_names)
    for name in random_names:
        assert torch.equal(first_model.get_parameter(name), same_seed_model.get_parameter(name)), (
            name
        )
        assert not torch.equal(
            first_model.get_parameter(name), other_seed_model.get_parameter(name)
        ), name


def test_build_does_not_advance_the_global_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    build_model(LLAMA, 3)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_drawn_in_fp32_for_every_dtype(dtype: torch.dtype) -> None:
    meta_model = build_meta(LLAMA, StageSlice(range(LLAMA.layers))).to(dtype).to_empty(device="cpu")
    init_weights(LLAMA, meta_model, 3)
    for name, parameter in build_model(LLAMA, 3).named_parameters():
        assert torch.equal(meta_model.get_parameter(name), parameter.to(dtype)), name


@pytest.mark.parametrize("base_width", [None, 64])
def test_weights_have_the_configured_deviation(base_width: int | None) -> None:
    """With a base model of muP, matrices of blocks have a variance of 1 / fan-in relative to it."""
    base = {"base_width": base_width, "base_heads": base_width and LLAMA.heads}
    module = build_model(replace(LLAMA, width=256, feedforward=512, **base), 0)
    block, hidden = module.blocks["0"], 0.02 if base_width is None else 0.02 / 2
    assert isinstance(module, DecoderModule)
    for weight, std in [
        (module.embedding.weight, 0.02),
        (module.head.weight, 0.02),
        (block.attention.query.weight, hidden),
        (block.feedforward.up.weight, hidden),
        (block.attention.output.weight, hidden / 6**0.5),
        (block.feedforward.down.weight, hidden / 6**0.5),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.05), std
