"""Online or offline mode is chosen before W&B could prompt, wait or raise."""

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from scalewise.errors import ScalewiseError
from scalewise.run_config import RunConfig
from scalewise.tracking import connection, wandb_session
from scalewise.tracking.connection import (
    call_with_timeout,
    has_key,
    is_answering,
    wandb_client,
    without_credentials,
)
from scalewise.tracking.wandb_session import NullSession, choose_mode, open_session
from scalewise.tracking_config import WandbConfig, WandbMode

UNREACHABLE_URL = "http://127.0.0.1:9"


@pytest.fixture
def server() -> Iterator[str]:
    """Server that rejects every request."""
    yield from _serve(lambda connection: connection.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n"))


def _serve(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Server that runs ``answer`` on every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server_socket:

        def take(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                answer(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server_socket.accept()
                    threading.Thread(target=take, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server_socket.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")


@pytest.mark.parametrize(
    ("variable", "requested_mode", "mode"),
    [
        ("online", WandbMode.disabled, WandbMode.disabled),  # as in wandb.init(mode="disabled")
        ("offline", WandbMode.online, WandbMode.offline),
        ("disabled", WandbMode.auto, WandbMode.disabled),
        ("dryrun", WandbMode.auto, WandbMode.offline),
        (" ONLINE ", WandbMode.offline, WandbMode.online),
        ("run", WandbMode.offline, WandbMode.online),
        ("", WandbMode.online, WandbMode.online),
        ("nonsense", WandbMode.offline, WandbMode.offline),
        ("nonsense", WandbMode.disabled, WandbMode.disabled),
    ],
)
def test_wandb_mode_of_the_environment_wins(
    variable: str, requested_mode: WandbMode, mode: WandbMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert choose_mode(WandbConfig(requested_mode)) is mode


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("is_reachable", [True, False])
def test_wandb_auto_mode_is_online_with_key_and_server(
    key: bool, is_reachable: bool, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        wandb_session, "base_url", lambda: server if is_reachable else UNREACHABLE_URL
    )
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    expected = WandbMode.online if key and is_reachable else WandbMode.offline
    assert choose_mode(WandbConfig()) is expected


def test_unresponsive_dns_delays_less_than_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(wandb_session, "base_url", lambda: "https://wandb.example")
    released = threading.Event()

    def hang(*_: object, **__: object) -> None:
        released.wait(10)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "create_connection", hang)
    start_time = time.monotonic()
    assert choose_mode(WandbConfig()) is WandbMode.offline
    assert time.monotonic() - start_time < 2
    released.set()


@pytest.mark.parametrize(
    ("content", "key_found"),
    [
        ("machine wandb.example login user password secret\n", True),
        ("machine other.example login user password secret\n", False),
        ("machine wandb.example login\nwhat is this", False),
        ("garbage", False),
        ("", False),
        (None, False),
    ],
)
def test_wandb_key_is_read_from_netrc(
    content: str | None, key_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    if content is not None:
        file.write_text(content)
        file.chmod(0o600)
    assert has_key("https://wandb.example") is key_found
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert has_key("https://wandb.example")


def test_unreachable_server_means_offline(server: str) -> None:
    assert is_answering(server)
    assert not is_answering(UNREACHABLE_URL, timeout=0.2)
    assert not is_answering("https://", timeout=0.2)


def _hang(connection: socket.socket) -> None:
    while connection.recv(1000):
        pass


def _stream(head: bytes, connection: socket.socket) -> None:
    connection.sendall(head)
    while True:
        connection.sendall(b"garbage " * 100)
        time.sleep(0.01)


BROKEN_SERVERS = {
    "hangs": _hang,
    "streams garbage": partial(_stream, b""),
    "streams a header": partial(_stream, b"HTTP/1.1 200 OK\r\n"),
    "streams a body": partial(_stream, b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"),
}


@pytest.mark.parametrize("behavior", BROKEN_SERVERS)
def test_endless_response_delays_five_seconds(
    behavior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in _serve(BROKEN_SERVERS[behavior]):
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        monkeypatch.setenv("WANDB_MODE", "online")
        start = time.monotonic()
        with pytest.raises(ScalewiseError, match=r"does not respond|Failed to verify"):
            wandb_client()
        assert time.monotonic() - start < 8.0, url


def test_request_has_a_limit_and_ends_early() -> None:
    release = threading.Event()
    for url in _serve(_hang):
        start = time.monotonic()
        with (
            patch.object(connection, "REQUEST_TIMEOUT", 0.1),
            pytest.raises(ScalewiseError, match="does not respond"),
        ):
            call_with_timeout(url, release.wait, 60.0)
        assert time.monotonic() - start < 5.0, url
    release.set()


def test_slow_request_continues_while_the_server_answers(server: str) -> None:
    with patch.object(connection, "REQUEST_TIMEOUT", 0.05):
        assert call_with_timeout(server, lambda: time.sleep(0.3) or "done", 60.0) == "done"
        with pytest.raises(ScalewiseError, match="does not respond"):
            call_with_timeout(server, lambda: time.sleep(5), 0.3)
        with pytest.raises(KeyError):
            call_with_timeout(server, lambda: {}["absent"], 1.0)


def test_disabled_tracker_accepts_every_call() -> None:
    session = NullSession()
    session.log([{"step": 1}])
    session.log_summary({})
    session.log_plan({})
    session.finish("ok", "", 0)
    assert session.facts["mode"] == "disabled"


class FailingSession(NullSession):
    """Tracker session that lost its network."""

    def __init__(self, *_: object) -> None:
        self.calls = 0

    def log(self, rows: list[dict[str, object]]) -> None:
        self.calls += 1
        raise ConnectionError("gone\naway")


class RejectingSession(NullSession):
    """Tracker session that cannot start; records the requested modes."""

    modes: list[WandbMode]

    def __init__(self, run: RunConfig, folder: Path, mode: WandbMode, run_facts: object) -> None:
        self.modes.append(mode)
        raise RuntimeError("no such project")


def test_lost_network_prints_one_line(
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb_session, "WandbSession", FailingSession)
    monkeypatch.setenv("WANDB_MODE", "online")
    tracker = open_session(compose(), tmp_path, {})
    for _ in range(3):
        tracker.log([])
    tracker.finish("ok", "", 0)
    stdout = capsys.readouterr().out
    assert stdout.count("\n") == 1
    assert "gone away" in stdout


@pytest.mark.parametrize(
    ("mode", "expected_modes"),
    [("online", ["online", "offline"]), ("offline", ["offline"]), ("disabled", [])],
)
def test_failed_tracker_start_does_not_stop_a_run(
    mode: str,
    expected_modes: list[str],
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wandb_session, "WandbSession", RejectingSession)
    monkeypatch.setattr(RejectingSession, "modes", [], raising=False)
    monkeypatch.setenv("WANDB_MODE", mode)
    assert open_session(compose(), tmp_path, {}).facts["mode"] == "disabled"
    assert RejectingSession.modes == expected_modes


def test_rejected_wandb_settings_print_one_line(
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb_session, "WandbSession", RejectingSession)
    monkeypatch.setattr(RejectingSession, "modes", [], raising=False)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "soon")
    open_session(compose(), tmp_path, {})
    assert RejectingSession.modes == ["offline"]
    assert "W&B mode is offline" in capsys.readouterr().out


def test_server_url_is_shown_without_password() -> None:
    assert (
        without_credentials("https://me:word@wandb.example:8080/x")
        == "https://wandb.example:8080/x"
    )
    assert without_credentials("https://api.wandb.ai") == "https://api.wandb.ai"


class FullDisk(StringIO):
    """File without space."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_of_wandb_logs_prints_no_traceback(
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    open_session(compose(), tmp_path, {})
    handler = logging.StreamHandler(FullDisk())
    handler.emit(logging.LogRecord("wandb", logging.INFO, "", 1, "a line", None, None))
    assert capsys.readouterr().err == ""
