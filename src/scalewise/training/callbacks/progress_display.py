"""Progress of a run on the console: one status line per log interval, and a progress bar."""

from __future__ import annotations

import sys
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scalewise.metric_names import STEP_PHASES
from scalewise.plain_console import PlainConsole
from scalewise.planner.plan import predicted_metrics
from scalewise.run_config import RunConfig
from scalewise.tracking import tables
from scalewise.units import format_mfu

Row = dict[str, Any]
BAR_WIDTH = 12
VALIDATION_FORMATS = {
    "val/reward_accuracy": "{:.1%} of pairs ranked correctly",
    "val/reward": "reward {:.3f}",
    "val/accuracy": "{:.1%} classified correctly",
}
"""Formats of the metrics that are printed next to the validation loss."""


class ProgressDisplay:
    """Print a status line per log interval to stdout; on a terminal, also a progress bar."""

    def __init__(self, run: RunConfig, steps: int, start: int) -> None:
        self._run, self._steps = run, steps
        self._peak = ""
        self._console = PlainConsole(file=sys.stdout, soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("training", total=steps, completed=start)
            self._progress.start()

    def __call__(self, rows: list[Row]) -> None:
        """Print the status line of a log interval."""
        for row in rows:
            if peak := row.get("memory/peak_bytes"):
                self._peak = tables.comparison_text(
                    {**predicted_metrics(self._run), "memory/peak_bytes": peak}
                )
        line = format_window(rows, self._run, self._steps, self._peak)
        self._console.print(line)
        if self._progress is not None:
            done = rows[-1]["step"]
            self._progress.update(self._task, completed=done)
            if done == self._steps:
                self.close()

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()


def format_window(rows: list[Row], run: RunConfig, steps: int, peak: str = "") -> str:
    """Status line of a log interval: progress, losses, throughput, gradient norm, peak, times."""
    last = rows[-1]
    seconds = sum(row["time/step_s"] for row in rows)
    shares = [
        f"{letter} {sum(row[f'time/{name}_s'] for row in rows) / seconds:.0%}"
        for name, letter in STEP_PHASES.items()
        if last[f"time/{name}_s"] is not None
    ]
    loss = sum(row["train/loss"] for row in rows) / len(rows)
    first, last_step = rows[0]["step"], last["step"]
    num_tokens = run.tokens_in_step.before(last_step) - run.tokens_in_step.before(first - 1)
    tokens = num_tokens / seconds
    rate = f"{tokens:,.0f} {'samples/s' if run.objective.is_user_defined else 'tok/s'}"
    if (unpadded := last.get("throughput/unpadded_tokens_per_s")) is not None:
        fraction = unpadded / last["throughput/tokens_per_s"]
        rate += f" ({tokens * fraction:,.0f} without padding)" if fraction < 1 else ""
    parts = [
        f"{format_bar(last['step'] / steps)} {last['step']:>{len(str(steps))}}/{steps}",
        f"loss {loss:.4f}",
        rate,
        f"grad {last['train/grad_norm']:.3g}",
        f"lr {last['train/lr']:.2e}",
        f"{seconds / len(rows) * 1e3:.0f} ms ({' '.join(shares)})",
    ]
    if not run.objective.is_user_defined:
        flops = _count_flops(rows, run, num_tokens)
        tflops = flops / seconds / run.world_size / 1e12
        parts.insert(3, f"{tflops:.3g} TFLOP/s/device")
    if last.get("throughput/mfu") is not None:
        flops_ratio = _count_flops(rows, run, num_tokens) / _count_flops(
            rows[-1:], run, step_tokens := run.tokens_in_step.at(last_step - 1)
        )
        mfu = last["throughput/mfu"] * last["time/step_s"] * flops_ratio / seconds
        palm_ratio = run.warmup_runs[step_tokens].palm_to_causal_flops
        parts.insert(4, format_mfu(mfu, mfu * palm_ratio))
    if "val/loss" in last:
        texts = [text.format(last[key]) for key, text in VALIDATION_FORMATS.items() if key in last]
        parts.insert(2, ", ".join([f"val {last['val/loss']:.4f}", *texts]))
    if peak:
        parts.insert(-1, peak)
    return "  ".join(parts)


def _count_flops(rows: list[Row], run: RunConfig, num_tokens: int) -> float:
    """Model FLOPs of the steps of ``rows``, which have ``num_tokens`` tokens."""
    if not run.trainer.sequence_warmup:
        return run.flops_per_token * num_tokens
    tokens_of_steps = [run.tokens_in_step.at(row["step"] - 1) for row in rows]
    return sum(run.warmup_runs[it].flops_per_token * it for it in tokens_of_steps)


def format_bar(fraction: float) -> str:
    """Progress bar made of characters."""
    full = round(min(1.0, fraction) * BAR_WIDTH)
    return "━" * full + "╌" * (BAR_WIDTH - full)
