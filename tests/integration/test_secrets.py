"""No secret of the environment occurs in a file, an output line or a request."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import yaml
from fixtures.cli_runner import TINY, UNTRACKED, CliResult, CliRunner
from fixtures.wandb_server import WandbServer
from fixtures.wandb_views import Views

EXHAUSTIVE = pytest.mark.exhaustive
SECRET_ENVIRONMENT = {
    "PLANTED_DB_PASS": "hunter2-prod-9931",
    "PLANTED_GH_AUTH": "Bearer abCD1234efGH5678ijKL",
    "PLANTED_DATABASE_URL": "postgres://app:s3cr3tPW99@db.example/x",
    "PLANTED_WEBHOOK": "https://hooks.slack.com/services/T0AAAAAA1/B0BBBBBB2/cCdDeEfF3344",
    "PLANTED_QUOTES": "no-secret-by-name",
    "PLANTED_QUOTED_SECRET": "a\"b'c<d>&e\\f-77",
    "PLANTED_RANDOM": "Zk3nQ9vX2mB7tR5wY8cL1pD4",
    "WANDB_API_KEY": "fedcba9876543210fedcba9876543210fedcba98",
}
SECRET_PARTS = (
    "hunter2-prod",
    "abCD1234efGH",
    "s3cr3tPW99",
    "cCdDeEfF3344",
    "e\\f-77",
    "e\\\\f-77",
    "Zk3nQ9vX2mB7",
    "fedcba9876543210",
    "KEYofBASEurl55",
)
"""Parts of secrets that reveal a leak in any form."""


def assert_nowhere(result: Iterable[CliResult], server: WandbServer | None = None) -> None:
    """Assert that output, folders and server requests contain no part of a secret."""
    texts: dict[str, bytes] = {}
    for index, command_result in enumerate(result):
        texts[f"output {index}"] = command_result.transcript.encode()
        texts |= {str(p): p.read_bytes() for p in command_result.cwd.rglob("*") if p.is_file()}
    if server is not None:
        texts["inputs"] = repr(server.inputs).encode()
        texts["alerts"] = repr(server.alerts).encode()
        for name, run in server.runs.items():
            texts[f"run {name}"] = repr((run.history, run.summary, run.config)).encode()
            texts |= {f"{name}/{file}": content for file, content in run.files.items()}
    leaks = [
        (source, part)
        for source, text in texts.items()
        for part in SECRET_PARTS
        if part.encode() in text
    ]
    assert leaks == []


def test_failing_run_that_prints_its_environment_writes_no_secret(run_cli: CliRunner) -> None:
    with WandbServer(handlers=Views().handlers) as server:
        address = server.url.replace("://", "://user:KEYofBASEurl55@")
        env = {**SECRET_ENVIRONMENT, "WANDB_BASE_URL": address}
        fault = "+callbacks.tell._target_=fixtures.faults.PrintEnvironment"
        logged = ("hydra/job_logging=default", "hydra.output_subdir=.hydra")
        run = run_cli(*TINY, *logged, "trusted_packages=[fixtures]", fault, env=env)
        assert run.code == 1
        assert run.folder.status["wandb"]["mode"] == "online"
        assert "cannot connect with ['[hidden]'" in run.folder.status["reason"]
        assert "no-secret-by-name" in run.out
        status_result = run_cli(str(run.folder.path), command="status", env=env)
        page = run_cli(str(run.folder.path), command="report", env=env).assert_ok()
        assert_nowhere([run, status_result, page], server)


@EXHAUSTIVE
def test_commands_write_no_secret(run_cli: CliRunner) -> None:
    experiment_folder = run_cli.cwd / "own" / "experiments"
    experiment_folder.mkdir(parents=True)
    question_override = "${oc.${tracking.project}:PLANTED_DB_PASS}"
    content = {"tracking": {"project": "env"}, "question": question_override}
    (experiment_folder / "x.yaml").write_text(yaml.safe_dump(content), "utf-8")
    results = [
        run_cli(*arguments, command=command, env=SECRET_ENVIRONMENT).assert_rejected("secret")
        for command in ("train", "plan")
        for arguments in (
            ("-cd", "own", "experiment=x"),
            (*UNTRACKED, f"question={SECRET_ENVIRONMENT['PLANTED_DB_PASS']}"),
            ("-m", *UNTRACKED, "seed=1,2", f"name={SECRET_ENVIRONMENT['PLANTED_RANDOM']}"),
            (*UNTRACKED, "question=${oc.env:PLANTED_WEBHOOK}"),
        )
    ]
    assert not (run_cli.cwd / "runs").exists()
    results.append(run_cli(*UNTRACKED, "checkpoint.every=4", env=SECRET_ENVIRONMENT).assert_ok())
    run = str(results[-1].folder.path)
    results.append(run_cli("-m", *UNTRACKED, "seed=1,2", env=SECRET_ENVIRONMENT).assert_ok())
    results += [
        run_cli(*arguments, command=command, env=SECRET_ENVIRONMENT)
        for command, *arguments in (
            ("status", run),
            ("report", run),
            ("evaluate", run),
            ("export", run, "to=exported"),
            ("plan", *UNTRACKED),
            ("plan", "-m", *UNTRACKED, "seed=1,2"),
            ("explain", run, run),
            ("doctor",),
            ("train", "--cfg", "job", "--resolve", *UNTRACKED),
            ("publish", run),
        )
    ]
    assert_nowhere(results)
