"""Output at the end of a run."""

import os
import signal
from pathlib import Path

import pytest

from scalewise.commands import show
from scalewise.errors import Interrupted
from scalewise.launch.job import Result
from scalewise.reports import html_report


def test_signal_during_the_report_names_the_command_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        html_report, "write_reports", lambda folders: os.kill(os.getpid(), signal.SIGINT)
    )
    result = Result("ok", "", 0, tmp_path / "runs" / "a b" / "now", {})
    with pytest.raises(Interrupted, match="scalewise report 'runs/a b/now' writes it") as raised:
        show.finish_job(result)
    assert raised.value.exit_code == 130
