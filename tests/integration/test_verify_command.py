"""``scalewise verify`` as a command: output, JSON, exit codes and errors without a traceback."""

from __future__ import annotations

import json
import time
from signal import SIGINT

import pytest
from fixtures.cli_runner import CliRunner
from fixtures.strategies import LLAMA, TINY_DECODER

EXHAUSTIVE = pytest.mark.exhaustive
ONE_STEP = (*TINY_DECODER, *LLAMA, "verify.steps=1", "trainer.validate_every=null")
FAULT = (
    "trusted_packages=[fixtures]",
    "+callbacks.fault._target_=fixtures.strategy_faults.WrongGradientScale",
)


def test_verify_prints_the_first_difference_and_its_cause(run_cli: CliRunner) -> None:
    result = run_cli(*ONE_STEP, "parallelism=ddp", *FAULT, command="verify")
    assert result.code == 5, result.failure_report
    assert (
        "Different, first in the gradients of step 1, model.embedding.weight on rank" in result.out
    )
    cause = (
        "Likely cause: the loss is equal, and all gradients are 2 times those of one device, the"
    )
    assert f"{cause} number of data-parallel ranks: they are not divided by it" in result.out
    assert not result.folders


def test_verify_rejects_a_config_that_cannot_run(run_cli: CliRunner) -> None:
    overrides = ("parallelism=tensor", "model.heads=3", "model.kv_heads=null", "model.width=36")
    result = run_cli(*ONE_STEP, *overrides, command="verify")
    result.assert_rejected("parallelism.tensor=2", "does not divide model.heads=3")


@EXHAUSTIVE
def test_verify_prints_json_of_a_sweep(run_cli: CliRunner) -> None:
    axes = ("-m", "parallelism=ddp,fsdp", "precision=fp32")
    result = run_cli(*ONE_STEP, *axes, "--json", command="verify").assert_ok()
    for job in json.loads(result.out)["jobs"]:
        assert (job["equal"], job["world_size"], job["cause"]) == (True, 2, "")
        (comparison,) = job["comparisons"]
        assert [it["differing"] for it in comparison["quantities"]] == [0] * 5


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("overrides", "code", "reason"),
    [
        (
            ("+inject=oom", "callbacks.inject.step=0"),
            3,
            "scalewise: fp32, one device: out_of_memory: ",
        ),
        (
            ("+inject=hang", "callbacks.inject.step=0", "launch.timeout=5"),
            4,
            "scalewise: fp32, one device: timeout: ran longer than launch.timeout=5 s",
        ),
        (
            ("+inject=raise", "callbacks.inject.step=0"),
            1,
            "scalewise: fp32, one device: failed: RuntimeError: injected",
        ),
    ],
)
def test_verify_reports_a_run_that_fails(
    overrides: tuple[str, ...], code: int, reason: str, run_cli: CliRunner
) -> None:
    result = run_cli(*ONE_STEP, "parallelism=ddp", *overrides, command="verify")
    assert result.code == code, result.failure_report
    assert reason in result.err
    assert "Traceback" not in result.transcript


@EXHAUSTIVE
def test_signal_ends_verify_and_its_ranks(run_cli: CliRunner) -> None:
    hang = ("+inject=hang", "callbacks.inject.step=0", "callbacks.inject.rank=1")
    process = run_cli.start(*ONE_STEP, "parallelism=ddp", *hang, command="verify")
    assert process.process.stderr is not None
    while "ddp on 2 ranks" not in process.process.stderr.readline():
        pass
    time.sleep(3)
    process.signal(SIGINT, group=True)
    result = process.wait(40)
    assert result.code == 130, result.failure_report
    assert "scalewise: SIGINT while verifying" in result.err
    assert "Traceback" not in result.transcript
    assert process.remaining_processes(max_wait=2) == []


def test_verify_help_names_exit_code_5(run_cli: CliRunner) -> None:
    result = run_cli("--help", command="verify").assert_ok()
    assert "exit code 5" in " ".join(result.out.split())
