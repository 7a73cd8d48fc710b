"""``scalewise verify``: compare a parallelism strategy with one device, in small runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.status import Status
from rich.table import Table

from scalewise.commands.plan_json import print_json
from scalewise.config.app import run_command
from scalewise.config.command import Command, JobOutcome, SweepJob
from scalewise.config.compose import compose
from scalewise.console import print_lines
from scalewise.errors import DIFFERENT, ConfigError
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import external_launcher, signals
from scalewise.objectives import UserModule
from scalewise.plain_console import PlainConsole, get_console, styled_text
from scalewise.run_config import RunConfig
from scalewise.sweep_question import SweepQuestion
from scalewise.typed_override import command_line, replace_overrides
from scalewise.verify import reduced_run

if TYPE_CHECKING:
    from scalewise.verify.comparison import Difference, QuantityResult
    from scalewise.verify.runner import Verification

MAX_LISTED = 5
"""Maximum number of differences in the output."""


class VerifyCommand(Command):
    """Command that compares the strategy of each run with one device."""

    checks_machine = False

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Compare one run, print the result and return the exit code."""
        content, exit_code = self._verify(run)
        if self._as_json:
            print_json(content)
        return exit_code

    def run_sweep(
        self,
        jobs: Sequence[SweepJob],
        folder: Path,
        question: SweepQuestion,
        launcher_options: Mapping[str, object],
    ) -> list[JobOutcome]:
        """Compare the runs of a sweep one after another."""
        contents, outcomes = [], []
        for job in jobs:
            if not self._as_json and job.varied:
                print_lines(" ".join(f"{key}={value}" for key, value in job.varied.items()))
            content, exit_code = self._verify(job.run)
            contents.append({"varied": dict(job.varied), **content})
            outcomes.append(JobOutcome(exit_code, float(exit_code)))
        if self._as_json:
            print_json({"jobs": contents})
        return outcomes

    def _verify(self, run: RunConfig) -> tuple[dict[str, Any], int]:
        """Result of one run for JSON, and the exit code."""
        _reject_external_ranks(run)
        if run.hardware.device is DeviceKind.cuda and not this_machine().gpus:
            # Open sizes of the strategy then become those of CPU ranks.
            run = compose(replace_overrides(run.overrides, ["hardware=cpu"]), check_machine=False)
        small = reduced_run.reduce_run(run)
        if not self._as_json:
            print_lines(describe_runs(small))

        from scalewise.verify.runner import verify_run  # imports torch

        with (
            TemporaryDirectory(prefix="scalewise-verify-") as folder,
            PlainConsole(stderr=True).status("") as status,
        ):
            verification = verify_run(small, Path(folder), partial(_show_progress, status))
        if not self._as_json:
            _print_result(verification)
        return json_content(verification), DIFFERENT if verification.failed else 0


def _show_progress(status: Status, name: str) -> None:
    """Show the name of the run that starts, on stderr."""
    if os.isatty(2):
        status.update(name)
    else:
        print_lines(f"running {name} ...", stderr=True)


def _reject_external_ranks(run: RunConfig) -> None:
    """Raise ``ConfigError`` in a rank of torchrun or srun: a comparison starts its own ranks."""
    if external_launcher.is_external_rank():
        external_launcher.exit_if_not_rank_0()
        reason = "is not supported with torchrun or srun: it starts the ranks of each run"
        fix = f"run without torchrun and srun: {command_line('verify', run.overrides)}"
        raise ConfigError.for_key("", "", f"verify {reason}", fix)


def describe_runs(small: RunConfig) -> str:
    """Size of the compared runs, in one line."""
    device = "CUDA devices" if small.hardware.device is DeviceKind.cuda else "CPU ranks"
    ranks = f"{small.option('parallelism')} on {small.world_size} {device}"
    steps = f"{small.verify.steps} step{'s' * (small.verify.steps > 1)}"
    if isinstance(small.objective, UserModule):
        return f"{ranks}, compared with one device: {steps} of {small.objective.target}"
    return (
        f"{ranks}, compared with one device: {steps} of SGD on {small.batch_description}, "
        f"{small.model.layers} layers of width {small.model.width}"
    )


def _print_result(verification: Verification) -> None:
    """Print a table of the compared quantities, the first differences and their likely cause."""
    console = get_console()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("precision", "quantity"):
        table.add_column(name)
    for name in ("compared", "largest difference", "tolerance"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for comparison in verification.comparisons:
        for result in comparison.results:
            table.add_row(comparison.precision, *_result_cells(result))
    console.print(table)
    failed = verification.failed
    if failed is None:
        precisions = " and ".join(it.precision for it in verification.comparisons)
        print_lines(f"Equal: the strategy trains like one device, in {precisions}")
        return
    first, *others = failed.differences
    print_lines(f"Different, first in {describe_difference(first)}")
    for difference in others[: MAX_LISTED - 1]:
        print_lines(f"  then {describe_difference(difference)}")
    if len(others) >= MAX_LISTED:
        print_lines(f"  and {len(others) - MAX_LISTED + 1} more")
    print_lines(f"Likely cause: {verification.cause}")


def _result_cells(result: QuantityResult) -> tuple[Any, ...]:
    differing = len(result.differences)
    status = styled_text(
        (f"{differing} of {result.compared} differ", "red") if differing else ("equal", "green")
    )
    tolerance = f"{result.tolerance:.1e}" if result.tolerance else "0"
    difference = f"{result.difference:.1e}" if result.difference else "0"
    return result.quantity, f"{result.compared:,}", difference, tolerance, status


def describe_difference(difference: Difference) -> str:
    """Quantity, tensor, step, rank and size of a difference."""
    from scalewise.verify.diagnosis import layer_of

    step = f" of step {difference.step}" if difference.step else ""
    if difference.quantity == "samples":
        return f"the samples{step}: {difference.name}"
    parts = [f"the {difference.quantity}{step}"]
    if difference.name:
        layer = layer_of(difference.name)
        where = "" if layer is None else f" (layer {layer})"
        parts.append(f"{difference.name}{where} on rank {difference.rank}")
    if difference.place:
        parts.append(difference.place)
    limit = f"{difference.tolerance:.1e} allowed"
    return f"{', '.join(parts)}: relative difference {difference.difference:.1e}, {limit}"


def json_content(verification: Verification) -> dict[str, Any]:
    """Result for programs; differences are relative to the largest element on one device."""
    small = verification.small
    return {
        "equal": verification.failed is None,
        "parallelism": small.option("parallelism"),
        "world_size": small.world_size,
        "device": small.hardware.device.value,
        "steps": small.verify.steps,
        "comparisons": [
            {
                "precision": comparison.precision,
                "quantities": [
                    {
                        "quantity": result.quantity,
                        "compared": result.compared,
                        "difference": result.difference,
                        "tolerance": result.tolerance,
                        "differing": len(result.differences),
                    }
                    for result in comparison.results
                ],
                "differences": [vars(it) for it in comparison.differences],
            }
            for comparison in verification.comparisons
        ],
        "cause": verification.cause,
    }


def main(arguments: Sequence[str]) -> int:
    """Run ``scalewise verify ARGUMENTS`` and return its exit code."""
    others = [argument for argument in arguments if argument != "--json"]
    with signals.raise_on_signals("while verifying"):
        return run_command(VerifyCommand(as_json=len(others) < len(arguments)), others)
