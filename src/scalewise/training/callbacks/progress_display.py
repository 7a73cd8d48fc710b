"""What a person watching sees: one line per window, and a bar that moves."""

from __future__ import annotations

import sys
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scalewise.plain_console import PlainConsole
from scalewise.planner.plan import predicted_metrics
from scalewise.run_config import RunConfig
from scalewise.tracking import planned_vs_measured
from scalewise.tracking.metric_names import TIMES

Row = dict[str, Any]
BAR_WIDTH = 12
BESIDE = {
    "val/reward_accuracy": "{:.1%} preferred rightly",
    "val/reward": "reward {:.3f}",
    "val/accuracy": "{:.1%} classified rightly",
}
"""What stands beside a validation's loss."""


class ProgressDisplay:
    """Prints windows to stdout; on a terminal a live bar stays below them."""

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
        """Prints the last step of a window, and the loss averaged over it."""
        for row in rows:
            if peak := row.get("memory/peak_bytes"):
                self._peak = planned_vs_measured.comparison_text(
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
        """Takes the live bar away."""
        if self._progress is not None:
            self._progress.stop()


def format_window(rows: list[Row], run: RunConfig, steps: int, peak: str = "") -> str:
    """Returns one window in one line: progress, losses, speed, gradient, rate, peak, time."""
    last = rows[-1]
    seconds = sum(row["time/step_s"] for row in rows)
    shares = [
        f"{letter} {sum(row[f'time/{name}_s'] for row in rows) / seconds:.0%}"
        for name, letter in TIMES.items()
        if last[f"time/{name}_s"] is not None
    ]
    loss = sum(row["train/loss"] for row in rows) / len(rows)
    tokens = run.tokens_per_step * len(rows) / seconds
    rate = f"{tokens:,.0f} {'rows/s' if run.objective.is_user_defined else 'tok/s'}"
    if (real := last.get("throughput/unpadded_tokens_per_s")) is not None:
        share = real / last["throughput/tokens_per_s"]
        rate += f" ({tokens * share:,.0f} without padding)" if share < 1 else ""
    parts = [
        f"{format_bar(last['step'] / steps)} {last['step']:>{len(str(steps))}}/{steps}",
        f"loss {loss:.4f}",
        rate,
        f"grad {last['train/grad_norm']:.3g}",
        f"lr {last['train/lr']:.2e}",
        f"{seconds / len(rows) * 1e3:.0f} ms ({' '.join(shares)})",
    ]
    if not run.objective.is_user_defined:
        tflops = run.flops_per_step * len(rows) / seconds / run.world_size / 1e12
        parts.insert(3, f"{tflops:.3g} TFLOP/s/device")
    if last.get("throughput/mfu") is not None:
        share = last["throughput/mfu"] * last["time/step_s"] / (seconds / len(rows))
        parts.insert(4, f"MFU {share:.1%}")
    if "val/loss" in last:
        told = [text.format(last[key]) for key, text in BESIDE.items() if key in last]
        parts.insert(2, ", ".join([f"val {last['val/loss']:.4f}", *told]))
    if peak:
        parts.insert(-1, peak)
    return "  ".join(parts)


def format_bar(share: float) -> str:
    """Returns a progress bar of plain characters."""
    full = round(min(1.0, share) * BAR_WIDTH)
    return "━" * full + "╌" * (BAR_WIDTH - full)
