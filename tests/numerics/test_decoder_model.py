"""The decoder module compared with Llama and GPT-2 of transformers and with its config."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from fixtures.decoder_configs import (
    ENUMS,
    EXACT_TOLERANCE,
    GPT2,
    LLAMA,
    OTHER_DECODERS,
    for_each_decoder,
    for_each_hf_decoder,
    hf_model,
    random_tokens,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import flop_counter
from transformers import AutoConfig, AutoModelForCausalLM

from scalewise.errors import CheckpointError, ConfigError
from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.hf_config_json import write_config
from scalewise.models.decoder.hf_families import find_family
from scalewise.models.decoder.state_dict_adapter import (
    export_folder,
    from_hf_state_dict,
    load_state_dict,
)

CONF = Path(__file__).parents[2] / "conf" / "model"


@torch.no_grad()
def assert_same_logits(actual: nn.Module, expected: nn.Module, spec: DecoderConfig) -> None:
    batch = random_tokens(spec)
    torch.testing.assert_close(actual.eval()(batch), expected(batch).logits, **EXACT_TOLERANCE)


def read(name: str) -> DecoderConfig:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    del values["defaults"]
    return DecoderConfig(
        **{key: ENUMS.get(key, lambda x: x)(value) for key, value in values.items()}
    )


@for_each_hf_decoder
def test_decoder_logits_equal_transformers(spec: DecoderConfig) -> None:
    reference = hf_model(spec)
    actual = build_model(spec, 0)
    actual.load_state_dict(from_hf_state_dict(reference.state_dict(), spec))
    assert_same_logits(actual, reference, spec)


@for_each_hf_decoder
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one-file", "shards"])
def test_decoder_loads_a_transformers_folder(
    spec: DecoderConfig, shard: str, tmp_path: Path
) -> None:
    reference = hf_model(spec)
    reference.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    assert_same_logits(build_model(replace(spec, weights=str(tmp_path)), 0), reference, spec)


@for_each_hf_decoder
def test_decoder_export_loads_in_transformers(spec: DecoderConfig, tmp_path: Path) -> None:
    actual = build_model(replace(spec, initial_std=0.2), 0)
    export_folder(actual.state_dict(), spec, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same_logits(actual, reference, spec)
    assert_same_logits(build_model(replace(spec, weights=str(tmp_path)), 0), reference, spec)


@for_each_hf_decoder
def test_packed_texts_have_the_logits_of_transformers(spec: DecoderConfig) -> None:
    reference, actual = hf_model(spec), build_model(spec, 0).eval()
    actual.load_state_dict(from_hf_state_dict(reference.state_dict(), spec))
    batch, lengths = random_tokens(spec), (20, 28)
    positions_BS = torch.cat([torch.arange(length) for length in lengths]).expand(len(batch), -1)
    with torch.no_grad():
        texts = [reference(text).logits for text in batch.split(lengths, 1)]
        logits = actual(batch, positions_BS=positions_BS)
    torch.testing.assert_close(logits, torch.cat(texts, 1), **EXACT_TOLERANCE)


def test_decoder_loads_published_gpt2_names() -> None:
    reference = hf_model(GPT2)
    unprefixed = {k.removeprefix("transformer."): v for k, v in reference.state_dict().items()}
    unprefixed["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    actual = build_model(GPT2, 0)
    actual.load_state_dict(from_hf_state_dict(unprefixed, GPT2))
    assert_same_logits(actual, reference, GPT2)


@pytest.mark.parametrize("spec", OTHER_DECODERS.values(), ids=OTHER_DECODERS.keys())
def test_decoder_without_transformers_architecture_is_not_exported(
    spec: DecoderConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is not supported by Hugging Face's"):
        export_folder(build_model(spec, 0).state_dict(), spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def without_a_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def without_head_and_config(folder: Path) -> None:
    without_a_tensor(folder, "lm_head.weight")
    (folder / "config.json").unlink()


def with_a_tensor(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.zeros(shape)}, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_an_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


INDEX_OF_LOST_SHARD = json.dumps(
    {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, "cannot be read as safetensors"),
        (shutil.rmtree, "neither a .safetensors file nor a folder"),
        (pickled, "has no safetensors weights"),
        (
            partial(with_an_index, text=INDEX_OF_LOST_SHARD),
            "model-00001-of-00001.safetensors is missing",
        ),
        (partial(with_an_index, text="{"), "is not a valid index of shards"),
        (partial(without_a_tensor, name="lm_head.weight"), "of its base model, without a head"),
        (without_head_and_config, "model.tied=true"),
        (partial(without_a_tensor, name="model.norm.weight"), "has no tensor model.norm.weight"),
        (partial(with_a_tensor, name="vision.w", shape=(2,)), "does not have: vision.w"),
        (partial(with_a_tensor, name="model.norm.weight", shape=(2,)), r"\(2,\), not"),
    ],
)
def test_decoder_rejects_a_checkpoint_of_another_shape(damage, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    export_folder(build_model(LLAMA, 0).state_dict(), LLAMA, folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=reason) as excinfo:
        load_state_dict(folder, LLAMA)
    for issue in excinfo.value.issues:
        assert issue.key == "model.weights", issue
        assert str(tmp_path) in str(issue.value), issue
        assert issue.fix, issue
        assert "\n" not in str(issue), issue


def test_decoder_rejects_an_untied_head_as_tied(tmp_path: Path) -> None:
    export_folder(build_model(LLAMA, 0).state_dict(), LLAMA, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.tied=false"):
        load_state_dict(tmp_path, replace(LLAMA, tied=True))


def shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


@for_each_decoder
def test_decoder_parameter_shapes_equal_the_module(spec: DecoderConfig) -> None:
    module = build_model(spec, 0)
    census = [(weight.name, weight.shape) for weight in spec.weight_census()]
    assert census == shapes(module)
    assert [name for name, _ in census] == list(module.state_dict())
    assert spec.buffer_bytes == sum(buffer.nbytes for buffer in module.buffers())


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_decoder_option_parameter_shapes_equal_the_module(name: str) -> None:
    if "/schema/model/decoder@_here_" not in (CONF / f"{name}.yaml").read_text():
        pytest.skip("another family")
    spec = read(name)
    with torch.device("meta"):
        module = build_model(spec, 0)
    assert [(weight.name, weight.shape) for weight in spec.weight_census()] == shapes(module)
    spec = replace(spec, balance_rate=0.0)  # no family has biases of routers
    config = write_config(find_family(spec), spec)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )
    assert reference.num_parameters() == spec.num_parameters


@for_each_decoder
def test_decoder_flops_equal_torch_counter(spec: DecoderConfig) -> None:
    spec = replace(spec, window=None)  # torch counts scores outside of windows
    # torch counts flash attention on CUDA only: count it on CPU by the same formulas
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    cpu = {
        flash: lambda *shapes, **_: flop_counter.sdpa_flop_count(*shapes[:3]),
        backward: lambda *shapes, **_: flop_counter.sdpa_backward_flop_count(*shapes[:4]),
    }
    batch = random_tokens(spec)
    module = build_model(spec, 0)
    with flop_counter.FlopCounterMode(display=False, custom_mapping=cpu) as counter:
        loss(module, batch).backward()
    per_token = counter.get_total_flops() / batch.numel()
    assert spec.flops(batch.shape[1]) == pytest.approx(per_token, rel=0.01)


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    logits = module(batch)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.roll(-1, 1).flatten())


@for_each_decoder
def test_decoder_gradient_reaches_every_parameter(spec: DecoderConfig) -> None:
    module = build_model(spec, 0)
    loss(module, random_tokens(spec)).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@for_each_decoder
def test_decoder_bf16_autocast_is_near_fp32(spec: DecoderConfig) -> None:
    module, batch = build_model(spec, 0), random_tokens(spec)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = module(batch)
    assert logits.dtype is torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(logits.float(), module(batch), rtol=0.05, atol=0.01)


@for_each_decoder
def test_decoder_attention_is_causal(spec: DecoderConfig) -> None:
    module, batch = build_model(spec, 0), random_tokens(spec)
    changed_batch = batch.clone()
    changed_batch[:, 20:] = (changed_batch[:, 20:] + 1) % spec.vocabulary
    with torch.no_grad():
        torch.testing.assert_close(module(batch)[:, :20], module(changed_batch)[:, :20])
        assert not torch.equal(module(batch)[:, 20:], module(changed_batch)[:, 20:])


@pytest.mark.parametrize(
    ("spec", "relative"), [(LLAMA, True), (GPT2, False)], ids=["rope", "learned"]
)
def test_decoder_depends_on_positions(spec: DecoderConfig, relative: bool) -> None:
    module, batch = (
        build_model(replace(spec, initial_std=0.3), 0).eval(),
        random_tokens(spec, length=24),
    )
    positions = torch.arange(24)

    def at(positions_T: Tensor) -> Tensor:
        module.set_position_ids(positions_T)
        return module(batch)

    with torch.no_grad():
        logits = module(batch)
        torch.testing.assert_close(at(positions), logits, rtol=0, atol=0)
        assert torch.allclose(at(positions + 8), logits, atol=1e-4) == relative
        assert not torch.allclose(at(2 * positions), logits, atol=1e-2)


def test_decoder_dropout_acts_in_training_only() -> None:
    module, batch = build_model(replace(LLAMA, dropout=0.5), 0), random_tokens(LLAMA)
    with torch.no_grad():
        assert not torch.equal(module.train()(batch), module(batch))
        assert torch.equal(module.eval()(batch), module(batch))


@for_each_hf_decoder
def test_decoder_bf16_error_is_that_of_transformers(spec: DecoderConfig) -> None:
    batch, actual_error, expected_error = random_tokens(spec), 0.0, 0.0
    for seed in range(8):  # which of the two rounds better depends on the weights
        expected, actual = hf_model(spec, seed), build_model(spec, 0).eval()
        actual.load_state_dict(from_hf_state_dict(expected.state_dict(), spec))
        with torch.no_grad():
            exact_logits = actual(batch)
            actual_error += (actual.bfloat16()(batch) - exact_logits).abs().mean().item()
            expected_error += (expected.bfloat16()(batch).logits - exact_logits).abs().mean().item()
    assert actual_error < 1.1 * expected_error
