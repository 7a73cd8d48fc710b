"""Fixtures of the tests of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fixtures.images import random_pixels
from PIL import Image


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Folder with one picture in several file formats, and other pictures."""
    np.save(tmp_path / "a.npy", random_pixels())
    (tmp_path / "a.ppm").write_bytes(b"P6 # made here\n4 4\n255\n" + random_pixels().tobytes())
    Image.fromarray(random_pixels()).save(tmp_path / "a.png")
    Image.fromarray(random_pixels()).save(tmp_path / "a.webp", lossless=True)
    (tmp_path / "grey.pgm").write_bytes(b"P5\n4 2\n15\n" + bytes(range(8)))
    np.save(tmp_path / "wide.npy", random_pixels(8, 1)[:4])
    return tmp_path
