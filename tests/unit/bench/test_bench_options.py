"""Options of ``scalewise bench``: accepted and rejected before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalewise.bench import collectives, options, slow_link
from scalewise.bench.link_fit import CollectiveSample
from scalewise.cli import main
from scalewise.errors import ConfigError
from scalewise.parallelism.collective import CollectiveKind


def test_bench_separates_options_from_overrides() -> None:
    bench_options, overrides = options.split_options(
        ["ranks=4", "hardware=cpu", "record=true", "seconds=0.5"], collectives.CollectivesOptions
    )
    assert bench_options == collectives.CollectivesOptions(ranks=4, record=True, seconds=0.5)
    assert overrides == ["hardware=cpu"]


def test_bench_suggests_a_similar_option() -> None:
    with pytest.raises(ConfigError, match="rank=2: no such key; did you mean ranks"):
        options.split_options(["rank=2", "seed=1"], collectives.CollectivesOptions)


def test_bench_plots_times_without_a_fitted_link() -> None:
    samples = [CollectiveSample(CollectiveKind.send, 2, size, 1e-3) for size in (1024, 4096)]
    chart = collectives.collectives_chart(samples, None).to_dict()
    (rows,) = chart["datasets"].values()
    assert {row["source"] for row in rows} == {"measured"}
    assert "noise hides the link" in chart["title"]["text"]


def test_bench_reports_all_invalid_options() -> None:
    with pytest.raises(ConfigError) as excinfo:
        options.split_options(["ranks=x", "record=1"], collectives.CollectivesOptions)
    assert [str(issue) for issue in excinfo.value.issues] == [
        "ranks=x: is not an integer",
        "record=1: is not true or false",
    ]


def test_bench_sizes_end_at_the_largest() -> None:
    assert list(collectives.message_sizes(64 * 2**20)) == [1024 * 4**power for power in range(9)]
    assert list(collectives.message_sizes(20_000)) == [1024, 4096, 16384]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("", "no benchmark given; scalewise bench all|collectives"),
        ("colective", "unknown benchmark 'colective'"),
        ("collectives -m", "-m is not supported"),
        ("collectives ranks=1", "ranks=1: must be 2 or more"),
        ("collectives ranks=1000", "ranks=1000: exceeds the maximum of"),
        ("collectives largest_kib=4", "too few sizes"),
        ("collectives seconds=-1", "seconds=-1.0: must be positive"),
        ("collectives record=true", "record=true: requires the folder experiments/records"),
        ("collectives modle=x", "did you mean model?"),
        ("parallel pairs=0", "pairs=0: must be positive"),
        (
            "parallel precision=bf16_mixed",
            "precision=bf16_mixed: is not supported: the hand-written loop",
        ),
        ("parallel trainer.global_batch=64", "one micro-batch per step"),
        ("slow_link mbit=-1", "mbit=-1.0: must be positive"),
    ],
)
def test_bench_rejects_invalid_arguments(
    overrides: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *overrides.split(), *(["hardware=cpu"] if "=" in overrides else [])]) == 2
    assert message in capsys.readouterr().err
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_bench_slow_link_reports_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert slow_link.missing_requirement() == "network namespaces require root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert slow_link.missing_requirement() == "ip is missing: apt-get install iproute2"
