"""The way to the W&B server: which one, whether there is a key for it, whether it answers."""

from __future__ import annotations

import netrc
import os
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from scalewise.errors import ConfigError, ScalewiseError
from scalewise.redaction import redact, remember_secret

SERVER_WAIT = 1.5
"""Seconds to wait for the server before a run goes offline."""
ANSWER_WAIT = 5.0
"""Seconds that one request may take, retries included, at a server that answers no other."""
EARLIER_HOST = "api.wandb.ai"
"""The hosted service's name before it moved; the client still takes a login for it."""
T = TypeVar("T")
LOGIN = "run `wandb login`, or set WANDB_API_KEY"


def wandb_client() -> Any:
    """Returns W&B's client.

    Raises ``ConfigError`` without a key that the server takes, ``ScalewiseError`` without a server
    that answers: the client itself would prompt, or try for minutes.
    """
    hide_credentials()
    server = base_url()
    if not has_key(server):
        raise ConfigError.for_key(
            "", "", f"there is no key for {without_credentials(server)}", LOGIN
        )
    require_answer(server)
    import wandb

    def log_in() -> Any:
        api = wandb.Api(timeout=round(ANSWER_WAIT))
        _ = api.default_entity
        return api

    try:
        return call_with_timeout(server, log_in, ANSWER_WAIT)
    except ScalewiseError:
        raise
    except Exception as error:  # the client raises many kinds
        if " 401" in str(error):
            raise ConfigError.for_key(
                "", "", f"{without_credentials(server)} refuses the key", LOGIN
            ) from None
        if "did not respond in time" in str(error):
            raise ScalewiseError(_silence_reason(server)) from None
        raise ScalewiseError(f"{without_credentials(server)}: {server_error_text(error)}") from None


def call_with_timeout(server: str, request: Callable[[], T], timeout: float) -> T:
    """Returns the result of a request to ``server``, which may take ``timeout`` seconds.

    The client has no bound of its own for a server that hangs or streams without end. Raises
    ``ScalewiseError`` past the limit, and after ``ANSWER_WAIT`` if the server answers nothing else.
    """
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def send() -> None:
        try:
            results.put((request(), None))
        except BaseException as error:  # raised again below, in the thread that asked
            results.put((None, error))

    # Daemonic: a request that never ends does not keep the process.
    threading.Thread(target=send, daemon=True, name="wandb-request").start()
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            result, error = results.get(timeout=max(0.0, min(ANSWER_WAIT, left)))
        except queue.Empty:
            if time.monotonic() < deadline and is_answering(server):
                continue
            raise ScalewiseError(_silence_reason(server)) from None
        if error is not None:
            raise error
        return cast(T, result)


def require_answer(server: str) -> None:
    """Raises ``ScalewiseError`` where nothing answers: all else would wait long."""
    if not is_answering(server):
        raise ScalewiseError(
            f"{without_credentials(server)} does not answer; try again when it does"
        )


def _silence_reason(server: str) -> str:
    """Returns why no request is answered: a failing server, whose client tries again, or none."""
    status = http_status(server) or 0
    if status >= 500:
        return f"{without_credentials(server)}: {server_error_text(f'HTTP {status}')}"
    return f"{without_credentials(server)} does not answer; try again when it does"


def server_error_text(error: object) -> str:
    """Returns what went wrong at the server in one line, with what to do about it."""
    text = redact(" ".join(str(error).split()))
    if status := re.search(r"(?:HTTP|error|status(?: code)?):? (4\d\d|5\d\d)", text):
        code = int(status[1])
        what = {401: "refuses the key", 403: "does not permit it", 429: "asks to wait"}
        fix = LOGIN if code in (401, 403) else "try again later"
        return f"the server {what.get(code, 'has failed')} (HTTP {code}); {fix}"
    return re.sub(r"^wandb: ERROR (\[\S+\] )?", "", text)[:200] or type(error).__name__


def without_credentials(server: str) -> str:
    """Returns an address without the name and password that it may hold."""
    return re.sub(r"(?<=://)[^/@]*@", "", server)


def hide_credentials() -> None:
    """Takes the name and password out of the server's address, which W&B writes into its files.

    The client does not log in by them: it sends its own key.
    """
    server = base_url()
    if without_credentials(server) != server:
        remember_secret(server)
        os.environ["WANDB_BASE_URL"] = without_credentials(server)


def base_url() -> str:
    """Returns the server that W&B would speak to: ``WANDB_BASE_URL``, else its settings files."""
    import wandb

    settings = wandb.Settings()
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ))
    return str(settings.base_url)


def has_key(server: str) -> bool:
    """Returns whether the environment or a netrc file holds a key for ``server``."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    hosts = [urlsplit(server).hostname or ""]
    if server == str(wandb.Settings().base_url):
        hosts.append(EARLIER_HOST)
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = netrc.netrc(str(file))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(host) is not None for host in hosts)


def is_answering(server: str, timeout: float = SERVER_WAIT) -> bool:
    """Returns whether ``server`` speaks HTTP within ``timeout`` seconds, DNS included."""
    return http_status(server, timeout) is not None


def http_status(server: str, timeout: float = SERVER_WAIT) -> int | None:
    """Returns the status code of a request without content; None without an HTTP answer in time."""
    parts = urlsplit(server)
    secure = parts.scheme == "https"
    try:
        port = parts.port or (443 if secure else 80)
    except ValueError:  # no number: the client will say so
        return None
    found: list[int] = []

    def connect() -> None:
        try:
            with socket.create_connection((parts.hostname, port), timeout=timeout) as connection:
                found.append(_request_status(connection, parts.hostname or "", secure=secure))
        except (OSError, ValueError):
            return

    thread = threading.Thread(target=connect, daemon=True)  # a name server may never answer
    thread.start()
    thread.join(timeout)
    return found[0] if found else None


def _request_status(connection: socket.socket, host: str, *, secure: bool) -> int:
    """Sends a request without content; raises ``ValueError`` for an answer that is not HTTP."""
    if secure:
        # No key is sent here, so that the certificate is left to the client's own requests.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = context.wrap_socket(connection, server_hostname=host)
    connection.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = connection.recv(len(b"HTTP/1.1 200"), socket.MSG_WAITALL * (not secure))
    protocol, _, status = answer.decode("ascii").partition(" ")
    if not protocol.startswith("HTTP"):
        raise ValueError(protocol)
    return int(status)
