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

SMALL = ("collectives", "largest_kib=1024", "seconds=0.02")


def test_bench_collectives_writes_record_plot_and_profile(run_cli: CliRunner) -> None:
    result = run_cli(*SMALL, command="bench").assert_ok()
    found = result.folder.json("collectives.json")
    assert found["command"] == "scalewise bench collectives largest_kib=1024 seconds=0.02"
    assert {"date", "machine", "versions", "git_commit"} < found.keys()
    sizes = [1024 * 4**power for power in range(6)]
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    assert [(s["kind"], s["bytes"]) for s in found["samples"]] == [
        (kind, size) for kind in kinds for size in sizes
    ]
    assert all(sample["seconds"] > 0 for sample in found["samples"])
    picture = (result.folder.path / "collectives.svg").read_text("utf-8")
    assert "ring model" in picture
    assert "all-to-all" in picture
    profile = yaml.safe_load((result.folder.path / "hardware" / "measured.yaml").read_text("utf-8"))
    rate, latency = found["links"]["all"]["bytes_per_s"], found["links"]["all"]["latency_s"]
    assert abs(profile["link_gb_per_s"] * 1e9 / rate - 1) < 1e-3
    assert abs(profile["link_latency_us"] - max(latency * 1e6, 1e-3)) < 1e-2 * latency * 1e6 + 1e-3
    assert not list(result.folder.path.glob(".*"))
    used = run_cli(
        "-cd", str(result.folder.path), *TINY, "hardware=measured", "--cfg", "job"
    ).assert_ok()
    assert f"link_gb_per_s: {profile['link_gb_per_s']}" in used.out


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
    small = ("model.layers=1", "model.width=32", "model.vocabulary=512", "data.sequence=32")
    result = run_cli("parallel", "pairs=3", *small, command="bench").assert_ok()
    found = result.folder.json("parallel.json")
    for strategy in ("ddp", "fsdp"):
        measured = found["layouts"][strategy]
        assert measured["loss"]["suite"] == pytest.approx(measured["loss"]["hand"], rel=1e-5), (
            strategy
        )
        assert measured["ratio"]["pairs"] == 3, strategy
        assert measured["hand_s"] > 0, strategy
    assert len(found["launch_s"]["all"]) == 5
    assert [path.name for path in result.folder.path.iterdir() if path.name[0] == "."] == []


@pytest.mark.exhaustive
def test_step_overhead_is_small_compared_with_a_plain_loop(run_cli: CliRunner) -> None:
    result = run_cli("parallel", command="bench", timeout=280).assert_ok()
    found = result.folder.json("parallel.json")
    for strategy, measured in found["layouts"].items():
        noise = max(1.0, measured["self_check"]["median"])  # two hand-written loops are alike
        assert measured["ratio"]["low"] <= BOUND * noise, (strategy, measured)
    assert min(found["launch_s"]["all"]) <= LAUNCH_BOUND


needs_a_cable = pytest.mark.skipif(
    bool(slow_link.missing_requirement()), reason=slow_link.missing_requirement()
)

TALK = """
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


@needs_a_cable
def test_throttled_link_has_the_requested_bandwidth() -> None:
    with slow_link.ThrottledLink() as cable:
        cable.limit_rate(40)
        overrides = ["ip", "netns", "exec"]
        talk = [sys.executable, "-c", TALK]
        with subprocess.Popen(
            [*overrides, cable.names[0], *talk, "0"], stdout=subprocess.PIPE, text=True
        ) as listener:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "ready\n"
            before, began = cable.read_sent_bytes(1), time.monotonic()
            subprocess.run([*overrides, cable.names[1], *talk, "1"], check=True)
            assert listener.wait(30) == 0
        seconds, sent = time.monotonic() - began, cable.read_sent_bytes(1) - before
    assert 2_000_000 < sent < 2_400_000
    assert seconds > (2_000_000 - 300_000) / (40e6 / 8)  # a burst goes through at once
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not set(cable.names) & set(listed.stdout.split())


@needs_a_cable
@pytest.mark.exhaustive
def test_slow_link_slows_the_strategy_that_sends_most(run_cli: CliRunner) -> None:
    result = run_cli("slow_link", "mbit=100", command="bench", timeout=290).assert_ok()
    found = result.folder.json("slow_link.json")["layouts"]
    ddp = found["ddp"]
    assert ddp["sent_bytes"] == pytest.approx(ddp["declared_bytes"], rel=0.05)
    assert ddp["slow_s"] == pytest.approx(ddp["predicted_s"], rel=0.3)
    assert found["powersgd"]["slow_s"] < ddp["slow_s"] < found["fsdp"]["slow_s"]


@pytest.mark.timed
def test_sweep_job_costs_a_tenth_of_a_process(run_cli: CliRunner) -> None:
    result = run_cli("sweep", "pairs=3", command="bench").assert_ok()
    found = result.folder.json("sweep.json")
    ratio = found["ratio"]
    assert ratio["pairs"] == 3
    assert ratio["low"] <= found["bounds"]["ratio"] == 0.1, found
    assert found["warm_s"]["median"] > 0
    folders = sorted(path.name for path in result.folder.path.glob("*/*"))
    assert folders == ["0", "1", "1", "2", "2", "3", "3", "first"]
