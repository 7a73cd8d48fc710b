"""Invalid overrides: key, reason and fix."""

import re
from pathlib import Path

import pytest
from fixtures.rejections import (
    REJECTION_FIELDS,
    RejectionCase,
    assert_rejected,
    overrides_id,
    rejection_issues,
)

from scalewise.config import paths
from scalewise.config.compose import compose
from scalewise.config.diagnostics import diagnose_overrides
from scalewise.config.launchers import LAUNCHERS
from scalewise.errors import EXPECTED_OPTIONS, ConfigError

pytestmark = pytest.mark.usefixtures("cpu_machine", "example_files")

TYPOS: list[RejectionCase] = [
    (["modle=x"], "modle", "no such key", "did you mean model?"),
    (["model=decoder_nanno"], "model", "no such option", "did you mean decoder_nano?"),
    (["optimizer=zzz"], "optimizer", "no such option", "available: adafactor, adamw, adamw_4bit"),
    *(
        ([f"{group}={option}"], group, "no such option", f"set {choice}")
        for (group, option), choice in EXPECTED_OPTIONS.items()
        if group in paths.GROUPS
    ),
    (["hydra/launcher=joblib"], "hydra/launcher", "is not a launcher", "set hydra/launcher=packed"),
    (["experiment=smok"], "experiment", "no such option", "did you mean smoke?"),
    (["sweep=learning_rat"], "sweep", "no such option", "did you mean learning_rate?"),
    (["callbacks=[guard,emma]"], "callbacks", "no such option", "did you mean ema?"),
    (["+inject=rais"], "inject", "no such option", "did you mean raise?"),
    (["model.widht=3"], "model.widht", "no such key", "did you mean model.width?"),
    (["+model.widht=3"], "model.widht", "no such key", "did you mean model.width?"),
    (["+lr=3"], "lr", "no such key", "available: adapter, callbacks"),
    (
        ["data.paths=[x]"],
        "data.paths",
        "no such key",
        "it is a key of data=captions, chat, labelled, preference, seq2seq, text, tokens",
    ),
    (["optimizer.lr.x=3"], "optimizer.lr.x", "no such key", "optimizer.lr has no keys below it"),
    (["callbacks.mine.x=3"], "callbacks.mine.x", "no such key", "+callbacks.mine.x=3"),
    (["schema/run=x"], "schema/run", "no such key", "schedule"),
]
TYPES: list[RejectionCase] = [
    (["model.width=abc"], "model.width", "is not an integer", "the default is model.width=128"),
    (["trainer.max_steps=1e3"], "trainer.max_steps", "not an integer", "trainer.max_steps=1000"),
    (["seed=1.5"], "seed", "is not an integer", "seed=1"),
    (["optimizer.lr=fast"], "optimizer.lr", "is not a number", "0.0003"),
    (["optimizer.lr=true"], "optimizer.lr", "is not a number", "0.0003"),
    (["optimizer.lr="], "optimizer.lr", "is not a number", "0.0003"),
    (["optimizer.lr=null"], "optimizer.lr", "cannot be null", "0.0003"),
    (["optimizer.fused=maybe"], "optimizer.fused", "not true or false", ""),
    (
        ["model.norm=layernrm"],
        "model.norm",
        "not one of rmsnorm, zero_centered_rmsnorm, layernorm",
        "mean layernorm?",
    ),
    (["tracking.mode=9"], "tracking.mode", "auto, online, offline, disabled", "auto"),
    (["tracking.tags=a"], "tracking.tags", "is not a list", "'tracking.tags=[a]'"),
    (["model.weights={a: 1}"], "model.weights", "is not a string", ""),
    (["resume="], "resume", "is not a checkpoint", "resume=null"),
    (
        ["+callbacks._target_=x.Y"],
        "callbacks._target_",
        "at the top level of callbacks",
        "my_callback: {",
    ),
]
GRAMMAR: list[RejectionCase] = [
    (["foo"], "", "cannot parse the override 'foo'", "group=option or group.key=value"),
    ([""], "", "cannot parse the override ''", "group=option"),
    (["=3"], "", "cannot parse the override '=3'", "group=option"),
    (["name=a b=c"], "", "cannot parse", "write \"name='a b=c'\""),
    (["name=Größe"], "", "cannot parse", "write \"name='Größe'\""),
    (["question=🙂, 2"], "", "cannot parse", "write \"question='🙂, 2'\""),
    (["optimizer.lr=~1"], "", "cannot parse", "quote values with spaces"),
    (["seed=1,"], "", "cannot parse", "quote values with spaces"),
    (["--cfg"], "", "is a flag of the command line", "remove it"),
    (["seed=\udc80"], "", "is not valid UTF-8", "retype"),
    (["model=null"], "model", "requires one option", "available: blip2_flan_t5_xxl"),
    (["optimizer=[adamw,sgd]"], "optimizer", "requires one option", "available: adafactor"),
    (["experiment=null"], "experiment", "requires one option", "~experiment"),
    (["+experiment=smoke"], "experiment", "is already chosen", "remove the +"),
    (["inject=raise"], "inject", "not in the defaults list", "+inject=raise"),
    (["~model"], "model", "is not a registered option of model", "choose one of"),
    (["~optimizer.lr"], "optimizer.lr", "cannot be deleted", "optimizer.lr=VALUE"),
    (["~callbacks"], "callbacks", "Could not delete", "set 'callbacks=[]'"),
    (["~callbacks.mine"], "callbacks.mine", "no such key", "available: callbacks.guard"),
    (["hydra.foo=3"], "hydra.foo", "Could not override", "remove it"),
    (["hydra.sweep=null"], "hydra.sweep", "Error merging", "remove it"),
    (["hydra.job.env_copy=[NOT_THERE]"], "hydra.job.env_copy", "not set", "remove it"),
    (["hydra.searchpath=[/nowhere]"], "hydra.searchpath", "not available", ""),
    (["optimizer.lr=1e-3,3e-3"], "optimizer.lr", "several values, for one run", "-m"),
    (["seed=range(0,1000000000000)"], "seed", "several values, for one run", "-m"),
    (["model=glob(*)"], "model", "several values, for one run", "-m"),
]
INTERPOLATIONS: list[RejectionCase] = [
    (["question=${nowhere}"], "question", "'nowhere' not found", ""),
    (["question=${question}"], "question", "refers to itself", ""),
    (["optimizer.lr=${name}"], "optimizer.lr", "could not be converted to Float", ""),
    (["question=${oc.env:NOT_THERE}"], "question", "'NOT_THERE' not found", "oc.env:NAME,default"),
    (["question=${oc.env:WANDB_API_KEY}"], "question", "writes a secret", ""),
    (["tracking.notes='a ${oc.env:hf_token,x}'"], "tracking.notes", "writes a secret", ""),
    (["tracking.tags=['${oc.env:DB_PASSWORD}']"], "tracking.tags.0", "writes a secret", ""),
    (["question='${oc.env:${name}}'"], "question", "writes a secret", ""),
    (["+callbacks.guard.key=${oc.env:MY_SECRET}"], "callbacks.guard.key", "a secret", ""),
]
TARGETS: list[RejectionCase] = [
    (["model._target_=os.system"], "model._target_", "not a registered option", "decoder_nano"),
    (
        ["data={_target_: os.system}"],
        "data._target_",
        "not a registered option",
        "data=captions, chat",
    ),
    (
        ["optimizer._target_=scalewise.lr_schedules.CosineConfig"],
        "optimizer._target_",
        "not a registered option of optimizer",
        "optimizer=adafactor, adamw",
    ),
    (
        ["optimizer=sgd", "optimizer._target_=scalewise.optimizers.config.AdamWConfig"],
        "optimizer._target_",
        "has keys that the chosen option lacks: beta1",
        "optimizer=adafactor, adamw",
    ),
    (["+_target_=os.system"], "_target_", "no such key", ""),
    (["+data.x._target_=os.system"], "data.x", "no such key", "data.sequence"),
    (["+callbacks.x._target_=os.system"], "callbacks.x._target_", "'os' is not trusted", "[os]"),
    (["+callbacks.x._target_=[]"], "callbacks.x", "is not a callback", "callbacks.x._target_="),
    (["+callbacks.x._target_={a:1}"], "callbacks.x", "is not a callback", "callbacks.x._target_="),
    (["tracking.tags={a:b}"], "tracking.tags", "is not a list", "[TEXT]"),
    (["+callbacks.x=3"], "callbacks.x", "is not a callback", "callbacks.x._target_="),
    (["callbacks.guard=null"], "callbacks.guard", "is not a callback", ""),
    (["callbacks.guard._target_=nodots"], "callbacks.guard", "is not a callback", ""),
    (
        ["+callbacks.guard.inner=[{_target_: os.system}]"],
        "callbacks.guard.inner",
        "nested _target_ is not supported",
        "",
    ),
]
LACKS_KEYS = "sets keys that {} lacks, such as {}"
CHOOSE_ANOTHER = "remove it, or choose another {}"
PRESETS: list[RejectionCase] = [
    (
        [*line, f"{preset}={name}"][:: -1 if is_first else 1],
        preset,
        LACKS_KEYS.format(line[0], key),
        CHOOSE_ANOTHER.format(preset),
    )
    for is_first in (False, True)
    for line, preset, name, key in [
        (["model=hf"], "experiment", "smoke", "model.layers"),
        (["model=hf", "model.path=ll"], "experiment", "smoke", "model.layers"),
        (["model=hf", "adapter.rank=3"], "experiment", "finetune/qlora_tiny", "model.vocabulary"),
        (["model=decoder_nano"], "experiment", "finetune/captioning_tiny", "model.path"),
        (["data=text"], "experiment", "finetune/qlora_tiny", "data.megabytes"),
        (["adapter=none"], "experiment", "finetune/qlora_tiny", "adapter.rank"),
        (["objective=causal_lm"], "experiment", "finetune/grpo_tiny", "objective.answers"),
        (["hydra/sweeper=optuna"], "sweep", "screen", "hydra.sweeper.repeats"),
    ]
]


