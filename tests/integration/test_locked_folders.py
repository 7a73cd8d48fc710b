"""Two processes never drive one sweep or resume one run at the same time."""

from __future__ import annotations

from fixtures.doors import UNTRACKED, Doors

SLOW = (
    "+callbacks.slow._target_=fixtures.accidents.Slow",
    "trusted_packages=[fixtures]",
    "trainer.max_steps=400",
    "trainer.validate_every=null",
    "checkpoint.every=2",
)


def test_two_sweeps_of_one_second_get_a_folder_each(scalewise: Doors) -> None:
    line = ("-m", *UNTRACKED, "hydra.sweep.dir=runs/both/now", "trainer.max_steps=3")
    line = (*line, "trainer.validate_every=null")
    opened = [scalewise.start(*line, f"seed={seed}") for seed in (1, 2)]
    ended = [each.wait().ok() for each in opened]
    folders = {folder.path.name: folder for folder in ended[0].folders}
    assert sorted(folders) == ["now", "now-2"]
    seeds = {job.resolved["seed"] for folder in folders.values() for job in folder.jobs}
    assert seeds == {1, 2}
    assert not list(scalewise.cwd.rglob(".lock"))


def test_a_sweep_has_one_driver_and_a_run_one_process(scalewise: Doors) -> None:
    sweep = ("-m", *UNTRACKED, *SLOW, "name=swept", "seed=1,2")
    run = (*UNTRACKED, *SLOW, "name=alone")
    living = {"resume_sweep": scalewise.start(*sweep), "resume": scalewise.start(*run)}
    for key, line, pattern in (
        ("resume_sweep", sweep, "runs/swept/*/0/checkpoints/step-*/manifest.json"),
        ("resume", run, "runs/alone/*/checkpoints/step-*/manifest.json"),
    ):
        door = living[key]
        door.until_file(pattern)
        scalewise(*line, f"{key}=last").refused("process ", str(door.process.pid), "kill ")
    assert len(list(scalewise.cwd.glob("runs/*/*"))) == 2
