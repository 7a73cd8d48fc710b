"""Sweep the learning rate and the optimizer, then print the best job and the report's path."""

import json
import sys
from pathlib import Path

from scalewise.cli import main

if __name__ == "__main__":
    axes = ["optimizer=adamw,sgd", "optimizer.lr=1e-3,1e-2"]
    folder = Path("runs/optimizers")
    code = main(
        ["train", "-m", "experiment=smoke", *axes, *sys.argv[1:], f"hydra.sweep.dir={folder}"]
    )
    losses = {}
    for job in json.loads((folder / "sweep.json").read_text("utf-8"))["jobs"]:
        summary = json.loads((folder / job["folder"] / "summary.json").read_text("utf-8"))
        losses[summary["metrics"]["val/loss"]] = job["varied"]
    print(f"best: {losses[min(losses)]}, held-out loss {min(losses):.4f}")
    print(f"report: {folder / 'report.html'}")
    sys.exit(code)
