"""Every config group, option and field is documented."""

import dataclasses
import re
from collections.abc import Iterator

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from scalewise import callback_config, registry
from scalewise.commands.explain import example_value
from scalewise.config import option_docs, paths, schemas
from scalewise.config.compose import compose
from scalewise.config.option_docs import FieldDoc, OptionDoc
from scalewise.run_config import RunConfig
from scalewise.typed_override import override

registry.import_options()
CLASSES = dict.fromkeys(
    [
        *(cls for options in registry.OPTIONS.values() for cls in options.values()),
        *callback_config.BUILTIN_CALLBACKS.values(),
        *(c for it in option_docs.HYDRA_OPTIONS.values() for _, cls in it.values() for c in cls),
        RunConfig,
    ]
)
OPTIONS = [
    option for group in option_docs.GROUP_NAMES for option in option_docs.group_doc(group).options
]

PRIVATE_WORDS = re.compile(
    r"\b(rows?|foreseen|told|ledger|pieces?|(?<!in )places?|anew|verdict|cure|foretells?|learnt"
    r"|complaints?|specs?|of your own|the user's|the suite|pictures?|held(?!.out)|holds)\b",
    re.IGNORECASE,
)
"""Private words for which PyTorch, Lightning and Hydra have terms."""
DIMENSIONLESS = {
    *(
        "alpha",
        "answers",
        "attention_multiplier",
        "attention_share",
        "attention_softcap",
        "aux_loss",
        "balance_rate",
        "base_heads",
        "capacity_factor",
    ),
    *("bandwidth_share", "batches_per_step", "beta", "beta1", "embedding_multiplier", "experts"),
    *("experts_per_token", "learning_rate", "logit_divisor", "logit_softcap", "perturbation"),
    *("residual_multiplier", "rope_attention_factor", "rope_local_theta", "router_z_loss"),
    "rotary_fraction",
    *("dense_layers", "routed_scaling", "shared_experts"),
    *(
        "beta2",
        "beta2_decay",
        "classes",
        "clip_norm",
        "constraints",
        "decay",
        "depth",
        "devices_per_node",
    ),
    *("dropout", "epsilon", "factor", "final", "floor", "heads", "initial_std", "keep"),
    *(
        "jobs",
        "kv_heads",
        "label_smoothing",
        "layers",
        "lr",
        "lr_factors",
        "masked",
        "max_bad_rows",
    ),
    *("max_restarts", "momentum", "nodes", "norm_epsilon", "patience", "pipeline_micro_batches"),
    *("powersgd_rank", "product_share", "rank", "replicas", "rope_factor", "rope_high_frequency"),
    *(
        "repeats",
        "rope_low_frequency",
        "rope_theta",
        "seed",
        "slots",
        "stage",
        "stages_per_rank",
        "step_longest",
    ),
    *("sources.NAME.weight", "stages.NAME.start", "stages.NAME.weights", "temperature"),
    *("clip_percentile", "skip_sigma", "z_loss"),
    *("step_scale", "step_shortest", "threshold", "trials", "validation_fraction", "weight_decay"),
}
"""Numeric fields that are counts, factors or fractions."""
INSTANTIATION_KEYS = ("_target_", "_recursive_", "_convert_", "engine")
"""Keys of plugin configs that are not options."""
SUFFIX_UNITS = {
    "_gib": "GiB",
    "_mib": "MiB",
    "_us": "microseconds",
    "_gb_per_s": "GB/s",
    "_tflops": "TFLOP/s",
    "_tokens_per_s": "tokens/s",
    "_steps": "optimizer steps",
}


def fields_of_classes() -> Iterator[tuple[type, FieldDoc]]:
    for cls in CLASSES:
        for entry in option_docs.class_fields(cls, "", {}):
            yield cls, entry


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_option_fields_are_documented(cls: type) -> None:
    for entry in option_docs.class_fields(cls, "", {}):
        name = f"{cls.__name__}.{entry.key}"
        assert entry.text.endswith("."), f"{name} has no documentation below it: {entry.text!r}"
        assert entry.text[0].isupper() or entry.text.startswith("``"), name
        prose = re.sub(r"``.*?``", "", entry.text)
        assert not PRIVATE_WORDS.findall(prose), f"{name}: {entry.text}"


def test_option_sizes_and_times_name_their_unit() -> None:
    for cls, entry in fields_of_classes():
        if not re.search(r"\b(int|float)\b", entry.type):
            assert not entry.unit, f"{cls.__name__}.{entry.key} is no number"
        elif entry.key in DIMENSIONLESS:
            assert not entry.unit, f"{cls.__name__}.{entry.key} is said to be dimensionless"
        else:
            assert entry.unit, f"{cls.__name__}.{entry.key}: {entry.text}"


def test_option_units_agree_with_field_names() -> None:
    for cls, entry in fields_of_classes():
        for suffix in sorted(SUFFIX_UNITS, key=len, reverse=True):
            if entry.key.endswith(suffix):
                assert entry.unit == SUFFIX_UNITS[suffix], f"{cls.__name__}.{entry.key}"
                break


