"""``scalewise explain``: documentation of keys, groups and options on the terminal."""

import shlex
from collections.abc import Callable

import pytest

from scalewise import cli
from scalewise.commands import explain
from scalewise.config import option_docs
from scalewise.config.compose import compose
from scalewise.config.diagnostics import diagnose_overrides


@pytest.fixture
def run_explain(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Function that returns the output of ``scalewise explain``."""

    def run(*arguments: str) -> str:
        assert cli.main(["explain", *arguments]) == 0
        return capsys.readouterr().out

    return run


def words(text: str) -> str:
    return " ".join(text.split())


def test_explain_key_shows_documentation_type_unit_and_example(
    run_explain: Callable[..., str],
) -> None:
    assert run_explain("trainer.max_steps").splitlines() == [
        "trainer.max_steps",
        "",
        "  Training length, in optimizer steps.",
        "",
        "  type      int or null",
        "  unit      optimizer steps",
        "  default   1000",
        "  example   scalewise train trainer.max_steps=1000",
    ]


def test_explain_key_shows_the_default_of_each_option(
    run_explain: Callable[..., str],
) -> None:
    text = words(run_explain("parallelism.shards"))
    assert "default 1 with parallelism=context, mesh, pipeline, tensor" in text
    assert "auto with parallelism=fsdp, hsdp" in text
    assert "example scalewise train parallelism=fsdp parallelism.shards=2" in text


def test_explain_defaults_are_composed(run_explain: Callable[..., str]) -> None:
    text = words(run_explain("optimizer.lr"))
    for name in ("adamw", "sgd", "muon"):
        lr = compose([f"optimizer={name}"], check_machine=False).optimizer.lr
        option_values = text.split(f"{lr} with optimizer=")[1].split("0.")[0]
        assert name in option_values.replace(",", " ").split(), name


def test_explain_choice_lists_its_values(run_explain: Callable[..., str]) -> None:
    text = words(run_explain("data.dtype"))
    assert "values uint16: 2 bytes per token. uint32: 4 bytes per token." in text
    assert "values true, false" in words(run_explain("optimizer.fused"))


def test_explain_names_options_with_different_documentation(
    run_explain: Callable[..., str],
) -> None:
    text = words(run_explain("optimizer.lr"))
    assert "Peak learning rate. With optimizer=adafactor: Largest relative step." in text


def test_explain_shows_top_level_keys(run_explain: Callable[..., str]) -> None:
    assert "Seed of initial weights" in run_explain("seed")
    assert "default   ${scalewise.run_name:}" in run_explain("name")


def test_explain_group_lists_options_and_keys(run_explain: Callable[..., str]) -> None:
    text = words(run_explain("optimizer"))
    group = option_docs.group_doc("optimizer")
    for option in group.options:
        assert f"{option.name} {option.summary}".replace("`", "") in text, option
    assert "AdamW, fused. (default)" in text
    assert "optimizer.lr Peak learning rate." in text


def test_explain_option_lists_keys_with_defaults(run_explain: Callable[..., str]) -> None:
    text = run_explain("optimizer=muon")
    assert "Jordan et al., 2024" in text
    assert "  optimizer.momentum=0.95" in text


def test_explain_accepts_several_arguments(run_explain: Callable[..., str]) -> None:
    text = run_explain("seed", "resume")
    assert text.startswith("seed\n")
    assert "\n\nresume\n" in text


def test_explain_output_of_every_key_fits_80_columns() -> None:
    keys = [name for name in explain.completions("") if "." in name or name in ("seed", "resume")]
    assert len(keys) > 200
    for key in keys:
        if "=" in key:
            continue
        lines = explain.explain_lines(key)
        assert max(len(line) for line in lines if "scalewise train" not in line) <= 80, key
        example = words("\n".join(lines)).split("example scalewise train ")[1]
        overrides = shlex.split(example)
        example = overrides[-1].removeprefix("+data@")  # of an option within another one
        assert example.startswith(f"{key}="), key


@pytest.mark.parametrize(
    "key",
    [
        "trainer.max_tokens",
        "trainer.max_epochs",
        "parallelism.shards",
        "optimizer.offload",
        "plan.search",
        "callbacks.ema.decay",
        "seed",
    ],
)
def test_explain_example_composes(key: str) -> None:
    example = words("\n".join(explain.explain_lines(key))).split("example scalewise train ")[1]
    overrides = shlex.split(example.replace("NUMBER", "100000"))
    assert diagnose_overrides(overrides, check_machine=False) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("lr", "unknown key, group or option 'lr'; did you mean optimizer.lr?"),
        ("trainer.lr", "unknown key, group or option 'trainer.lr'; did you mean optimizer.lr?"),
        (
            "optimizer.wieght_decay",
            "unknown key, group or option 'optimizer.wieght_decay'; "
            "did you mean optimizer.weight_decay?",
        ),
        ("optimzer", "unknown key, group or option 'optimzer'; did you mean optimizer?"),
        ("optimizer=moun", "optimizer=moun: no such option; did you mean muon?"),
        ("objective=ppo", "objective=ppo: no such option; set objective=grpo instead"),
        (
            "optimizer.lr=1",
            "optimizer.lr=1: a key must be given without a value; scalewise explain optimizer.lr",
        ),
        ("--all", "unknown key, group or option '--all'"),
    ],
)
def test_explain_unknown_argument_is_rejected_with_a_suggestion(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", argument]) == 2
    assert f"  - {message}" in capsys.readouterr().err


def test_explain_shared_name_suggests_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "vocabulary"]) == 2
    assert "did you mean model.vocabulary or data.vocabulary?" in capsys.readouterr().err


def test_explain_without_argument_is_rejected_with_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["explain"]) == 2
    assert "no key given; scalewise explain optimizer.lr" in capsys.readouterr().err


def test_explain_reports_every_unknown_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "seed", "sead", "optimizer=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 issues" in captured.err
