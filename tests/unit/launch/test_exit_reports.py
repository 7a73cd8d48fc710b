"""Outcomes of exceptions, and the exit report of each rank."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.launch import exit_reports
from scalewise.launch.outcomes import LOG_LINES, Outcome, outcome_of_exception


@pytest.mark.parametrize(
    ("error", "status", "reason", "signal_number"),
    [
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero", 0),
        (KeyError(), "failed", "KeyError: KeyError", 0),
        (SystemExit(3), "failed", "SystemExit: 3", 0),
        (ScalewiseError("the loss\nis nan"), "failed", "the loss is nan", 0),
        (ConfigError.for_key("a.b", 1, "wrong"), "refused", "a.b=1: wrong", 0),
        (Interrupted(15, "SIGTERM after step 3"), "interrupted", "SIGTERM after step 3", 15),
        (KeyboardInterrupt(), "interrupted", "SIGINT before the first step", 2),
        (MemoryError(), "out_of_memory", "MemoryError", 0),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out_of_memory", "CUDA out", 0),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "out_of_memory",
            "you tried",
            0,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "out_of_memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
            0,
        ),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            "out_of_memory",
            "CUDNN_STATUS_ALLOC_FAILED",
            0,
        ),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            "out_of_memory",
            "DEVICE_ALLOCATION_FAILED",
            0,
        ),
        (RuntimeError("NCCL communicator was aborted on rank 0"), "failed", "lost the connec", 0),
        (OSError(12, "Cannot allocate memory"), "out_of_memory", "Cannot allocate", 0),
        (RuntimeError("mat1 and mat2"), "failed", "RuntimeError: mat1 and mat2", 0),
        (ValueError("out of memory"), "failed", "ValueError: out of memory", 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exceptions_map_to_outcomes(
    error: BaseException, status: str, reason: str, signal_number: int
) -> None:
    outcome = outcome_of_exception(error, rank=1)
    assert outcome.status == status
    assert reason in outcome.reason
    assert outcome.signal_number == signal_number
    assert outcome.rank == 1


def test_only_unexpected_errors_show_a_traceback() -> None:
    def recurse(levels: int) -> None:
        if levels:
            recurse(levels - 1)
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError) as excinfo:
        recurse(30)
    outcome = outcome_of_exception(excinfo.value, 0)
    assert len(outcome.log_tail) == LOG_LINES
    assert outcome.log_tail[-1] == "ZeroDivisionError: by zero"
    assert outcome_of_exception(ScalewiseError("no"), 0).log_tail == ()
    assert outcome_of_exception(Interrupted(2, ""), 0).log_tail == ()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock that advances by one second per call."""
    ticks: Iterator[float] = iter(range(100))
    monkeypatch.setattr("time.time", lambda: next(ticks))


@pytest.mark.usefixtures("clock")
def test_exit_reports_are_ordered_by_time(tmp_path: Path) -> None:
    outcomes = [
        Outcome("failed", "peer gone", 2),
        Outcome("out_of_memory", "no room", 0, ("a", "b")),
        Outcome("interrupted", "told", 11, (), 15),
    ]
    exit_reports.prepare_reports(tmp_path)
    for outcome in outcomes:
        exit_reports.write_report(tmp_path, outcome.rank or 0, outcome)
    assert exit_reports.read_reports(tmp_path) == outcomes


def test_truncated_exit_report_is_skipped(tmp_path: Path) -> None:
    exit_reports.prepare_reports(tmp_path)
    exit_reports.write_report(tmp_path, 0, Outcome("ok"))
    (tmp_path / ".ranks" / "1.json").write_text('{"time": 3, "sta')
    assert [outcome.rank for outcome in exit_reports.read_reports(tmp_path)] == [0]


def test_exit_reports_of_another_attempt_are_removed(tmp_path: Path) -> None:
    exit_reports.prepare_reports(tmp_path)
    exit_reports.write_report(tmp_path, 0, Outcome("ok"))
    exit_reports.prepare_reports(tmp_path)
    assert exit_reports.read_reports(tmp_path) == []
    exit_reports.remove_reports(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert exit_reports.read_reports(tmp_path) == []


WAITING_STACK = ("waits in", 'File "/lib/torch/distributed/c10d.py", line 9 in wait')
WORKING_STACK = ("works in", 'File "/home/me/callback.py", line 3 in happen')
BLOCKED_REASON = "blocked while the other ranks waited"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({0: WAITING_STACK, 1: WORKING_STACK}, ([1], BLOCKED_REASON)),
        ({0: WAITING_STACK, 1: WAITING_STACK}, ([], BLOCKED_REASON)),
        ({0: WORKING_STACK, 1: WORKING_STACK}, ([], BLOCKED_REASON)),
        ({0: WAITING_STACK, 1: ()}, ([1], "did not respond")),
        ({0: WORKING_STACK, 1: ()}, ([1], "did not respond")),
        ({0: WAITING_STACK, 2: (), 10: ()}, ([2, 10], "did not respond")),
        ({0: WAITING_STACK, 1: WORKING_STACK, 3: ()}, ([1], BLOCKED_REASON)),
        ({}, ([], BLOCKED_REASON)),
    ],
    ids=[
        "one works",
        "all wait",
        "all work",
        "silent",
        "silence is worse",
        "two",
        "ended",
        "early",
    ],
)
def test_rank_that_blocked_the_others_is_named(
    answers: dict[int, tuple[str, ...]], expected: tuple[list[int], str], tmp_path: Path
) -> None:
    exit_reports.prepare_reports(tmp_path)
    for rank, lines in answers.items():
        (tmp_path / ".ranks" / f"{rank}.stack").write_text("\n".join(lines))
    exit_reports.write_report(tmp_path, 3, Outcome("ok"))
    assert exit_reports.blocking_ranks(tmp_path) == expected