def test_dimensionless_fields_all_exist() -> None:
    names = {entry.key for _, entry in fields_of_classes()}
    assert set() == DIMENSIONLESS - names


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.group}-{option.name}")
def test_options_have_a_head_comment(option: OptionDoc) -> None:
    assert option.summary.rstrip("`")[-1:] in (".", "?", *"0123456789") or "`" in option.summary
    prose = re.sub(r"`.*?`", "", f"{option.summary} {option.details.replace('``', '`')}")
    assert not PRIVATE_WORDS.findall(prose), option.summary


def test_option_choices_are_documented() -> None:
    for cls, entry in fields_of_classes():
        if entry.type == "choice":
            assert all(entry.choices.values()), f"{cls.__name__}.{entry.key}: {entry.choices}"


def test_groups_have_a_one_line_summary() -> None:
    summaries = option_docs.group_summaries()
    assert tuple(summaries) == option_docs.GROUP_NAMES
    for group, summary in summaries.items():
        assert summary.endswith("."), group
        assert len(summary) <= 64, group


def test_fields_of_number_or_word_document_the_word() -> None:
    for cls, entry in fields_of_classes():
        assert ("int or auto" in entry.type) <= ("auto: " in entry.text), (cls, entry.key)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.group}-{option.name}")
def test_option_examples_are_valid_overrides(option: OptionDoc) -> None:
    cls = registry.OPTIONS.get(option.group, {}).get(option.schema)
    if cls is None:
        return
    config = OmegaConf.structured(schemas.schema_mirror(cls))
    for entry in option.fields:
        value = example_value(entry)
        if value == "NUMBER":  # a placeholder for a number that the user knows
            continue
        mapping, _, rest = entry.key.partition(".NAME.")
        if rest:
            config.merge_with({mapping.partition(".")[2]: {"NAME": {}}})
        parsed = OverridesParser.create().parse_override(override(entry.key, value))
        OmegaConf.update(config, entry.key.partition(".")[2], parsed.value())


def test_documented_defaults_equal_a_composed_run() -> None:
    run = compose(["optimizer=muon", "parallelism=fsdp", "hardware=h100_8x4"], check_machine=False)
    for group, name in (("optimizer", "muon"), ("hardware", "h100_8x4"), ("trainer", "default")):
        option = next(it for it in option_docs.group_doc(group).options if it.name == name)
        composed_spec = getattr(run, group)
        own_fields = [entry for entry in option.fields if ".NAME." not in entry.key]
        assert len(own_fields) == len(dataclasses.fields(composed_spec)), (group, name)
        for entry in own_fields:
            value = getattr(composed_spec, entry.key.partition(".")[2])
            assert value == entry.default, entry.key


def test_option_inherits_values_of_its_base() -> None:
    node = next(it for it in option_docs.group_doc("hardware").options if it.name == "h100_8x4")
    assert node.schema == "device"
    assert (node.sets["memory_gib"], node.sets["nodes"]) == (80, 4)


def test_default_options_equal_a_composed_run() -> None:
    choices = compose([], check_machine=False).choices
    groups = {group: choices[group] for group in paths.CLOSED_GROUPS}
    assert groups.items() <= dict(option_docs.default_options()).items()


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int, "int"),
        (int | None, "int or null"),
        (int | str, "int or auto"),
        (tuple[str, ...], "list of str"),
    ],
)
def test_types_are_described_in_words(hint: type, text: str) -> None:
    assert option_docs.type_text(hint) == text


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("Memory of one device, in GiB.", "GiB"),
        ("Length, in tokens; null: all.", "tokens"),
        ("Throughput, in tokens/s; null: no limit.", "tokens/s"),
        ("Number of blocks.", ""),
        ("Stored in tokens or bytes.", ""),
    ],
)
def test_unit_is_parsed_from_the_documentation(text: str, unit: str) -> None:
    assert FieldDoc("key", "int", text, 1).unit == unit


def test_head_comment_omits_hydra_directives() -> None:
    text = "# @package callbacks\n# One line.\n# Another.\n\n# No head.\nkey: 1\n"
    assert option_docs.head_comment(text) == ["One line.", "Another."]


@pytest.mark.parametrize("group", option_docs.HYDRA_OPTIONS)
def test_documented_keys_of_plugins_are_those_of_their_config(group: str) -> None:
    schemas.store_schemas()
    repo = ConfigStore.instance().repo["hydra"][group.split("/")[1]]
    for option in option_docs.group_doc(group).options:
        node = repo[f"{option.name}.yaml"].node
        keys = [key for key in node if key not in INSTANTIATION_KEYS]
        documented = [entry.key.rpartition(".")[2] for entry in option.fields]
        if option.name != "slurm":  # documented by hydra-submitit-launcher
            assert sorted(documented) == sorted(keys), option.name
