"""``scalewise bench`` at small sizes: records, rejections and interruption."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import yaml
from fixtures.cli_runner import TINY, CliRunner

from scalewise.bench import slow_link
from scalewise.bench.parallel import BOUND, LAUNCH_BOUND

SMALL_BENCH = ("collectives", "largest_kib=1024", "seconds=0.02")


def test_bench_collectives_writes_record_plot_and_profile(run_cli: CliRunner) -> None:
    result = run_cli(*SMALL_BENCH, command="bench").assert_ok()
    record = result.folder.json("collectives.json")
    assert record["command"] == "scalewise bench collectives largest_kib=1024 seconds=0.02"
    assert {"date", "machine", "versions", "git_commit"} < record.keys()
    sizes = [1024 * 4**power for power in range(6)]
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    assert [(s["kind"], s["bytes"]) for s in record["samples"]] == [
        (kind, size) for kind in kinds for size in sizes
    ]
    assert all(sample["seconds"] > 0 for sample in record["samples"])
    svg_text = (result.folder.path / "collectives.svg").read_text("utf-8")
    assert "ring model" in svg_text
    assert "all-to-all" in svg_text
    profile = yaml.safe_load((result.folder.path / "hardware" / "measured.yaml").read_text("utf-8"))
    rate, latency = record["links"]["all"]["bytes_per_s"], record["links"]["all"]["latency_s"]
    assert abs(profile["link_gb_per_s"] * 1e9 / rate - 1) < 1e-3
    assert abs(profile["link_latency_us"] - max(latency * 1e6, 1e-3)) < 1e-2 * latency * 1e6 + 1e-3
    assert not list(result.folder.path.glob(".*"))
    printed_config = run_cli(
        "-cd", str(result.folder.path), *TINY, "hardware=measured", "--cfg", "job"
    ).assert_ok()
    assert f"link_gb_per_s: {profile['link_gb_per_s']}" in printed_config.out


def test_bench_leaves_nothing_after_ctrl_c(run_cli: CliRunner) -> None:
    process = run_cli.start("collectives", "seconds=5", command="bench")
    process.wait_for_file("runs/bench_collectives/*/.ranks/1.stack")
    process.signal(signal.SIGINT)
    result = process.wait(30)
    assert result.code == 130, result.failure_report
    assert "SIGINT while measuring" in result.err
    assert "Traceback" not in result.transcript
    assert result.folders == []
    assert process.remaining_processes() == []


def test_bench_parallel_compares_equal_work(run_cli: CliRunner) -> None:
    small_model = ("model.layers=1", "model.width=32", "model.vocabulary=512", "data.sequence=32")
    result = run_cli("parallel", "pairs=3", *small_model, command="bench").assert_ok()
    record = result.folder.json("parallel.json")
    for strategy in ("ddp", "fsdp"):
        layout_record = record["layouts"][strategy]
        assert layout_record["loss"]["suite"] == pytest.approx(
            layout_record["loss"]["hand"], rel=1e-5
        ), strategy
        assert layout_record["ratio"]["pairs"] == 3, strategy
        assert layout_record["hand_s"] > 0, strategy
    assert len(record["launch_s"]["all"]) == 5
    assert [path.name for path in result.folder.path.iterdir() if path.name[0] == "."] == []


@pytest.mark.exhaustive
def test_step_overhead_is_small_compared_with_a_plain_loop(run_cli: CliRunner) -> None:
    result = run_cli("parallel", command="bench", timeout=280).assert_ok()
    record = result.folder.json("parallel.json")
    for strategy, layout_record in record["layouts"].items():
        noise = max(1.0, layout_record["self_check"]["median"])  # both loops are hand-written
        assert layout_record["ratio"]["low"] <= BOUND * noise, (strategy, layout_record)
    assert min(record["launch_s"]["all"]) <= LAUNCH_BOUND


needs_throttled_link = pytest.mark.skipif(
    bool(slow_link.missing_requirement()), reason=slow_link.missing_requirement()
)

SEND_BYTES = """
import socket, sys
end = socket.create_server(("10.77.0.1", 9)) if sys.argv[1] == "0" else None
if end is None:
    socket.create_connection(("10.77.0.1", 9)).sendall(bytes(2_000_000))
else:
    print("ready", flush=True)
    heard = end.accept()[0]
    while heard.recv(1 << 16):
        pass
"""


@needs_throttled_link
def test_throttled_link_has_the_requested_bandwidth() -> None:
    with slow_link.ThrottledLink() as link:
        link.limit_rate(40)
        overrides = ["ip", "netns", "exec"]
        send_command = [sys.executable, "-c", SEND_BYTES]
        with subprocess.Popen(
            [*overrides, link.names[0], *send_command, "0"], stdout=subprocess.PIPE, text=True
        ) as listener:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "ready\n"
            bytes_before, start_time = link.read_sent_bytes(1), time.monotonic()
            subprocess.run([*overrides, link.names[1], *send_command, "1"], check=True)
            assert listener.wait(30) == 0
        seconds, sent_bytes = time.monotonic() - start_time, link.read_sent_bytes(1) - bytes_before
    assert 2_000_000 < sent_bytes < 2_400_000
    assert seconds > (2_000_000 - 300_000) / (40e6 / 8)  # a burst passes without delay
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not set(link.names) & set(namespaces.stdout.split())


@needs_throttled_link
@pytest.mark.exhaustive
def test_slow_link_slows_the_strategy_that_sends_most(run_cli: CliRunner) -> None:
    result = run_cli("slow_link", "mbit=100", command="bench", timeout=290).assert_ok()
    record = result.folder.json("slow_link.json")["layouts"]
    ddp = record["ddp"]
    assert ddp["sent_bytes"] == pytest.approx(ddp["declared_bytes"], rel=0.05)
    assert ddp["slow_s"] == pytest.approx(ddp["predicted_s"], rel=0.3)
    assert record["powersgd"]["slow_s"] < ddp["slow_s"] < record["fsdp"]["slow_s"]


@pytest.mark.timed
def test_sweep_job_costs_a_tenth_of_a_process(run_cli: CliRunner) -> None:
    result = run_cli("sweep", "pairs=3", command="bench").assert_ok()
    record = result.folder.json("sweep.json")
    ratio = record["ratio"]
    assert ratio["pairs"] == 3
    assert ratio["low"] <= record["bounds"]["ratio"] == 0.1, record
    assert record["warm_s"]["median"] > 0
    folders = sorted(path.name for path in result.folder.path.glob("*/*"))
    assert folders == ["0", "1", "1", "2", "2", "3", "3", "first"]
