"""Comparison of published measurements with plans: skipped rows and the tables of errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from fixtures.published_rows import ROW, profiles

from scalewise.bench import (
    compare_published,
    published_rows,
)
from scalewise.bench.compare_published import RowPrediction
from scalewise.cli import main
from scalewise.errors import ConfigError
from scalewise.planner.fit_check import FitStatus

ROOT = Path(__file__).parents[3]


def test_choices_compare_layouts_of_the_same_task() -> None:
    def prediction(task: str, predicted: float, measured: float) -> RowPrediction:
        return RowPrediction(
            "lab/tool",
            "stack",
            None,
            (predicted, measured),
            FitStatus.fits,
            fit_in_memory=True,
            task=(task,),
        )

    rows = [prediction("a", 90, 80), prediction("a", 100, 60), prediction("a", 10, 70)]
    rows += [prediction("b", 50, 40), prediction("b", 30, 20), prediction("c", 10, 10)]
    assert compare_published._relative_speeds_of_choices(rows) == [0.75, 1.0]


def test_interval_coverage_uses_other_sources() -> None:
    wide, narrow = [1.0 + 0.01 * index for index in range(101)], [1.5, 1.5, 3.0]
    assert compare_published._interval_coverage({"wide": wide, "narrow": narrow}) == (
        pytest.approx((sum(1.5 <= ratio <= 3.0 for ratio in wide) + 2) / 104)
    )
    assert compare_published._interval_coverage({"only": wide}) is None


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"layers": "32.5"}, "layers=32.5 is not a count"),
        ({"hidden": "-4096"}, "hidden=-4096 is not a count"),
        ({"hidden": "1e300"}, "hidden=1e300 is not a count"),
        ({"heads": "7"}, "model.width=4096: is not divisible by model.heads=7"),
        ({"tp": "3", "world": "8"}, "world=8 is not dp x fsdp x tp x pp x cp"),
        ({"peak_mem_GiB": "nan"}, "peak_mem_GiB=nan is not a measurement"),
        ({"tokens_per_s_per_gpu": "0"}, "tokens_per_s_per_gpu=0 is not a measurement"),
        ({"optimizer": "muon"}, "optimizer=muon is not supported: its state size is unknown"),
        ({"precision": "fp9"}, "precision=fp9 is not supported"),
        ({"act_ckpt": "weird"}, "act_ckpt=weird is not one of"),
        ({"act_ckpt": "selective-block"}, "act_ckpt=selective-block is not one of"),
        ({"quant": "gptq"}, "quant=gptq is not one of"),
        ({"quant": "bnb.nf4-x"}, "quant=bnb.nf4-x is not one of"),
        ({"compile": "yes"}, "compile=yes is not one of 0, 1"),
        ({"params_B": "8B"}, "params_B=8B is not a number of billions"),
        ({"params_B": "0"}, "params_B=0 is not a number of billions"),
        ({"peft": "adapter_v2"}, "peft=adapter_v2 is not one of lora, qlora, ia3"),
        ({"zero_stage": "4"}, "zero_stage=4 is not one of 0, 1, 2, 3"),
        ({"offload": "optimizer"}, "offload=optimizer is not supported"),
        ({"params_B": "70"}, "params_B=70: the model of the row has"),
        ({"gpu": "TPU"}, "gpu=TPU: is an unknown device"),
        ({"gpu": ""}, "gpu is missing"),
        ({"seq": ""}, "seq is missing"),
    ],
)
def test_published_invalid_row_is_skipped_with_a_reason(
    cells: dict[str, str], reason: str, tmp_path: Path
) -> None:
    valid_row, invalid_row = (
        {"world": "", "offload": "", "params_B": "", "compile": "", **ROW},
        {"world": "", "offload": "", "params_B": "", "compile": "", **ROW, **cells},
    )
    with (tmp_path / "rows.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, list(valid_row))
        table.writeheader()
        table.writerows([valid_row, invalid_row, dict.fromkeys(valid_row, "")])
    predictions, issues = compare_published._predict_rows(tmp_path / "rows.csv", profiles())
    assert len(predictions) == 1
    (issue,) = issues
    assert reason in issue


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a;b\n1;2\n", "lacks the columns source, gpu"),
        (b"\xff\xfe\x00", "is not a CSV file in UTF-8"),
        (b"", "lacks the columns"),
    ],
)
def test_published_file_without_table_is_rejected(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        published_rows.read_rows(tmp_path / "rows.csv")


def test_published_out_of_memory_row_has_no_peak(tmp_path: Path) -> None:
    oom = compare_published.predict_row(
        ROW | {"peak_mem_GiB": "OOM", "tokens_per_s_per_gpu": ""}, profiles()
    )
    assert oom.memory is None
    assert not oom.fit_in_memory


def predictions(ratios: list[float], stack: str) -> list[RowPrediction]:
    return [
        RowPrediction(
            "lab/tool", stack, (10 * r, 10), (100 * r, 100), FitStatus.fits, fit_in_memory=True
        )
        for r in ratios
    ]


def test_published_scale_per_framework_removes_common_bias() -> None:
    rows = [*predictions([2.0, 2.0, 2.2], "a"), *predictions([0.5, 0.5], "b")]
    rates = compare_published._group_ratios(rows, lambda p: p.stack, lambda p: p.throughput)
    unscaled, scaled = (
        compare_published._group_errors(rates),
        compare_published._group_errors(rates, compare_published._scale_by_group(rates)),
    )
    assert unscaled["a"]["median"] == pytest.approx(1.0)
    assert (scaled["a"]["scale"], scaled["a"]["median"]) == (2.0, 0.0)
    assert scaled["a"]["worst"] == pytest.approx(0.1)
    assert (scaled["b"]["scale"], scaled["all"]["rows"]) == (0.5, 5)


def test_published_scale_is_cross_validated() -> None:
    rates = {"a": [2.0, 2.0], "b": [4.0], "c": [1.0, 1.0, 3.0]}
    assert compare_published._leave_one_group_out(rates) == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert (
        compare_published._group_errors(rates, compare_published._leave_one_group_out(rates))["c"][
            "median"
        ]
        == 0.5
    )
    assert (
        compare_published._group_errors(
            {"a": [2.0]}, compare_published._leave_one_group_out({"a": [2.0]})
        )
        == {}
    )


def test_published_scale_is_used_for_unmeasured_devices() -> None:
    scale = json.loads((ROOT / "experiments/records/cpu/planner.json").read_text("utf-8"))[
        "step_scale"
    ]
    statistics = {"step_scale": "median", "step_shortest": "low", "step_longest": "high"}
    for file in (ROOT / "conf").glob("hardware/*.yaml"):
        profile = yaml.safe_load(file.read_text())
        if profile.get("device") == "cuda" and not file.stem.startswith(("h100", "h200")):
            profile_scale = {key: profile.get(key) for key in statistics}
            assert profile_scale == {
                key: round(scale[name], 2) for key, name in statistics.items()
            }, file


def test_bench_planner_reads_a_file_and_writes_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"peak_mem_GiB": "", "tokens_per_s_per_gpu": "", "micro_bs": "64", "act_ckpt": "none"}
    with Path("rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows([ROW, ROW | row])
    assert main(["bench", "planner", "--data", "rows.csv"]) == 0
    stdout = capsys.readouterr().out
    assert "fit status of runs that ran: fits 1, borderline 0, out_of_memory 0" in stdout
    failed = "runs that ran out of memory: fits 0, borderline 0, out_of_memory 1"
    assert failed in stdout
    (file,) = Path("runs").glob("bench_planner/*/planner.json")
    record = json.loads(file.read_text("utf-8"))
    assert record["rows"] == 2
    assert record["memory"]["pytorch/torchtitan"]["rows"] == 1
    assert main(["bench", "planner", "data=nope.csv"]) == 2
    assert main(["bench", "planner"]) == 2
