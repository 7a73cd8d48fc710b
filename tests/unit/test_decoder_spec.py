"""The decoder's pure face: published sizes, refusals, and no torch."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from scalewise.models.decoder.spec import Activation, Decoder, Norm, Position

CONF = Path(__file__).parents[2] / "conf" / "model"
SMALL = Decoder(vocabulary=64, context=16, width=32, layers=2, heads=4, feedforward=48)
PARAMETERS = {
    "decoder_nano": 1_180_800,
    "decoder_10m": 9_965_824,
    "gpt2_124m": 124_439_808,
    "llama_160m": 162_417_408,
    "tinyllama_1b": 1_100_048_384,
    "llama3_1b": 1_235_814_400,
    "openllama_3b": 3_426_473_600,
    "openllama_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "openllama_13b": 13_015_864_320,
    "llama3_70b": 70_553_706_496,
}


def read(name: str) -> Decoder:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert values.pop("defaults") == ["/schema/model/decoder@_here_", "_self_"]
    enums = {"norm": Norm, "position": Position, "activation": Activation}
    return Decoder(**{key: enums.get(key, lambda x: x)(value) for key, value in values.items()})


@pytest.mark.parametrize("name", PARAMETERS)
def test_file_has_published_parameter_count(name: str) -> None:
    spec = read(name)
    assert spec.parameters == PARAMETERS[name]
    assert list(spec.complaints()) == []


def test_every_decoder_file_is_counted() -> None:
    decoders = {
        path.stem
        for path in CONF.glob("*.yaml")
        if "/schema/model/decoder@_here_" in path.read_text()
    }
    assert decoders == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_file_opens_with_what_it_is(name: str) -> None:
    assert (CONF / f"{name}.yaml").read_text().startswith("# ")


def test_census_names_each_tensor_once() -> None:
    names = [weight.name for weight in SMALL.census()]
    assert len(set(names)) == len(names)
    assert {weight.layer for weight in SMALL.census()} == {None, 0, 1}


def test_fields_fit_a_structured_config() -> None:
    twin = OmegaConf.to_object(OmegaConf.create(dataclasses.asdict(SMALL)))
    assert OmegaConf.structured(SMALL).norm is Norm.rmsnorm
    assert Decoder(**twin) == SMALL


@pytest.mark.parametrize(
    ("change", "key", "cure"),
    [
        ({"width": 33}, "model.width", "model.width=36"),
        ({"kv_heads": 3}, "model.kv_heads", "model.kv_heads=null"),
        ({"head_width": 5}, "model.head_width", "model.head_width=6"),
        ({"layers": 0}, "model.layers", "model.layers=1"),
        ({"heads": 0}, "model.heads", "model.heads=1"),
        ({"kv_heads": 0}, "model.kv_heads", "model.kv_heads=null"),
        ({"norm_epsilon": 0.0}, "model.norm_epsilon", "model.norm_epsilon=1e-05"),
        ({"dropout": 1.0}, "model.dropout", "model.dropout=0"),
        ({"dropout": -0.1}, "model.dropout", "model.dropout=0"),
        (
            {"rope_scaling": True, "rope_low_frequency": 4.0},
            "model.rope_scaling",
            "rope_scaling=false",
        ),
        ({"weights": "/no/such/folder"}, "model.weights", "model.weights=null"),
    ],
)
def test_contradiction_names_key_value_and_cure(
    change: dict[str, object], key: str, cure: str
) -> None:
    spec = dataclasses.replace(SMALL, **change)
    (complaint,) = spec.complaints()
    assert complaint.key == key
    assert complaint.value == getattr(spec, key.removeprefix("model."))
    assert cure in complaint.cure


def test_odd_heads_are_fine_without_rotation() -> None:
    spec = dataclasses.replace(SMALL, head_width=5, position=Position.learned)
    assert list(spec.complaints()) == []


def test_all_contradictions_are_told_at_once() -> None:
    wrong = dataclasses.replace(SMALL, width=33, kv_heads=3, dropout=2.0)
    assert [c.key for c in wrong.complaints()] == ["model.width", "model.kv_heads", "model.dropout"]


@pytest.mark.parametrize(
    ("change", "query_width", "kv_width"),
    [({}, 32, 32), ({"kv_heads": 2}, 32, 16), ({"head_width": 16, "kv_heads": 1}, 64, 16)],
)
def test_attention_widths(change: dict[str, int], query_width: int, kv_width: int) -> None:
    spec = dataclasses.replace(SMALL, **change)
    assert (spec.query_width, spec.kv_width) == (query_width, kv_width)


def test_flops_are_six_per_weight_and_grow_with_the_row() -> None:
    weights = sum(w.count for w in SMALL.census() if w.role in ("attention", "feedforward", "head"))
    assert SMALL.flops(0) == 6 * weights
    assert SMALL.flops(16) - SMALL.flops(0) == 14 * 2 * 16 * 32


def test_planning_a_decoder_needs_no_torch() -> None:
    code = (
        "import sys; from scalewise.models.decoder.spec import Decoder;"
        "Decoder(8, 8, 8, 1, 1, 8).flops(8); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
