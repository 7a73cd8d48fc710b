"""Every file of conf/, experiments/ and sweeps/ composes; precedence of overrides."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import yaml
from fixtures.hf_checkpoints import RANDOM_BLIP2, RANDOM_LLAMA, RANDOM_T5
from omegaconf import OmegaConf

from scalewise.checkpoints.trained_run import CONFIG_GROUPS
from scalewise.config import parsed_overrides, paths, run_folders
from scalewise.config.compose import changed_from_defaults, compose, flatten, group_choices
from scalewise.config.hydra_policy import hydra_session
from scalewise.config.parse import parse_group
from scalewise.config.sweep_preview import preview_search
from scalewise.errors import ConfigError
from scalewise.hpo.screen import ScreeningDesign
from scalewise.hpo.space import first_point, point_overrides
from scalewise.run_config import RunConfig

ROOT = paths.project_root()
OPTIONS = [(group, name) for group in paths.GROUPS for name in paths.option_names(group)]
CLASSES = ("model.classes=2", "model.tied=false")
BORING_MODULE = "objective.target=lightning.pytorch.demos.boring_classes.BoringModel"
FAULTS = [path.stem for path in sorted((ROOT / "conf" / "inject").glob("*.yaml"))]


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, list[str]]:
    """Overrides that options require: user files, or a constant schedule."""
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    (tmp_path / "a.jsonl").write_text('{"instruction": "Add 1 and 1.", "output": "2"}\n' * 100)
    np.zeros(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    return {
        "chat": [f"data.paths=[{tmp_path}/*.jsonl]"],
        "preference": [f"data.paths=[{tmp_path}/*.jsonl]", "objective=dpo"],
        "corpus_pairs": ["objective=dpo"],
        "corpus_classes": [*CLASSES, "objective=classification"],
        "labelled": [
            *CLASSES,
            "objective=classification",
            f"data.paths=[{tmp_path}/*.jsonl]",
            "data.classes=[no,yes]",
        ],
        "classification": [*CLASSES, "data=corpus_classes"],
        "grpo": ["data=reversal"],
        "data=seq2seq": [*RANDOM_T5, "objective=seq2seq", f"data.paths=[{tmp_path}/*.jsonl]"],
        "objective=seq2seq": [*RANDOM_T5, "data=synthetic", "data.target_length=64"],
        "captions": [
            *(*RANDOM_BLIP2, "objective=captioning", "data.image_size=32"),
            *(f"data.paths=[{tmp_path}/*.jsonl]", f"data.tokenizer={tmp_path}/a.txt"),
        ],
        "shapes": [*RANDOM_BLIP2, "objective=captioning"],
        "captioning": [*RANDOM_BLIP2, "data=shapes"],
        **{
            f"blip2_{model}": ["objective=captioning", "data=shapes", "data.image_size=224"]
            for model in ("opt_2_7b", "opt_6_7b", "flan_t5_xxl")
        },
        "dpo": ["data=corpus_pairs"],
        "text": [f"data.paths=[{tmp_path}/*.txt]"],
        "tokens": [f"data.paths=[{tmp_path}/*.bin]"],
        "data=hf": [f"data.path={tmp_path}"],
        "mixture": ["+data@data.sources.one.data=synthetic"],
        "model=hf": [*RANDOM_LLAMA],
        "schedule_free": ["schedule=constant"],
        "objective=module": [BORING_MODULE],
        **{
            f"{group}=module": ["objective=module", BORING_MODULE]
            for group in ("model", "data", "optimizer", "schedule")
        },
        **{virtual: ["model.context=1024"] for virtual in ("prompt", "prefix")},
        **{packing: ["adapter=lora"] for packing in ("nf4", "fp4", "int8")},
    }


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_compose_accepts_every_option(group: str, name: str, inputs: dict[str, list[str]]) -> None:
    choice = f"{group}=[{name}]" if group == "callbacks" else f"{group}={name}"
    run = compose([choice, *inputs.get(name, inputs.get(choice, []))], check_machine=False)
    assert run.choices.get(group, name) == name
    json.dumps(run.as_dict())
    if group in CONFIG_GROUPS:
        record = yaml.safe_load(yaml.safe_dump(run.as_dict()[group]))
        assert parse_group(group, record) == getattr(run, group)


@pytest.mark.parametrize("name", FAULTS)
def test_compose_accepts_every_fault(name: str) -> None:
    run = compose([f"+inject={name}"])
    assert ("inject" in run.callbacks) is (name != "none")


@pytest.mark.parametrize("name", paths.option_names("experiment"))
def test_compose_accepts_every_experiment_with_a_question(name: str) -> None:
    run = compose([f"experiment={name}"], check_machine=False)
    assert run.question.endswith("?")
    assert run.choices["experiment"] == name
    first, question_line, *_ = (ROOT / "experiments" / f"{name}.yaml").read_text().splitlines()
    assert first.startswith("# ")
    assert question_line.startswith(f"# scalewise train experiment={name}")


SEARCHES = ("screen", "search_learning_rate")
"""Sweeps whose jobs are not the product of their axes."""


@pytest.mark.parametrize("name", SEARCHES)
def test_compose_accepts_the_bounds_of_each_search(name: str) -> None:
    search = preview_search([f"sweep={name}"])
    jobs = [point_overrides(first_point(search.space))]
    if factors := search.sweeper.get("factors"):
        jobs = ScreeningDesign(factors).build_overrides()
    for job in jobs:
        assert compose([f"sweep={name}", *job], check_machine=False).choices["sweep"] == name, job


@pytest.mark.parametrize(
    "name", [name for name in paths.option_names("sweep") if name not in SEARCHES]
)
def test_compose_accepts_every_job_of_every_sweep(name: str) -> None:
    content = yaml.safe_load((ROOT / "sweeps" / f"{name}.yaml").read_text())
    assert content["hydra"]["mode"] == "MULTIRUN"
    sweeper = content["hydra"]["sweeper"]
    assert set(sweeper) <= {"params", "zip"} or set(sweeper) == {"cases", "hypothesis", "answer"}
    with hydra_session() as loader:
        sweep_overrides = parsed_overrides.sweep_overrides(
            sweeper.get("params", {}), sweeper.get("zip", {})
        )
        jobs = parsed_overrides.expand_jobs(
            sweep_overrides, [], list(sweeper.get("zip", {})), loader
        )
        if cases := sweeper.get("cases"):
            jobs = parsed_overrides.expand_cases(cases, None, sweeper["answer"], [], loader)[1]
    runs = [compose([f"sweep={name}", *job], check_machine=False) for job in jobs]
    assert len({str(run.as_dict()) for run in runs}) == len(jobs) > 1


def test_compose_precedence_is_line_experiment_defaults() -> None:
    experiment = yaml.safe_load((ROOT / "experiments" / "smoke.yaml").read_text())
    run = compose(["experiment=smoke", "trainer.micro_batch=2", "optimizer=sgd"])
    assert compose().trainer.micro_batch == 8
    assert run.trainer.max_steps == experiment["trainer"]["max_steps"] != 1000
    assert run.trainer.micro_batch == 2
    assert run.choices["optimizer"] == "sgd"
    assert run.optimizer.lr == experiment["optimizer"]["lr"]
    assert compose(["optimizer=sgd"]).optimizer.lr == 0.1


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "decoder_nano-single-fp32-adamw-lr3e-4"),
        (
            ["model=llama_160m", "parallelism=ddp", "precision=bf16_mixed", "optimizer=sgd"],
            "llama_160m-ddp-bf16_mixed-sgd-lr1e-1",
        ),
        (["optimizer.lr=0.00125"], "decoder_nano-single-fp32-adamw-lr1.25e-3"),
        (["optimizer.lr=3"], "decoder_nano-single-fp32-adamw-lr3e0"),
        (["name=mine"], "mine"),
        (["name=mine-${seed}", "seed=4"], "mine-4"),
    ],
)
def test_run_name_lists_the_choices(overrides: list[str], name: str) -> None:
    assert compose(overrides).name == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/some-1b", "some-1b"),
        ("/there/some-1b/", "some-1b"),
        *((path, "hf") for path in ("", None, "..", "${nowhere}")),
    ],
)
def test_run_name_of_a_model_folder_is_the_folder(path: str | None, name: str) -> None:
    choices = {"model": "hf", "parallelism": "ddp"}
    config = {"model": {"path": path}, "optimizer": {"lr": 1.0}}
    root = OmegaConf.create({**config, "hydra": {"runtime": {"choices": choices}}})
    assert run_folders.build_run_name(_root_=root) == f"{name}-ddp-lr1e0"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"name": "mine"}, "mine"),
        ({"name": "${scalewise.run_name:}"}, "decoder_nano-sweep"),
        ({"name": "${scalewise.run_name:}", "experiment": "a/b", "sweep": "c"}, "a-b-c"),
    ],
)
def test_sweep_name_is_composed(settings: dict[str, str], name: str) -> None:
    choices = {"model": "decoder_nano", **{k: v for k, v in settings.items() if k != "name"}}
    config = {"name": settings["name"], "hydra": {"runtime": {"choices": choices}}}
    assert run_folders.build_sweep_name(_root_=OmegaConf.create(config)) == name


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ([], []),
        (["seed=1", "name=mine"], []),
        (["data.sequence=64"], [("data.sequence", 256, 64)]),
        (["optimizer=sgd"], [("optimizer", "adamw", "sgd")]),
        (
            ["optimizer=sgd", "optimizer.lr=1"],
            [("optimizer", "adamw", "sgd"), ("optimizer.lr", 0.1, 1.0)],
        ),
        (["callbacks=none"], [("callbacks.guard", "on", "off")]),
        (["callbacks.guard.patience=9"], [("callbacks.guard.patience", 5, 9)]),
        (
            ["data=text", "data.paths=[{0}]"],
            [("data", "corpus", "text"), ("data.paths", [], "{0}")],
        ),
    ],
)
def test_changed_lists_values_that_differ_from_options(
    overrides: list[str], changes: list[tuple[str, object, object]], tmp_path: Path
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text\n")
    run = compose([override.format(file) for override in overrides])
    assert changed_from_defaults(run) == [
        {"key": key, "default": default, "value": [str(file)] if value == "{0}" else value}
        for key, default, value in changes
    ]


def test_changed_lists_options_alone_where_no_value_was_set() -> None:
    rng = random.Random(5)
    groups = [group for group in paths.CLOSED_GROUPS if len(group_choices([group])[group]) > 1]
    defaults = compose(check_machine=False).choices
    valid = 0
    for _ in range(30):
        choices = {group: rng.choice(paths.option_names(group)) for group in rng.sample(groups, 3)}
        try:
            run = compose(
                [f"{group}={name}" for group, name in choices.items()], check_machine=False
            )
        except ConfigError:  # not every option is compatible with every other
            continue
        valid += 1
        changes = {
            str(change["key"]): (change["default"], change["value"])
            for change in changed_from_defaults(run)
        }
        changed_groups = {group: name for group, name in choices.items() if name != defaults[group]}
        assert changes == {group: (defaults[group], name) for group, name in changed_groups.items()}
    assert valid > 5


def test_flatten_keeps_sequences_and_empty_mappings() -> None:
    assert flatten({"a": {"b": [1], "c": {}}, "d": 1}) == {"a.b": [1], "a.c": {}, "d": 1}


def test_choices_are_the_option_files() -> None:
    assert group_choices(["schedule"]) == {
        "schedule": ["constant", "cosine", "linear", "module", "wsd"]
    }


def test_compose_merges_callbacks() -> None:
    user_callback = "+callbacks.own._target_=lightning.pytorch.callbacks.Timer"
    run = compose(["callbacks=[guard,early_stopping]", user_callback])
    assert list(run.callbacks) == ["guard", "early_stopping", "own"]
    assert compose(["callbacks=none"]).callbacks == {}


def test_compose_returns_plain_python_values() -> None:
    run = compose(["tracking.tags=[a,b]", "trusted_packages=[mine]"])
    assert run.tracking.tags == ("a", "b")
    assert run.trusted_packages == ("mine",)
    assert type(run.callbacks["guard"]) is dict


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("data", "tokenizer", -7),
        ("data", "end_of_text", 0.5),
        ("model", "width", "128"),
        ("model", "tied", "true"),
        ("model", "norm", 0),
        ("optimizer", "lr", "0.1"),
        ("optimizer", "no_decay", [1]),
        ("optimizer", "lr_factors", {"head": {"factor": 2.0}}),
    ],
)
def test_recorded_value_of_another_type_is_rejected(group: str, key: str, value: object) -> None:
    record = compose().as_dict()[group]
    assert isinstance(record, dict)
    assert parse_group(group, record) == getattr(compose(), group)
    with pytest.raises(ConfigError) as rejected:
        parse_group(group, record | {key: value})
    assert key in str(rejected.value)


def test_mapping_instead_of_a_number_is_rejected() -> None:
    with pytest.raises(ConfigError) as rejected:
        compose(["+optimizer.lr_factors={head:{factor:2},norm:0.5}"])
    (issue,) = rejected.value.issues
    assert (issue.key, issue.reason) == ("optimizer.lr_factors.head", "is not a number")


def test_recorded_option_without_a_required_field_is_rejected() -> None:
    record = compose().as_dict()["model"]
    assert isinstance(record, dict)
    del record["width"]
    with pytest.raises(ConfigError, match="has no width"):
        parse_group("model", record)


def test_interpolation_reads_keys_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLUSTER", "blue")
    run = compose(["question='${oc.env:CLUSTER} ${model.layers} ${name}?'"])
    assert run.question == "blue 4 decoder_nano-single-fp32-adamw-lr3e-4?"


def test_compose_of_a_sweep_alone_is_its_default_run() -> None:
    assert compose(["sweep=learning_rate"]).optimizer == compose().optimizer


def test_compose_does_not_affect_other_hydra_applications() -> None:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        hydra_instance = GlobalHydra.instance().hydra
        assert isinstance(compose(), RunConfig)
        assert GlobalHydra.instance().hydra is hydra_instance
    assert GlobalHydra.instance().hydra is None
