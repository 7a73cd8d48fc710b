"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.checkpoints import save

from scalewise.checkpoints import manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoint of step 3."""
    path = manifest.checkpoint_path(tmp_path / "checkpoints", 3)
    save(path)
    return path
