"""The compatibility matrix is what runs: each cell trains for two steps or is refused before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from fixtures import matrix
from fixtures.jobs import Job
from fixtures.matrix import Cell

CELLS = [
    pytest.param(
        cell,
        id=f"{cell.layout}-{cell.option}",
        marks=() if cell.usual else pytest.mark.exhaustive,
    )
    for cell in matrix.cells()
]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[Cell, str]]:
    """Collects the cells; writes record and page where ``SCALEWISE_RECORD`` asks for it.

    What did not run this time (``-k`` the name of a new option) stays as it was recorded.
    """
    collected: dict[Cell, str] = {}
    yield collected
    if os.environ.get("SCALEWISE_RECORD"):
        known = matrix.recorded() | collected
        ordered = {cell: known[cell] for cell in matrix.cells()}
        head = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
        keys = {f"{c.layout} | {c.group} | {c.option}": said for c, said in ordered.items()}
        record = {"command": matrix.MAKE, **head, "cells": keys}
        matrix.RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        matrix.PAGE.write_text(matrix.page(ordered, head), "utf-8")


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_runs_or_is_refused(
    cell: Cell, found: dict[Cell, str], tmp_path: Path, shared_cache: Path
) -> None:
    refusal = cell.refusal()
    if refusal is None:
        Job(tmp_path, shared_cache).of(*cell.overrides)
    found[cell] = refusal or matrix.RUNS
