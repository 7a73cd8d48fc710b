"""Two processes never run one sweep or resume one run at the same time."""

from __future__ import annotations

from fixtures.cli_runner import UNTRACKED, CliRunner

SLOW_RUN = (
    "+callbacks.slow._target_=fixtures.faults.SlowSteps",
    "trusted_packages=[fixtures]",
    "trainer.max_steps=400",
    "trainer.validate_every=null",
    "checkpoint.every=2",
)


def test_simultaneous_sweeps_get_separate_folders(run_cli: CliRunner) -> None:
    overrides = ("-m", *UNTRACKED, "hydra.sweep.dir=runs/both/now", "trainer.max_steps=3")
    overrides = (*overrides, "trainer.validate_every=null")
    processes = [run_cli.start(*overrides, f"seed={seed}") for seed in (1, 2)]
    results = [process.wait().assert_ok() for process in processes]
    folders = {folder.path.name: folder for folder in results[0].folders}
    assert sorted(folders) == ["now", "now-2"]
    seeds = {job.resolved["seed"] for folder in folders.values() for job in folder.jobs}
    assert seeds == {1, 2}
    assert not list(run_cli.cwd.rglob(".lock"))


def test_sweep_and_run_folders_are_locked(run_cli: CliRunner) -> None:
    sweep = ("-m", *UNTRACKED, *SLOW_RUN, "name=swept", "seed=1,2")
    run = (*UNTRACKED, *SLOW_RUN, "name=alone")
    running_processes = {"resume_sweep": run_cli.start(*sweep), "resume": run_cli.start(*run)}
    for key, arguments, pattern in (
        ("resume_sweep", sweep, "runs/swept/*/0/checkpoints/step-*/manifest.json"),
        ("resume", run, "runs/alone/*/checkpoints/step-*/manifest.json"),
    ):
        command = running_processes[key]
        command.wait_for_file(pattern)
        run_cli(*arguments, f"{key}=last").assert_rejected(
            "process ", str(command.process.pid), "kill "
        )
    assert len(list(run_cli.cwd.glob("runs/*/*"))) == 2