def test_suggested_names_exist() -> None:
    for choice in " ".join(EXPECTED_OPTIONS.values()).split():
        group, option = choice.split("=")
        assert option in (LAUNCHERS if group == "hydra/launcher" else paths.option_names(group)), (
            choice
        )


@pytest.mark.parametrize(
    REJECTION_FIELDS,
    [*TYPOS, *TYPES, *GRAMMAR, *INTERPOLATIONS, *TARGETS, *PRESETS],
    ids=overrides_id,
)
def test_issue_names_key_reason_and_fix(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("adapter.resume=~/a run", "write \"adapter.resume='~/a run'\""),
        ("data.paths=[~/a.txt,b.txt,~/*.md]", "write \"data.paths=['~/a.txt',b.txt,'~/*.md']\""),
    ],
)
def test_fix_of_paths_in_the_home_folder_quotes_them(
    override: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "c.md"):
        Path(name).write_text("text")
    assert rejection_issues(["adapter=lora", "data=text", override])[0].fix == fix


def test_issues_are_reported_at_once() -> None:
    overrides = ["modle=x", "optimizer=adamm", "model.width=abc", "trainer.micro_batch=0", "x y"]
    keys = [issue.key for issue in rejection_issues([*overrides, "data.vocabulary=9999"])]
    assert sorted(keys) == [
        "",
        "data.vocabulary",
        "model.width",
        "modle",
        "optimizer",
        "trainer.micro_batch",
    ]


