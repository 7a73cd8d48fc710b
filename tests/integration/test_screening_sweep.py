"""``sweep=screen``: a fractional factorial design and its effects."""

from __future__ import annotations

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner

FACTORS = (
    "hydra.sweeper.factors={precision: [fp32, bf16_mixed], memory: [none, checkpoint_full], "
    "objective.loss_chunk: [null, 16]}"
)


def test_screening_plan_is_one_table(run_cli: CliRunner) -> None:
    result = run_cli("sweep=screen", *UNTRACKED, command="plan").assert_ok()
    rows = [line for line in result.out.splitlines() if "fits" in line]
    assert len(rows) == 16
    assert all(sum(word in row for row in rows) == 8 for word in ("bf16_mixed", "checkpoint_full"))


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (("precision=fp32",), ("is a factor of the screen",)),
        (("model.layers=1,2", "seed=3"), ("is not a factor of the screening", "has its own seed")),
    ],
)
def test_screening_rejects_invalid_designs(
    overrides: tuple[str, ...], messages: tuple[str, ...], run_cli: CliRunner
) -> None:
    run_cli("sweep=screen", *UNTRACKED, *overrides).assert_rejected(*messages)
    assert not list(run_cli.cwd.glob("runs/*/*"))


@pytest.mark.exhaustive
def test_screening_report_lists_effects(run_cli: CliRunner) -> None:
    overrides = ("-m", "hydra/sweeper=screen", *UNTRACKED, FACTORS, "hydra.sweeper.repeats=1")
    result = run_cli(*overrides, timeout=300).assert_ok()
    assert [job.status["status"] for job in result.folder.jobs] == ["ok"] * 8
    html = (result.folder.path / "report.html").read_text("utf-8")
    assert 'id="effects"' in html
    assert "memory checkpoint_full" in html
