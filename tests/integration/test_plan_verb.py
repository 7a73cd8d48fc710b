"""``scalewise plan`` as a user types it."""

from __future__ import annotations

from fixtures.doors import Doors
from fixtures.layouts import LLAMA_8B


def test_what_does_not_fit_is_told_with_its_cure(scalewise: Doors) -> None:
    ended = scalewise(*LLAMA_8B, "trainer.micro_batch=8", verb="plan")
    assert ended.code == 3, ended.said
    assert "out_of_memory" in ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("scalewise train")]
    again = scalewise(*line.split()[2:], verb="plan").ok()
    assert "fits" in again.out
    assert "tok/s" in again.out
    assert not (scalewise.cwd / "runs").exists()


def test_a_grid_is_one_table(scalewise: Doors) -> None:
    axes = ("precision=fp32,bf16_mixed", "memory=none,checkpoint_full")
    rest = [part for part in LLAMA_8B if not part.startswith("precision")]
    ended = scalewise("-m", *rest, *axes, "trainer.micro_batch=1", verb="plan").ok()
    head, *rows = ended.out.splitlines()
    assert head.split()[:3] == ["precision", "memory", "verdict"]
    assert [row.split()[:2] for row in rows] == [
        [precision, memory]
        for precision in ("fp32", "bf16_mixed")
        for memory in ("none", "checkpoint_full")
    ]
    assert not (scalewise.cwd / "runs").exists()


def test_a_line_that_train_refuses_is_refused(scalewise: Doors) -> None:
    scalewise("modle=x", verb="plan").refused("did you mean model?")
    scalewise(*LLAMA_8B, "trainer.micro_batch=0", verb="plan").refused("trainer.micro_batch=0")
    assert not (scalewise.cwd / "runs").exists()
