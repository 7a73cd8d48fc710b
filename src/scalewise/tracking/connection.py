"""Connection to the W&B server: URL, API key and availability."""

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
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from scalewise import regular_files
from scalewise.errors import ConfigError, ScalewiseError
from scalewise.redaction import redact, remember_secret

SERVER_TIMEOUT = 1.5
"""Seconds to wait for the server before a run uses mode ``offline``."""
REQUEST_TIMEOUT = 5.0
"""Seconds for a request, retries included, if the server answers no other request either."""
LEGACY_HOST = "api.wandb.ai"
"""Former host of the hosted service, for which the client still accepts a login."""
T = TypeVar("T")
LOGIN_FIX = "run `wandb login`, or set WANDB_API_KEY"


def wandb_client() -> Any:
    """Create an authenticated W&B API client.

    Checks key and server first, because the client would prompt for a key or retry for minutes.
    Raises ``ConfigError`` without a valid API key, and ``ScalewiseError`` if the server does not
    respond.
    """
    hide_credentials()
    server = base_url()
    if not has_key(server):
        raise ConfigError.for_key(
            "", "", f"{without_credentials(server)}: no API key is set", LOGIN_FIX
        )
    require_answer(server)
    import wandb

    def log_in() -> Any:
        api = wandb.Api(timeout=round(REQUEST_TIMEOUT))
        _ = api.default_entity
        return api

    try:
        return call_with_timeout(server, log_in, REQUEST_TIMEOUT)
    except ScalewiseError:
        raise
    except Exception as error:  # the client raises many types
        if " 401" in str(error):
            raise ConfigError.for_key(
                "", "", f"{without_credentials(server)} rejects the API key", LOGIN_FIX
            ) from None
        if "did not respond in time" in str(error):
            raise ScalewiseError(_no_response_text(server)) from None
        raise ScalewiseError(f"{without_credentials(server)}: {server_error_text(error)}") from None


def call_with_timeout(server: str, request: Callable[[], T], timeout: float) -> T:
    """Run ``request`` with a timeout in seconds and return its result.

    The client itself has no timeout for a server that hangs or streams forever. Raises
    ``ScalewiseError`` after ``timeout``, or after ``REQUEST_TIMEOUT`` if the server does not
    respond to another request either.
    """
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def send() -> None:
        try:
            results.put((request(), None))
        except BaseException as error:  # re-raised in the calling thread
            results.put((None, error))

    # A daemon thread, so that a request that never ends does not keep the process alive.
    threading.Thread(target=send, daemon=True, name="wandb-request").start()
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        try:
            result, error = results.get(timeout=max(0.0, min(REQUEST_TIMEOUT, remaining)))
        except queue.Empty:
            if time.monotonic() < deadline and is_answering(server):
                continue
            raise ScalewiseError(_no_response_text(server)) from None
        if error is not None:
            raise error
        return cast(T, result)


def require_answer(server: str) -> None:
    """Raise ``ScalewiseError`` if the server does not respond."""
    if not is_answering(server):
        raise ScalewiseError(f"{without_credentials(server)} does not respond; try again later")


def _no_response_text(server: str) -> str:
    """Reason for a request without response: a server error, which the client retries, or none."""
    status = http_status(server) or 0
    if status >= 500:
        return f"{without_credentials(server)}: {server_error_text(f'HTTP {status}')}"
    return f"{without_credentials(server)} does not respond; try again later"


def server_error_text(error: object) -> str:
    """One line on an error of the server, with the fix."""
    text = redact(" ".join(str(error).split()))
    if status := re.search(r"(?:HTTP|error|status(?: code)?):? (4\d\d|5\d\d)", text):
        code = int(status[1])
        reasons = {
            401: "rejects the API key",
            403: "denies access",
            429: "limits the request rate",
        }
        fix = LOGIN_FIX if code in (401, 403) else "try again later"
        return f"the server {reasons.get(code, 'failed')} (HTTP {code}); {fix}"
    return re.sub(r"^wandb: ERROR (\[\S+\] )?", "", text)[:200] or type(error).__name__


def without_credentials(server: str) -> str:
    """Remove user name and password from a URL."""
    return re.sub(r"(?<=://)[^/@]*@", "", server)


def hide_credentials() -> None:
    """Remove user name and password from ``WANDB_BASE_URL``, which W&B writes into its files.

    The client authenticates with its API key, not with them.
    """
    server = base_url()
    if without_credentials(server) != server:
        remember_secret(server)
        os.environ["WANDB_BASE_URL"] = without_credentials(server)


def base_url() -> str:
    """URL of the W&B server: ``WANDB_BASE_URL``, else from W&B's settings files."""
    import wandb

    settings = wandb.Settings()
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ))
    return str(settings.base_url)


def has_key(server: str) -> bool:
    """Whether the environment or a netrc file has an API key for ``server``."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    hosts = [urlsplit(server).hostname or ""]
    if server == str(wandb.Settings().base_url):
        hosts.append(LEGACY_HOST)
    file = regular_files.expand_home(os.environ.get("NETRC", "~/.netrc"))
    try:
        logins = netrc.netrc(str(file))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(host) is not None for host in hosts)


def is_answering(server: str, timeout: float = SERVER_TIMEOUT) -> bool:
    """Whether ``server`` responds by HTTP within ``timeout`` seconds, DNS lookup included."""
    return http_status(server, timeout) is not None


def http_status(server: str, timeout: float = SERVER_TIMEOUT) -> int | None:
    """Status code of a HEAD request; ``None`` without an HTTP response within ``timeout``."""
    parts = urlsplit(server)
    is_secure = parts.scheme == "https"
    try:
        port = parts.port or (443 if is_secure else 80)
    except ValueError:  # invalid port: the client reports it
        return None
    statuses: list[int] = []

    def connect() -> None:
        try:
            with socket.create_connection((parts.hostname, port), timeout=timeout) as connection:
                statuses.append(_request_status(connection, parts.hostname or "", secure=is_secure))
        except (OSError, ValueError):
            return

    thread = threading.Thread(target=connect, daemon=True)  # a DNS lookup may never end
    thread.start()
    thread.join(timeout)
    return statuses[0] if statuses else None


def _request_status(connection: socket.socket, host: str, *, secure: bool) -> int:
    """Send a HEAD request and return its status; raises ``ValueError`` if it is not HTTP."""
    if secure:
        # This request sends no key: the client verifies the certificate in its own requests.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = context.wrap_socket(connection, server_hostname=host)
    connection.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    response = connection.recv(len(b"HTTP/1.1 200"), socket.MSG_WAITALL * (not secure))
    protocol, _, status = response.decode("ascii").partition(" ")
    if not protocol.startswith("HTTP"):
        raise ValueError(protocol)
    return int(status)