def test_values_are_checked_next_to_an_invalid_preset() -> None:
    overrides = [
        "experiment=smoke",
        "model=hf",
        "model.path=ll",
        "model.widht=3",
        "data.sequence=a",
    ]
    keys = [issue.key for issue in rejection_issues(overrides)]
    assert sorted(keys) == ["data.sequence", "experiment", "model.widht"]


def test_message_has_one_line_per_issue() -> None:
    with pytest.raises(ConfigError) as excinfo:
        compose(["modle=x", "optimizer.fused=null"])
    assert str(excinfo.value) == (
        "config rejected, 2 issues:\n"
        "  - modle=x: no such key; did you mean model?\n"
        "  - optimizer.fused=null: cannot be null; the default is optimizer.fused=true"
    )


@pytest.mark.parametrize("value", ["x" * 5000, "[" + "x," * 3000 + "x]", "a\\nb\x1b[31m"])
def test_message_is_short_and_printable(value: str) -> None:
    for issue in rejection_issues([f"model.width='{value}'"]):
        assert len(str(issue)) < 400, issue
        assert str(issue).isprintable(), issue


def test_message_omits_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    for line in ("optimizer.lr=${oc.env:WANDB_API_KEY}", "name=${oc.env:WANDB_API_KEY}"):
        assert "hunter2" not in " ".join(str(issue) for issue in rejection_issues([line])), line


def test_trusted_package_is_accepted() -> None:
    line = "+callbacks.own._target_=mine.callbacks.Own"
    run = compose([line, "trusted_packages=[mine]"])
    assert run.callbacks["own"] == {"_target_": "mine.callbacks.Own"}
    assert re.search(r"set 'trusted_packages=\[mine\]'", rejection_issues([line])[0].fix)


def test_overrides_must_be_a_list_of_strings() -> None:
    assert compose("seed=3").seed == 3
    (issue,) = rejection_issues([3])
    assert "an override is a string" in issue.reason


@pytest.mark.parametrize(
    "overrides", ["model=decoder_nano", "optimizer.lr=1e-3", "~callbacks.guard"]
)
def test_valid_overrides_have_no_issues(overrides: str) -> None:
    assert diagnose_overrides([overrides]) == []
