"""The table of transformers architectures in docs/models.md equals the table that tests run."""

from __future__ import annotations

import os

from fixtures.documentation import ROOT
from fixtures.hf_architectures import ARCHITECTURES, REJECTED, TRAINED, Kind

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- architectures -->", "<!-- /architectures -->"
KINDS = {
    Kind.dense: "dense and equal",
    Kind.window: "with windows of attention",
    Kind.experts: "with experts",
    Kind.unequal: "experts after dense blocks",
    Kind.vision_language: "language model of a vision-language model",
}


def join(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def render_table() -> str:
    """Return the table as Markdown."""
    trained = {name: ARCHITECTURES[name] for name in TRAINED}
    rows = [
        (title, join([name for name, each in trained.items() if each.kind is kind]))
        for kind, title in KINDS.items()
    ]
    rows += [
        ("of these, with `tensor`", join([it for it, each in trained.items() if each.has_tp_plan])),
        (
            "of these, without `data.packing`",
            join([name for name, each in trained.items() if not each.packs_texts]),
        ),
        (
            "rejected",
            "; ".join(f"`{name}`: {ARCHITECTURES[name].rejection}" for name in REJECTED),
        ),
    ]
    return "\n".join(
        ["| blocks | `model_type` |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    )


def test_documented_architectures_equal_the_tested_ones() -> None:
    """``SCALEWISE_RECORD=1`` writes the table."""
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    table, _, tail = rest.partition(END)
    if os.environ.get("SCALEWISE_RECORD"):
        table = f"\n{render_table()}\n"
        PAGE.write_text(head + BEGIN + table + END + tail, "utf-8")
    assert table.strip() == render_table()


def test_at_least_25_architectures_train() -> None:
    assert len(TRAINED) >= 25