def test_unwritable_exit_report_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(exit_reports, "write_json", raise_disk_full)
    exit_reports.write_report(tmp_path, 0, Outcome("ok"))
    assert "no space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcomes", "reason", "rank"),
    [
        (
            [Outcome("failed", "lost", 0, peer_failure=True), Outcome("failed", "it broke", 1)],
            "it broke",
            1,
        ),
        (
            [Outcome("failed", "lost", 0, peer_failure=True)],
            "rank 1 was killed without an exit report",
            1,
        ),
        ([], "ranks 0, 1 were killed without an exit report", None),
    ],
)
def test_reason_of_a_lost_rank(
    outcomes: list[Outcome], reason: str, rank: int | None, tmp_path: Path
) -> None:
    exit_reports.prepare_reports(tmp_path)
    for outcome in outcomes:
        assert outcome.rank is not None
        exit_reports.write_report(tmp_path, outcome.rank, outcome)
    lost_rank = exit_reports.lost_rank_reason(tmp_path, 2)
    assert lost_rank is not None
    assert (lost_rank.reason, lost_rank.rank) == (reason, rank)


THREAD = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 7 in wait
  File "/lib/threading.py", line 5 in run"""
MAIN = """{} 0x00007f02 (most recent call first):
  File "/home/me/step.py", line 12 in forward
  File "/home/me/train.py", line 3 in <module>"""
MAIN_TAIL = (
    'File "/home/me/train.py", line 3 in <module>',
    'File "/home/me/step.py", line 12 in forward',
)


@pytest.mark.parametrize(
    ("dump", "reason", "tail"),
    [
        (
            ("Segmentation fault", THREAD, MAIN.format("Current thread"), "Extension modules: a"),
            "SIGSEGV in /home/me/step.py:12",
            (*MAIN_TAIL, "Fatal Python error: Segmentation fault"),
        ),
        (
            ("Aborted", THREAD, MAIN.format("Thread")),
            "SIGABRT in a native thread, with the main thread in /home/me/step.py:12",
            (*MAIN_TAIL, "Fatal Python error: Aborted"),
        ),
        (
            ("Bus error", "Current thread 0x01 (most recent call first):\n  <no Python frame>"),
            "SIGBUS",
            ("Fatal Python error: Bus error",),
        ),
        (("Aborted",), "SIGABRT", ("Fatal Python error: Aborted",)),
    ],
    ids=["python thread", "native thread", "no frame", "no stack"],
)
def test_crash_outcome_has_the_innermost_frame(
    dump: tuple[str, ...], reason: str, tail: tuple[str, ...], tmp_path: Path
) -> None:
    exit_reports.prepare_reports(tmp_path)
    text = "\n\n".join((f"Fatal Python error: {dump[0]}", *dump[1:]))
    (tmp_path / ".ranks" / "1.crash").write_text(text)
    (tmp_path / ".ranks" / "0.crash").touch()
    assert exit_reports.read_crash(tmp_path, 0) is None
    lost_rank = exit_reports.read_crash(tmp_path, 1)
    assert lost_rank == Outcome("failed", f"rank 1 was killed by {reason}", 1, tail)
    exit_reports.write_report(tmp_path, 0, Outcome("failed", "lost", 0, peer_failure=True))
    assert exit_reports.lost_rank_reason(tmp_path, 2) == lost_rank


def test_ranks_that_only_lost_each_other(tmp_path: Path) -> None:
    exit_reports.prepare_reports(tmp_path)
    for rank in (0, 1):
        exit_reports.write_report(
            tmp_path, rank, Outcome("failed", "lost", rank, peer_failure=True)
        )
    assert exit_reports.lost_rank_reason(tmp_path, 2) is None


@pytest.mark.parametrize("content", [b"\x7fELF", b"\0" * 4096], ids=["short", "empty pages"])
def test_reason_names_a_library_whose_compilation_was_interrupted(
    content: bytes, tmp_path: Path
) -> None:
    library = tmp_path / "kernel.so"
    library.write_bytes(content)
    with pytest.raises(OSError, match=r"kernel\.so") as excinfo:
        ctypes.CDLL(str(library))
    outcome = outcome_of_exception(RuntimeError(f"ImportError: {excinfo.value}"), 0)
    assert outcome.status == "failed"
    assert outcome.reason.startswith(f"{library} is incomplete")
