"""Online or offline is decided before W&B could prompt, wait or raise."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scalewise.run import Run
from scalewise.tracking import session
from scalewise.tracking.connection import answers, has_key, shown
from scalewise.tracking.session import Session, decide_mode, open_session
from scalewise.tracking.spec import Mode, Wandb

DEAD = "http://127.0.0.1:9"


@pytest.fixture
def server() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")


@pytest.mark.parametrize(
    ("variable", "asked", "mode"),
    [
        ("online", Mode.disabled, Mode.disabled),  # as wandb.init(mode="disabled") has it
        ("offline", Mode.online, Mode.offline),
        ("disabled", Mode.auto, Mode.disabled),
        ("dryrun", Mode.auto, Mode.offline),
        (" ONLINE ", Mode.offline, Mode.online),
        ("run", Mode.offline, Mode.online),
        ("", Mode.online, Mode.online),
        ("nonsense", Mode.offline, Mode.offline),
        ("nonsense", Mode.disabled, Mode.disabled),
    ],
)
def test_the_environment_wins(
    variable: str, asked: Mode, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert decide_mode(Wandb(asked)) is mode


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("reachable", [True, False])
def test_auto_is_online_with_a_key_and_a_server(
    key: bool, reachable: bool, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "base_url", lambda: server if reachable else DEAD)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    expected = Mode.online if key and reachable else Mode.offline
    assert decide_mode(Wandb()) is expected


def test_a_name_server_that_never_answers_costs_less_than_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(session, "base_url", lambda: "https://wandb.example")
    given_up = threading.Event()

    def hang(*_: object, **__: object) -> None:
        given_up.wait(10)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "create_connection", hang)
    started = time.monotonic()
    assert decide_mode(Wandb()) is Mode.offline
    assert time.monotonic() - started < 2
    given_up.set()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("machine wandb.example login user password secret\n", True),
        ("machine other.example login user password secret\n", False),
        ("machine wandb.example login\nwhat is this", False),
        ("garbage", False),
        ("", False),
        (None, False),
    ],
)
def test_a_key_in_netrc(
    content: str | None, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    if content is not None:
        file.write_text(content)
        file.chmod(0o600)
    assert has_key("https://wandb.example") is found
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert has_key("https://wandb.example")


def test_a_server_that_is_not_there(server: str) -> None:
    assert answers(server)
    assert not answers(DEAD, wait=0.2)
    assert not answers("https://", wait=0.2)


def test_no_tracker_takes_everything() -> None:
    nothing = Session()
    nothing.log([{"step": 1}])
    nothing.summarize({})
    nothing.foresee({})
    nothing.finish("ok", "", 0)
    assert nothing.facts["mode"] == "disabled"


class Failing(Session):
    """A tracker that the network has left."""

    def __init__(self, *_: object) -> None:
        self.calls = 0

    def log(self, rows: list[dict[str, object]]) -> None:
        self.calls += 1
        raise ConnectionError("gone\naway")


class Refusing(Session):
    """A tracker that cannot even begin; notes the modes it was begun in."""

    modes: list[Mode]

    def __init__(self, run: Run, folder: Path, mode: Mode, facts: object) -> None:
        self.modes.append(mode)
        raise RuntimeError("no such project")


def test_a_network_that_dies_costs_one_line(
    compose: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(session, "WandbSession", Failing)
    monkeypatch.setenv("WANDB_MODE", "online")
    tracker = open_session(compose(), tmp_path, {})
    for _ in range(3):
        tracker.log([])
    tracker.finish("ok", "", 0)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "gone away" in said


@pytest.mark.parametrize(
    ("mode", "tried"),
    [("online", ["online", "offline"]), ("offline", ["offline"]), ("disabled", [])],
)
def test_a_tracker_that_cannot_begin_never_stops_a_run(
    mode: str,
    tried: list[str],
    compose: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "WandbSession", Refusing)
    monkeypatch.setattr(Refusing, "modes", [], raising=False)
    monkeypatch.setenv("WANDB_MODE", mode)
    assert open_session(compose(), tmp_path, {}).facts["mode"] == "disabled"
    assert Refusing.modes == tried


def test_settings_that_w_and_b_does_not_take_cost_one_line(
    compose: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(session, "WandbSession", Refusing)
    monkeypatch.setattr(Refusing, "modes", [], raising=False)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "soon")
    open_session(compose(), tmp_path, {})
    assert Refusing.modes == ["offline"]
    assert "W&B goes offline" in capsys.readouterr().out


def test_an_address_is_shown_without_the_password_in_it() -> None:
    assert shown("https://me:word@wandb.example:8080/x") == "https://wandb.example:8080/x"
    assert shown("https://api.wandb.ai") == "https://api.wandb.ai"
