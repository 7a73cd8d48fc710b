"""Records of benchmark results, and the values of them that README.md and docs/ quote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from scalewise.bench import gpu_accuracy, lab_record, suite_table
from scalewise.bench.suite import Compose
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware
from scalewise.launch.status_file import git_state, machine_facts, versions
from scalewise.run_files import write_json
from scalewise.units import MEGA

RECORDS = Path("experiments", "records")
WIDTH = 100
STRATEGIES = ("ddp", "fsdp", "tensor", "context", "pipeline")
"""Golden runs with the model and data of the golden run ``llama`` on several ranks."""


def build_record(result: Mapping[str, object], command: str) -> dict[str, object]:
    """Add command, date, machine, versions and commit to a result."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": versions(),
        **git_state(),
        **result,
    }


def record_path(name: str, hardware: Hardware) -> Path:
    """Path of a benchmark's record; raises ``ConfigError`` outside a checkout of scalewise."""
    if not RECORDS.is_dir():
        reason = f"requires the folder {RECORDS}"
        raise ConfigError.for_key("record", True, reason, "run it in a checkout of scalewise")
    device = hardware.match or str(machine_facts()["device"])
    kind = "cpu" if hardware.device is DeviceKind.cpu else device
    return RECORDS / re.sub(r"[^a-z0-9]+", "_", kind.lower()) / f"{name}.json"


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Write a record; create the folder of its device."""
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)


def documents(root: Path) -> Iterator[Path]:
    """Paths of README.md and the pages of the documentation."""
    yield root / "README.md"
    yield from sorted((root / "docs").rglob("*.md"))


def update_figures(document: Path, records: Path, compose: Compose) -> None:
    """Write the values of the records between the markers of a document.

    Args:
        document: File with markers.
        records: Folder of the records.
        compose: Function that composes a run from overrides without checks of this machine.
    """
    text = document.read_text("utf-8")
    planned = {"gpu_accuracy": partial(gpu_accuracy_figures, compose=compose)}
    for name, paragraph in (PARAGRAPHS | planned).items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        if begin in text:
            head, tail = text.split(begin)
            text = head + begin + paragraph(records) + end + tail.split(end)[1]
    document.write_text(text, "utf-8")


def prediction_figure(records: Path) -> str:
    """Error of the predicted peak memory, in one sentence."""
    errors = _read_record(records / "cpu" / "ledger.json")["trained"]["errors"]
    return _fill_marks(
        f"- **Prediction:** over {errors['rows']} small runs with every parallelism "
        f"strategy but DeepSpeed, the predicted peak memory differs from the measured peak by "
        f"{_percent(errors['median'])} (median) and {_percent(errors['worst'])} (worst)."
    )


def overhead_figure(records: Path) -> str:
    """Step time next to hand-written loops, in one sentence."""
    record = _read_record(records / "cpu" / "parallel.json")
    ratios = " and ".join(
        "{median:.2f} ({low:.2f} to {high:.2f}) with {name}".format(
            name=name.upper(), **strategy["ratio"]
        )
        for name, strategy in record["layouts"].items()
    )
    return _fill_marks(
        f"- **Overhead:** the time of a training step, relative to a hand-written PyTorch loop on "
        f"{record['ranks']} CPU ranks, is {ratios} (95% interval)."
    )


def equality_figure(records: Path) -> str:
    """Largest difference of losses between strategies, in one sentence."""
    golden = records.parents[1] / "tests" / "golden"
    single = _read_record(golden / "run_llama.json")["train/loss"]
    worst = max(
        abs(loss / expected - 1)
        for name in STRATEGIES
        for loss, expected in zip(
            _read_record(golden / f"run_{name}.json")["train/loss"], single, strict=True
        )
    )
    return _fill_marks(
        f"- **Equality of strategies:** over {len(single)} fp32 steps with the same seed, the "
        f"losses under {', '.join(STRATEGIES[:-1])} and {STRATEGIES[-1]} differ from those on one "
        f"device by at most {worst:.1e}, relatively."
    )


def memory_figures(records: Path) -> str:
    """Errors of predicted peak memory against small runs, traces and DeepSpeed runs."""
    record = _read_record(records / "cpu" / "ledger.json")
    trained, zero, traced = (record[kind]["errors"] for kind in ("trained", "deepspeed", "traced"))
    run_errors, trace_errors = (
        f"{_percent(errors['median'])} at the median and {_percent(errors['worst'])} at the worst"
        for errors in (trained, traced)
    )
    return _fill_marks(
        f"`scalewise bench ledger` ({record['date'][:10]}) compares the predicted peak with the "
        f"measured peak of allocated tensors. Over {trained['rows']} small runs with every "
        f"parallelism strategy but DeepSpeed the error is {run_errors}. Over {traced['rows']} "
        f"large configurations, up to 8B parameters on 128 devices and 70B on 32, it is "
        f"{trace_errors}, against a FakeTensor trace. Over {zero['rows']} small runs of DeepSpeed "
        f"it is {zero['median']:.1%} at the median and {zero['worst']:.1%} at the worst."
    )


def planner_figures(records: Path) -> str:
    """Errors of the planner against published measurements."""
    record = _read_record(records / "cpu" / "planner.json")
    memory, statuses = record["memory"]["all"], record["verdicts"]
    unscaled, others, scaled = (
        _error_text(record[f"tokens_per_s{name}"]["all"]) for name in ("", "_others", "_scaled")
    )
    return _fill_marks(
        f"`scalewise bench planner` ({record['date'][:10]}) compares plans with {record['rows']} "
        f"published measurements from {record['sources']} repositories of other frameworks. "
        "Predicted memory differs by "
        f"{memory['median']:.1%} at the median and {memory['p90']:.0%} at the 90th percentile "
        f"({memory['rows']} measurements). Of the runs that succeeded, the fit status is "
        f"{_status_text(statuses['ran'])}. Of the runs that ran out of memory, it is "
        f"{_status_text(statuses['ran_out_of_memory'])}. Predicted tokens/s differ by {unscaled} "
        f"without a scale, by {others} with one scale fitted to the other sources only, and by "
        f"{scaled} with one scale for each framework, device and precision. The profiles of GPUs "
        "on which no run of scalewise is measured, except those of Hopper, contain the median "
        f"scale of all these runs as `step_scale`, {record['step_scale']['median']:.2f}. The "
        "interval from the 10th to the 90th percentile of the other sources contains "
        f"{record['interval_coverage']:.0%} of the step times of a source. In "
        f"{record['choices']['sets']} sets of layouts of one model on the same devices, the layout "
        f"that is predicted to be fastest has {record['choices']['median']:.2f} of the best "
        "measured speed at the median. No constant is fitted to one of them, but the "
        "measurements "
        "were known while the frameworks were modelled, so the error on other runs may be larger."
    )


def gpu_accuracy_figures(records: Path, compose: Compose) -> str:
    """Errors of the planner against runs of scalewise, in a paragraph per GPU."""
    paths = sorted(records.glob("*/gpu.json"))
    return "\n\n".join(_fill_marks(gpu_accuracy.accuracy_sentence(path, compose)) for path in paths)


def _percent(error: float) -> str:
    return f"{error:.2%}" if error >= 5e-5 else "less than 0.01%"


def _error_text(errors: dict[str, Any]) -> str:
    return (
        f"{errors['median']:.1%} at the median and {errors['p90']:.0%} at the 90th percentile "
        f"({errors['rows']} measurements)"
    )


def _status_text(statuses: dict[str, int]) -> str:
    return ", ".join(f"`{name}` {count} times" for name, count in statuses.items())


def overhead_figures(records: Path) -> str:
    """Step times of two CPU ranks next to hand-written loops and over a slow link."""
    parallel, slow = (
        _read_record(records / "cpu" / f"{name}.json") for name in ("parallel", "slow_link")
    )
    machine = parallel["machine"]
    steps = " and ".join(
        "{median:.2f} ({low:.2f} to {high:.2f}) with {name}".format(name=name, **result["ratio"])
        for name, result in parallel["layouts"].items()
    )
    start = parallel["launch_s"]["median"]
    links = "; ".join(_link_text(name, result) for name, result in slow["layouts"].items())
    return _fill_marks(
        f"On {machine['cores']} cores ({machine['processor']}, {parallel['date'][:10]}, torch "
        f"{parallel['versions']['torch']}) the step time relative to a hand-written loop is "
        f"{steps}. Two ranks start in {start:.2f} s from a warm forkserver. Step times on the "
        f"loopback interface and on a link of {slow['mbit']:g} Mbit/s: {links}. The gloo backend "
        "implements reduce-scatter by an all-reduce, so fsdp sends more than predicted."
    )


def startup_figures(records: Path) -> str:
    """Duration of a sweep's job next to that of a fresh process."""
    record = _read_record(records / "cpu" / "sweep.json")
    ratio, fresh, warm = record["ratio"], record["fresh_s"]["median"], record["warm_s"]["median"]
    return _fill_marks(
        f"On {record['machine']['cores']} cores ({record['date'][:10]}) a job of {record['steps']} "
        f"steps takes {warm:.2f} s in a sweep, in a process of its own, and {fresh:.1f} s as a "
        f"fresh `python -m scalewise`: a ratio of {ratio['median']:.3f} ({ratio['low']:.3f} to "
        f"{ratio['high']:.3f} over {ratio['pairs']} pairs)."
    )


PARAGRAPHS = {
    "prediction": prediction_figure,
    "overhead": overhead_figure,
    "equality": equality_figure,
    "started": startup_figures,
    "measured": overhead_figures,
    "memory_accuracy": memory_figures,
    "planned": planner_figures,
    "gpu": suite_table.gpu_section,
    "comparison": suite_table.comparison_section,
    "answers": lab_record.answers_text,
}
"""Functions that write the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""


def _fill_marks(text: str) -> str:
    hanging = "  " if text.startswith("- ") else ""
    return fill(
        text, WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent=hanging
    )


def _link_text(name: str, result: dict[str, Any]) -> str:
    times = f"{name} {1000 * result['open_s']:.0f} and {1000 * result['slow_s']:.0f} ms"
    if result["predicted_s"] is None:
        return f"{times}, sending {result['sent_bytes'] / MEGA:.1f} MB"
    return (
        f"{times} (predicted {1000 * result['predicted_s']:.0f}), sending "
        f"{result['sent_bytes'] / MEGA:.1f} MB (predicted {result['declared_bytes'] / MEGA:.1f})"
    )


def _read_record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content
