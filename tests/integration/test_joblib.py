"""Jobs of a sweep in joblib's processes: several at once, signals, and who dies."""

from __future__ import annotations

import signal
import sys

import pytest
from fixtures.doors import UNTRACKED, Doors, Opened

LINE = ("-m", *UNTRACKED, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
LONG_RUN = ("trainer.max_steps=1000", "trainer.log_every=1", "trainer.validate_every=null")
WITHOUT_IT = """
import sys
sys.modules["joblib"] = None
from scalewise.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_two_at_once_and_what_fails_stops_none(scalewise: Doors) -> None:
    door = scalewise.start(*LINE, "parallelism=single,ddp", "+inject=none,raise")
    ended = door.wait()
    assert ended.code == 1, ended.said
    record = ended.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["ok", "failed"] * 2
    first, second, *_ = (job.status for job in ended.folder.jobs)
    assert second["started"] < first["ended"]
    assert len({job.status["process"] for job in ended.folder.jobs}) == 2
    assert (ended.folder.path / "report.html").is_file()
    assert door.leftovers(within=2) == []


def both_train(door: Opened) -> None:
    def rows() -> bool:
        files = [list(door.cwd.glob(f"runs/*/*/{job}/metrics.csv")) for job in (0, 1)]
        return all(f and len(f[0].read_text().splitlines()) > 3 for f in files)

    door.until(rows, "two jobs that train")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False)],
)
def test_a_signal_ends_all_and_saves_each(number: int, group: bool, scalewise: Doors) -> None:
    door = scalewise.start(*LINE, *LONG_RUN, "seed=1,2,3")
    both_train(door)
    door.signal(number, group=group)
    ended = door.wait(30)
    assert ended.code == 128 + number, ended.said
    assert "Traceback" not in ended.said
    record = ended.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["interrupted"] * 3
    for job in ended.folder.jobs[:2]:
        assert f"{signal.Signals(number).name} after step" in job.status["reason"]
        assert job.checkpoints
    assert door.leftovers(within=2) == []


@pytest.mark.exhaustive
def test_a_worker_that_is_killed_takes_the_others_along(scalewise: Doors) -> None:
    """As joblib has it; the sweep says so, ends, and can be gone on with."""
    killed = "{_target_:fixtures.accidents.KillLauncher,job:0,step:5}"
    line = (*LINE, *LONG_RUN, "trusted_packages=[fixtures]", f"+callbacks.accident={killed}")
    door = scalewise.start(*line, "seed=1,2,3")
    ended = door.wait()
    assert ended.code == 1, ended.said
    assert "Traceback" not in ended.said
    record = ended.folder.json("sweep.json")
    assert {job["status"] for job in record["jobs"]} == {"failed"}
    assert "a joblib worker died" in record["jobs"][-1]["reason"]
    assert door.leftovers(within=20) == []


def test_refusals(scalewise: Doors) -> None:
    ended = scalewise(*LINE, "hydra.launcher.n_jobs=0", "seed=1,2")
    ended.refused("hydra.launcher.n_jobs=0", "-1 for one per core")
    door = scalewise.command([sys.executable, "-c", WITHOUT_IT, "train", *LINE, "seed=1,2"])
    door.wait().refused("hydra/launcher=joblib", "pip install 'scalewise[joblib]'")
    assert list(scalewise.cwd.iterdir()) == []
