"""The command line: help, suggestions and exit codes."""

import importlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from scalewise import cli
from scalewise.commands import doctor, run_arguments, usage
from scalewise.commands.bench import BENCHMARKS
from scalewise.config import option_docs, paths
from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.hardware import Machine
from scalewise.units import format_count


@pytest.fixture
def exit_code_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | int], int]:
    """Function that returns the exit code of a command with a given outcome."""

    def run(outcome: BaseException | int) -> int:
        def main(arguments: list[str]) -> int:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(importlib.import_module("scalewise.commands.report"), "main", main)
        return cli.main(["report"])

    return run


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_commands_groups_and_examples(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    stdout = capsys.readouterr().out
    words = " ".join(stdout.split())
    for command in cli.COMMANDS:
        assert f"{command} {cli.COMMANDS[command]}" in words, command
    for group, summary in option_docs.group_summaries().items():
        description = summary.replace("`", "")
        assert f"{group} {description} {', '.join(paths.option_names(group))}" in words, (
            group,
            summary,
        )
    assert max(map(len, stdout.splitlines())) <= 80


def test_help_examples_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    stdout = capsys.readouterr().out.replace("\\\n", " ")
    help_lines = [" ".join(line.split()) for line in stdout.splitlines()]
    assert all(line in help_lines for _, line in usage.EXAMPLES)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_shows_its_usage(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--help"]) == 0
    stdout = capsys.readouterr().out
    words = " ".join(stdout.split())
    assert words.startswith(f"scalewise {command}: {cli.COMMANDS[command]} ")
    assert all(
        f"{form} {meaning.replace('`', '')}" in words for form, meaning in usage.FORMS[command]
    )
    assert ("  parallelism" in stdout) == (command in usage.COMPOSING)
    assert all(
        (f"{flag} {meaning}" in words) == (command in usage.COMPOSING)
        for flag, meaning in usage.FLAGS
    )
    assert max(map(len, stdout.splitlines())) <= 80


def test_help_of_train_lists_groups_in_config_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("groups: choose an option by GROUP=OPTION, set a key by GROUP.KEY=VALUE")
    help_lines = [line for line in lines[start:] if line.endswith(".")]
    expected = option_docs.group_summaries().items()
    assert [line.split(maxsplit=1) for line in help_lines] == [
        [group, summary.replace("`", "")] for group, summary in expected
    ]
    sections = [lines.index(title) for title in ("flags", "examples")]
    assert lines.index(help_lines[-1]) < sections[0] < sections[1]


def test_help_lists_every_benchmark() -> None:
    forms = " ".join(form for form, _ in usage.FORMS["bench"])
    assert all(f"bench {name}" in forms for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("tarin", "did you mean train?"),
        ("zzz", f"commands: {', '.join(cli.COMMANDS)}"),
    ],
)
def test_unknown_command_is_rejected_with_a_suggestion(
    command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "model=x"]) == 2
    assert capsys.readouterr().err == f"scalewise: unknown command {command!r}; {hint}\n"


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (0, 0, ""),
        (4, 4, ""),
        (ScalewiseError("no luck"), 1, "scalewise: no luck\n"),
        (
            ConfigError.for_key("a", 1, "wrong"),
            2,
            "scalewise: config rejected, 1 issue:\n  - a=1: wrong\n",
        ),
        (Interrupted(15, "told to"), 143, "scalewise: told to\n"),
        (KeyboardInterrupt(), 130, "scalewise: interrupted\n"),
    ],
)
def test_outcomes_map_to_exit_codes(
    outcome: BaseException | int,
    code: int,
    message: str,
    exit_code_of: Callable[[BaseException | int], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(outcome) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("overrides", [["--version"], ["train", "--version"]])
def test_version_is_printed(
    overrides: list[str],
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def version(name: str) -> str:
        if installed:
            return "1.2.3"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cli.main(overrides) == 0
    expected = "1.2.3" if installed else "(source checkout, not installed)"
    assert capsys.readouterr().out == f"scalewise {expected}\n"


@pytest.mark.parametrize(
    ("overrides", "expected_words", "absent_words"),
    [
        ("scalewise ", {"train", "report", "doctor"}, set()),
        ("scalewise tr", {"train"}, {"report"}),
        ("scalewise train model=llama3", {"model=llama3_8b"}, {"model=decoder_nano"}),
        ("scalewise train opti", {"optimizer="}, {"model="}),
        ("scalewise explain optimizer.l", {"optimizer.lr"}, {"optimizer", "model"}),
        ("scalewise explain optimizer=m", {"optimizer=muon"}, {"optimizer=sgd"}),
        ("scalewise plan name=[\x1b", set(), {"scalewise:"}),
        ("scalewise plan name='a", set(), {"scalewise:"}),
    ],
)
def test_completion_script_is_printed(
    overrides: str,
    expected_words: set[str],
    absent_words: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", overrides)
    monkeypatch.setenv("COMP_POINT", str(len(overrides)))
    assert cli.main(["-sc", "query=bash"]) == 0
    printed = capsys.readouterr()
    words = set(printed.out.split())
    assert expected_words <= words
    assert not absent_words & {*words, *printed.err.split()}
    assert list(tmp_path.iterdir()) == []


class TestDoctor:
    def test_doctor_rejects_arguments(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor", "please"]) == 2
        assert "doctor accepts no arguments: please" in capsys.readouterr().err

    def test_doctor_lists_versions_and_machine(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor"]) == 0
        stdout = capsys.readouterr().out
        for word in ("processor", "memory", "free disk", "torch", "wandb", "W&B", "extra hf"):
            assert word in stdout, word

    @pytest.mark.parametrize("memory", [4 * 1024**3, 512 * 1024**3])
    def test_doctor_reports_a_machine_without_devices(self, memory: int) -> None:
        rows = self._rows(Machine((), "a processor", 3, memory))
        assert rows["CUDA"] == ("no device", "runs use the CPU with at most 12 ranks, without fp16")
        assert f"about {format_count(memory * 0.8 / 16)} parameters" in rows["memory"][1]

    def test_doctor_reports_devices(self) -> None:
        rows = self._rows(Machine(("NVIDIA H100", "NVIDIA H100"), "a processor", 64, 2**40))
        assert rows["device 0"][0] == rows["device 1"][0] == "NVIDIA H100"
        assert "CUDA" not in rows
        assert rows["memory"] == ("1.00 TiB", "")

    def test_doctor_reports_the_tracking_mode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = Machine((), "", 1, 2**33)
        assert "tracked offline; for online runs: wandb login" in self._rows(machine)["W&B"][1]
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        monkeypatch.setenv("WANDB_MODE", "disabled")
        state, meaning = self._rows(machine)["W&B"]
        assert "logged in" in state
        assert "k" * 40 not in state + meaning
        assert "not tracked" in meaning

    def test_doctor_reports_environment_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "nonsense")
        assert "WANDB_MODE=nonsense" in self._rows(Machine((), "", 1, 2**33))["W&B"][1]

    def test_doctor_names_missing_extras(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        state, meaning = self._rows(Machine((), "", 1, 2**33))["extra hf"]
        assert state == "not installed"
        assert meaning.endswith("pip install 'scalewise[hf]'")

    def _rows(self, machine: Machine) -> dict[str, tuple[str, str]]:
        return {
            subject: (state, meaning) for subject, state, meaning in doctor.finding_lines(machine)
        }


LONG_NAME = "x" * 5000


def test_long_prompt_is_not_a_folder(tmp_path: Path) -> None:
    overrides = [str(tmp_path), f"prompt={LONG_NAME}"]
    assert run_arguments.parse_options(overrides) == {"prompt": LONG_NAME}
    folder, options = run_arguments.read_arguments("evaluate", overrides, {"prompt": ""}, [])
    assert (folder, options) == (tmp_path, {"prompt": LONG_NAME})


@pytest.mark.usefixtures("cpu_machine")
@pytest.mark.parametrize(
    "overrides",
    [
        ["status", LONG_NAME],
        ["report", LONG_NAME],
        ["export", LONG_NAME],
        ["evaluate", LONG_NAME],
        ["train", f"resume={LONG_NAME}"],
        ["plan", "data=text", f"data.paths=[{LONG_NAME}]"],
        ["plan", f"data.tokenizer={LONG_NAME}"],
        ["plan", f"model.weights={LONG_NAME}"],
        ["bench", "planner", f"data={LONG_NAME}"],
    ],
    ids=lambda line: line[0] + line[-1][:12],
)
def test_too_long_path_is_rejected(
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(overrides) == 2
    stderr = capsys.readouterr().err
    assert "xxx...: File name too long" in stderr
    assert len(stderr) < 300
    assert list(tmp_path.iterdir()) == []
