"""The decoder config: published sizes, validation, no torch import."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fixtures.decoder_configs import ENUMS
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from scalewise.models.base import AttentionFlops, StageSlice, TPStyle
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import NormKind, PositionKind

CONF = Path(__file__).parents[3] / "conf" / "model"
SMALL_DECODER = DecoderConfig(
    vocabulary=64, context=16, width=32, layers=2, heads=4, feedforward=48
)
PARAMETERS = {
    "moe_nano": 2_364_544,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v2_lite": 15_706_484_224,
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
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "mistral_7b": 7_241_732_096,
    "olmo2_7b": 7_298_617_344,
    "smollm3_3b": 3_075_098_624,
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "phi_2": 2_779_683_840,
    "pythia_160m": 162_322_944,
    "pythia_1b": 1_011_781_632,
    "gemma3_4b": 3_880_263_168,
}


def read(name: str) -> DecoderConfig:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert values.pop("defaults") == ["/schema/model/decoder@_here_", "_self_"]
    return DecoderConfig(
        **{key: ENUMS.get(key, lambda x: x)(value) for key, value in values.items()}
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_decoder_option_has_published_parameter_count(name: str) -> None:
    spec = read(name)
    assert spec.num_parameters == PARAMETERS[name]
    assert list(spec.validate()) == []


def test_decoder_options_all_have_a_published_count() -> None:
    decoders = {
        path.stem
        for path in CONF.glob("*.yaml")
        if "/schema/model/decoder@_here_" in path.read_text()
    }
    assert decoders == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_decoder_option_has_a_head_comment(name: str) -> None:
    assert (CONF / f"{name}.yaml").read_text().startswith("# ")


def test_decoder_weight_names_are_unique() -> None:
    names = [weight.name for weight in SMALL_DECODER.weight_census()]
    assert len(set(names)) == len(names)
    assert {weight.layer for weight in SMALL_DECODER.weight_census()} == {None, 0, 1}


def test_decoder_fields_fit_a_structured_config() -> None:
    round_tripped = OmegaConf.to_object(OmegaConf.create(dataclasses.asdict(SMALL_DECODER)))
    assert OmegaConf.structured(SMALL_DECODER).norm is NormKind.rmsnorm
    assert DecoderConfig(**round_tripped) == SMALL_DECODER


@pytest.mark.parametrize(
    ("change", "key", "fix"),
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
        ({"global_every": 2}, "model.global_every", "model.global_every=null"),
        ({"rope_local_theta": 1e4}, "model.rope_local_theta", "model.rope_local_theta=null"),
        ({"window": 0}, "model.window", "model.window=null"),
        ({"weights": "/no/such/folder"}, "model.weights", "model.weights=null"),
    ],
)
def test_decoder_issue_names_key_value_and_fix(
    change: dict[str, object], key: str, fix: str
) -> None:
    spec = dataclasses.replace(SMALL_DECODER, **change)
    (issue,) = spec.validate()
    assert issue.key == key
    assert issue.value == getattr(spec, key.removeprefix("model."))
    assert fix in issue.fix


def test_decoder_accepts_odd_heads_without_rope() -> None:
    spec = dataclasses.replace(SMALL_DECODER, head_width=5, position=PositionKind.learned)
    assert list(spec.validate()) == []


def test_decoder_issues_are_reported_at_once() -> None:
    invalid_spec = dataclasses.replace(SMALL_DECODER, width=33, kv_heads=3, dropout=2.0)
    assert [c.key for c in invalid_spec.validate()] == [
        "model.width",
        "model.kv_heads",
        "model.dropout",
    ]


@pytest.mark.parametrize(
    ("change", "query_width", "kv_width"),
    [({}, 32, 32), ({"kv_heads": 2}, 32, 16), ({"head_width": 16, "kv_heads": 1}, 64, 16)],
)
def test_decoder_attention_widths(change: dict[str, int], query_width: int, kv_width: int) -> None:
    spec = dataclasses.replace(SMALL_DECODER, **change)
    assert (spec.query_width, spec.kv_width) == (query_width, kv_width)


def test_decoder_flops_are_six_per_weight_plus_attention() -> None:
    weights = sum(
        w.numel
        for w in SMALL_DECODER.weight_census()
        if w.role in ("attention", "feedforward", "head")
    )
    assert SMALL_DECODER.flops(0) == 6 * weights
    assert SMALL_DECODER.flops(16) - SMALL_DECODER.flops(0) == 14 * 2 * 16 * 32


@pytest.mark.parametrize(("attention", "per_pair"), [("kernel", 14), ("palm", 12), ("causal", 6)])
def test_decoder_attention_flops_by_convention(attention: str, per_pair: int) -> None:
    flops = SMALL_DECODER.flops(16, 0, AttentionFlops[attention])
    assert flops - SMALL_DECODER.flops(0) == per_pair * 2 * 16 * 32


@given(st.integers(1, 40), st.integers(1, 48), st.integers(1, 5), st.integers(1, 4))
def test_mean_keys_are_twice_the_visible_ones(
    sequence: int, window: int, layers: int, every: int
) -> None:
    spec = dataclasses.replace(SMALL_DECODER, layers=layers, window=window, global_every=every)
    visible = [
        min(query + 1, spec.layer_window(layer) or sequence)
        for layer in range(layers)
        for query in range(sequence)
    ]
    # A query sees half of its own key here, as in S^2 / 2 pairs of a causal sequence.
    mean = sum(keys - 0.5 for keys in visible) / len(visible)
    assert spec.mean_keys(sequence) / 2 == pytest.approx(mean, abs=0.5)


specs = st.builds(
    DecoderConfig,
    vocabulary=st.sampled_from([64, 4096, 128_256]),
    context=st.just(64),
    width=st.sampled_from([32, 512]),
    layers=st.integers(1, 40),
    heads=st.just(4),
    feedforward=st.sampled_from([48, 2048]),
    tied=st.booleans(),
)


def flops_of(spec: DecoderConfig, stage: StageSlice, sequence: int) -> float:
    """FLOPs of a stage, computed from models with and without layers."""
    head = 6.0 * spec.vocabulary * spec.width
    block = (spec.flops(sequence) - head) / spec.layers
    return len(stage.layers) * block + head * stage.is_last


@given(specs, st.data(), st.sampled_from([1, 64]))
def test_decoder_stages_balance_flops(
    spec: DecoderConfig, data: st.DataObject, sequence: int
) -> None:
    count = data.draw(st.integers(1, spec.layers))
    stages = spec.split_stages(count, sequence)
    assert [layer for stage in stages for layer in stage.layers] == list(range(spec.layers))
    assert all(stage.layers for stage in stages)
    assert [stage.is_first for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.is_last for stage in stages] == [False] * (count - 1) + [True]
    flops = [flops_of(spec, stage, sequence) for stage in stages]
    assert sum(flops) == pytest.approx(spec.flops(sequence))
    block = flops_of(spec, StageSlice(range(1), is_last=False), sequence)
    min_flops = max(spec.flops(sequence) / count, flops_of(spec, StageSlice(range(1)), sequence))
    assert max(flops) <= min_flops + block * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "count", "layers"),
    [
        ("decoder_nano", 2, [3, 1]),  # the head costs 3.2 blocks: 7.2 / 2 would be 3.6
        ("gpt2_124m", 2, [9, 3]),  # 5.5
        ("llama3_8b", 4, [9, 9, 8, 6]),  # 2.4
        ("llama3_1b", 8, [3, 2, 2, 2, 2, 2, 2, 1]),  # 4.3
        ("llama3_70b", 16, [6] + [5] * 14 + [4]),  # 1.2
    ],
)
def test_decoder_head_counts_for_the_last_stage(name: str, count: int, layers: list[int]) -> None:
    spec = read(name)
    assert [len(stage.layers) for stage in spec.split_stages(count, sequence=1)] == layers


@pytest.mark.parametrize("change", [{}, {"position": PositionKind.learned}, {"tied": True}])
def test_decoder_tensor_parallel_styles_divide_evenly(change: dict[str, object]) -> None:
    spec = dataclasses.replace(
        SMALL_DECODER, bias=True, norm=NormKind.layernorm, kv_heads=2, **change
    )
    split = spec.tensor_parallel_styles()
    sharded_dim = {TPStyle.column: 0, TPStyle.row: 1, TPStyle.vocabulary: 0, TPStyle.head: 0}
    styles = set()
    for weight in spec.weight_census():
        module = weight.name.rpartition(".")[0].replace(f"blocks.{weight.layer}.", "blocks.*.")
        styles.add(module)
        dim = sharded_dim.get(split[module])
        if dim is not None and dim < len(weight.shape):
            assert weight.shape[dim] % 2 == 0, weight
            assert any(
                weight.shape[dim] % size == 0 for size in spec.tensor_parallel_sizes().values()
            ), weight
    absent_styles = {"position"} - styles | ({"head"} if spec.tied else set())
    assert set(split) - absent_styles == styles
    assert spec.tensor_parallel_sizes() == {
        "heads": 4, "kv_heads": 2, "feedforward": 48, "vocabulary": 64,
    }  # fmt: skip


def test_decoder_sublayers_are_column_row_pairs() -> None:
    split = SMALL_DECODER.tensor_parallel_styles()
    for half, row_layer in (("attention", "output"), ("feedforward", "down")):
        styles_of_half = {
            k.rpartition(".")[2]: v for k, v in split.items() if k.startswith(f"blocks.*.{half}.")
        }
        assert styles_of_half.pop(row_layer) is TPStyle.row, row_layer
        assert set(styles_of_half.values()) == {TPStyle.column}, row_layer


@pytest.mark.parametrize("tied", [True, False])
def test_decoder_tied_weight_is_counted_once(tied: bool) -> None:
    spec = dataclasses.replace(SMALL_DECODER, tied=tied)
    names = [weight.name for weight in spec.weight_census()]
    assert spec.tied_weights == ({"embedding.weight"} if tied else set())
    assert all(names.count(name) == 1 for name in spec.tied_weights)


def test_decoder_plan_imports_no_torch() -> None:
    code = (
        "import sys; from scalewise.models.decoder.config import DecoderConfig;"
        "DecoderConfig(8, 8, 8, 1, 1, 8).flops(8); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
