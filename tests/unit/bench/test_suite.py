"""Suites of benchmark cases: selection, time limit, failures and resumption."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scalewise.bench import suite, suite_table
from scalewise.bench.suite import CaseError, Entry, Suite, SuiteOptions
from scalewise.bench.suite_table import Aim
from scalewise.bench.training_case import WARM_UP_STEPS, TrainingCase
from scalewise.config.compose import compose
from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.hardware import DeviceKind
from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class FakeCase:
    """Case that returns a number, or raises."""

    name: str
    error: BaseException | None = None
    seconds: float = 1.0
    overrides: tuple[str, ...] = ()
    calls: list[Path] = field(default_factory=list)

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        self.calls.append(folder)
        if self.error:
            raise self.error
        return {"number": len(self.calls)}

    def describe(self, entry: Entry) -> str:
        return f"number {entry['number']}"


AIM = Aim("number, at least", 1.0, lambda entries: entries["a/1"].get("number"))


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "source_hash", lambda package: "code")


def run_suite(
    cases: Sequence[Any], folder: Path, recorded: Any = None, **options: Any
) -> list[dict[str, Any]]:
    """Records of a suite after each case."""
    table = Suite(cases, (AIM,) if cases[0].name == "a/1" else (), lambda entries: [*entries])
    results = table.iter_results(
        SuiteOptions(**options), compose, ["hardware=cpu"], folder, recorded or {}
    )
    return [json.loads(json.dumps(result)) for result in results]


def test_failing_case_is_recorded_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        FakeCase("a/1"),
        FakeCase("a/2", ValueError("wrong")),
        FakeCase("a/3", MemoryError("out of memory")),
        FakeCase("a/4", CaseError("skipped", "does not fit", ["line"])),
        FakeCase("b/1", overrides=("optimizer.lr=-1",)),
        FakeCase("b/2"),
    ]
    *partial, last = run_suite(cases, tmp_path)
    assert [len(record["cases"]) for record in partial] == [1, 2, 3, 4, 5, 6]
    statuses = {name: entry["status"] for name, entry in last["cases"].items()}
    assert statuses == {
        "a/1": "ok",
        "a/2": "failed",
        "a/3": "out_of_memory",
        "a/4": "skipped",
        "b/1": "refused",
        "b/2": "ok",
    }
    assert "wrong" in last["cases"]["a/2"]["reason"]
    assert "ValueError: wrong" in last["cases"]["a/2"]["log_tail"][-1]
    assert last["cases"]["a/4"]["log_tail"] == ["line"]
    assert "optimizer.lr" in last["cases"]["b/1"]["reason"]
    assert last["cases"]["a/1"]["overrides"] == ["hardware=cpu"]
    assert last["aims"] == [{"aim": "number, at least", "bound": 1.0, "figure": 1, "reached": True}]
    assert cases[0].calls == [tmp_path / "a/1"]
    out = capsys.readouterr().out
    assert "s] 2/6 a/2: about 1 s" in out
    assert re.search(r"ok in \d+ s: number 1", out)
    assert "| number, at least |" in out


def test_recorded_cases_are_skipped_until_the_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [FakeCase("a/1"), FakeCase("a/2", ValueError("wrong"))]

    def calls() -> list[int]:
        return [len(case.calls) for case in cases]

    recorded = run_suite(cases, tmp_path)[-1]["cases"]
    assert calls() == [1, 1]
    assert run_suite(cases, tmp_path, recorded)[-1]["cases"] == recorded
    assert calls() == [1, 1]
    run_suite(cases, tmp_path, recorded, rerun=True)
    assert calls() == [2, 2]
    monkeypatch.setattr(suite, "source_hash", lambda package: "other code")
    run_suite(cases, tmp_path, recorded, changed=False)
    assert calls() == [2, 3]  # the successful case is kept
    run_suite(cases, tmp_path, recorded)
    assert calls() == [3, 4]
    monkeypatch.setattr(suite, "source_hash", lambda package: "code")
    other_overrides = {name: {**entry, "overrides": []} for name, entry in recorded.items()}
    run_suite(cases, tmp_path, other_overrides)
    assert calls() == [4, 5]


def test_cases_that_exceed_the_time_limit_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [FakeCase("a/1", seconds=20), FakeCase("a/2", seconds=90), FakeCase("a/3", seconds=30)]
    last = run_suite(cases, tmp_path, minutes=1.0)[-1]
    assert [*last["cases"]] == ["a/1", "a/3"]
    assert "a/2: not started, about 90 s exceed the time limit" in capsys.readouterr().out


def test_cases_are_selected_by_patterns() -> None:
    cases = [FakeCase(name) for name in ("a/1", "a/2", "b/1")]
    assert [case.name for case in suite.select_cases(cases, "b/*,a/2")] == ["a/2", "b/1"]
    with pytest.raises(ConfigError, match=r"cases=c/\*: matches no case; use names of a/1, a/2"):
        suite.select_cases(cases, "a/*,c/*")


def test_interrupted_case_ends_the_suite(tmp_path: Path) -> None:
    cases = [FakeCase("a/1"), FakeCase("a/2", Interrupted(15, "SIGTERM")), FakeCase("a/3")]
    with pytest.raises(Interrupted):
        run_suite(cases, tmp_path)
    assert cases[2].calls == []


def test_case_is_stopped_after_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowCase(FakeCase):
        def measure(self, run: RunConfig, folder: Path) -> Entry:
            time.sleep(30)
            return {}

    monkeypatch.setattr(suite, "MIN_TIMEOUT_SECONDS", 0.2)
    last = run_suite([SlowCase("s/1", seconds=0.01)], tmp_path)[-1]
    assert last["cases"]["s/1"]["status"] == "timeout"
    assert "stopped after 0 s" in last["cases"]["s/1"]["reason"]


def test_unusable_device_ends_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.compiler.reset", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setattr("torch.cuda.synchronize", fail)
    with pytest.raises(ScalewiseError, match=r"cannot be used after a/1 \(CUDA error"):
        run_suite([FakeCase("a/1"), FakeCase("a/2")], tmp_path)


def test_suite_requires_its_device(tmp_path: Path) -> None:
    gpu_suite = Suite([FakeCase("a/1")], (), lambda entries: [], DeviceKind.cuda)
    with pytest.raises(ConfigError, match="hardware=cpu: requires cuda"):
        list(gpu_suite.iter_results(SuiteOptions(), compose, ["hardware=cpu"], tmp_path, {}))


TINY = (
    *("data=synthetic", "data.sequence=16", "model.layers=1", "model.width=32", "model.heads=2"),
    *("model.vocabulary=64", "tracking=none", "checkpoint=none", "schedule.warmup_steps=1"),
    *("trainer.validate_every=null", "trainer.micro_batch=2", "trainer.log_every=100"),
)


def test_training_case_measures_time_and_memory_next_to_the_plan(tmp_path: Path) -> None:
    steps = WARM_UP_STEPS + 2
    cases = [
        TrainingCase("t/ok", 9, (*TINY, f"trainer.max_steps={steps}")),
        TrainingCase("t/unfit", 9, (*TINY, "hardware.memory_gib=0.0001")),
        TrainingCase("t/failed", 9, (*TINY, "+inject=raise", "callbacks.inject.step=1")),
    ]
    last = run_suite(cases, tmp_path)[-1]["cases"]
    entry = last["t/ok"]
    assert entry["status"] == "ok", entry
    assert entry["step_s"]["steps"] == 2
    assert 0 < entry["step_s"]["low"] <= entry["step_s"]["median"] <= entry["step_s"]["high"]
    assert entry["tokens_per_s"] == pytest.approx(32 / entry["step_s"]["median"])
    assert entry["peak_error"] == entry["planned_peak_bytes"] / entry["peak_bytes"] - 1
    assert abs(entry["peak_error"]) < 0.2
    assert 0 < entry["data_share"] < 1
    assert entry["loss"] == pytest.approx(4.16, abs=0.5)
    assert not (tmp_path / "t" / "ok").exists()
    assert last["t/unfit"]["status"] == "skipped"
    assert "does not fit" in last["t/unfit"]["reason"]
    assert last["t/failed"]["status"] == "failed"
    assert (tmp_path / "t" / "failed" / "status.json").is_file()
    header, _, *rows = suite_table.training_table(last)
    assert len(rows) == 3
    assert {row.count("|") for row in rows} == {header.count("|")}
    assert "skipped" in rows[1]


def test_gpu_section_shows_all_records(tmp_path: Path) -> None:
    assert "`scalewise bench gpu` writes one" in suite_table.gpu_section(tmp_path)
    entry = {"status": "failed", "device": "NVIDIA H100", "torch": "2.11.0"}
    content = {
        "date": "2026-12-01T00:00:00",
        "cases": {
            "mfu_1b/block": entry,
            "checkpoint/sync": {
                **entry,
                "status": "ok",
                "figure": 0.5,
                "low": 0.4,
                "high": 0.6,
                "unit": "of x",
            },
        },
        "aims": [AIM.evaluate({"a/1": {"number": 0.5}})],
    }
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "gpu.json").write_text(json.dumps(content))
    section = suite_table.gpu_section(tmp_path)
    assert "NVIDIA H100, torch 2.11.0, 2026-12-01" in section
    assert "| mfu_1b/block | failed |" in section
    assert "| checkpoint/sync |  0.500 | 0.400 to 0.600 | of x |" in section
    assert "| number, at least |   1 |    0.500 |      no |" in section


def test_source_hash_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    package = tmp_path / "src" / "package"
    (package / "part").mkdir(parents=True)
    (tmp_path / "conf").mkdir()
    hashes = []
    for path in (package / "part" / "a.py", tmp_path / "conf" / "b.yaml"):
        for text in ("1", "2"):
            path.write_text(text)
            hashes.append(suite.source_hash(package))
    assert len({*hashes}) == 4
