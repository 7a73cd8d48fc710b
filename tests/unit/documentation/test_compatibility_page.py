"""The recorded compatibility matrix, its page and the validation rules agree."""

from __future__ import annotations

import json

import pytest
from fixtures import compatibility_matrix
from fixtures.compatibility_matrix import Cell


def test_matrix_record_has_every_cell() -> None:
    """Fails after an option is added until its cells are recorded."""
    assert list(compatibility_matrix.load_record()) == list(compatibility_matrix.cells()), (
        f"run `{compatibility_matrix.MAKE_COMMAND}`"
    )


def test_matrix_page_equals_the_record() -> None:
    head = json.loads(compatibility_matrix.RECORD.read_text("utf-8"))
    assert compatibility_matrix.PAGE.read_text("utf-8") == compatibility_matrix.render_page(
        compatibility_matrix.load_record(), head
    )


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if index % 5 == 0 else pytest.mark.exhaustive)
        for index, cell in enumerate(compatibility_matrix.cells())
    ],
    ids=lambda cell: f"{cell.strategy}-{cell.option}",
)
def test_matrix_record_equals_current_rejections(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ctypes.util.find_library", lambda name: name
    )  # everything is installed there
    assert (cell.rejection() or compatibility_matrix.RUNS) == compatibility_matrix.load_record()[
        cell
    ]


def test_matrix_rejections_have_fixes() -> None:
    rejections = {
        rejection
        for rejection in compatibility_matrix.load_record().values()
        if rejection != compatibility_matrix.RUNS
    }
    assert rejections
    assert all(": set " in rejection or ": pip " in rejection for rejection in rejections)
