"""``scalewise verify`` as a command: output, JSON, exit codes and errors without a traceback."""

from __future__ import annotations

from fixtures.cli_runner import CliRunner
from fixtures.strategies import LLAMA, TINY_DECODER

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


def test_verify_help_names_exit_code_5(run_cli: CliRunner) -> None:
    result = run_cli("--help", command="verify").assert_ok()
    assert "exit code 5" in " ".join(result.out.split())
