"""A signal is reported as a signal even if a library replaces the exception."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from scalewise.errors import Interrupted
from scalewise.launch import signals


def library() -> None:
    """Replace an interrupting exception by its own error, as OmegaConf can."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        raise AttributeError("half set")


@pytest.mark.parametrize("suppressed_errors", [(), (AttributeError,)])
def test_signal_is_kept_through_library_errors(
    suppressed_errors: tuple[type[Exception], ...],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    expect_interrupt = pytest.raises(Interrupted, match="SIGTERM while it composes")
    with (
        expect_interrupt as excinfo,
        signals.raise_on_signals("while it composes"),
        suppress(*suppressed_errors),
    ):
        library()
    assert excinfo.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_swallowed_signal_is_raised_before_the_next_block() -> None:
    started_blocks = []

    def goes_on() -> None:
        with suppress(AttributeError):
            library()
        with signals.raise_on_signals("inside"):
            started_blocks.append("inside")

    with pytest.raises(Interrupted, match="SIGTERM outside"), signals.raise_on_signals("outside"):
        goes_on()
    assert started_blocks == []
    with signals.raise_on_signals("afterwards"):
        pass


def test_error_without_a_signal_is_unchanged() -> None:
    with (
        pytest.raises(AttributeError, match="its own"),
        signals.raise_on_signals("while it composes"),
    ):
        raise AttributeError("its own")


def test_second_signal_does_not_keep_the_first_from_being_recorded() -> None:
    recorded: list[str] = []

    def record() -> None:
        try:
            with signals.raise_on_signals("inside"):
                os.kill(os.getpid(), signal.SIGINT)
        except Interrupted as error:
            os.kill(os.getpid(), signal.SIGINT)
            recorded.append(str(error))
        with signals.raise_on_signals("in the next block"):
            recorded.append("next")
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="outside"), signals.raise_on_signals("outside"):
        record()
    assert recorded == ["SIGINT inside", "next"]


def test_deferred_signal_is_raised_at_the_end_of_the_block() -> None:
    recorded: list[str] = []

    def defer() -> None:
        with signals.defer_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            recorded.append("imported")
        recorded.append("started")

    with pytest.raises(Interrupted, match="SIGTERM outside"), signals.raise_on_signals("outside"):
        defer()
    assert recorded == ["imported"]
