"""Image files: formats, orientation, color modes and rejections."""

from __future__ import annotations

import os
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from fixtures.images import random_pixels
from numpy.lib.format import open_memmap
from PIL import ExifTags, Image

from scalewise.data import image_io


def test_image_formats_decode_equally(pictures: Path) -> None:
    expected_CHW = random_pixels().transpose(2, 0, 1)
    for name in ("a.npy", "a.ppm", "a.png", "a.webp"):
        assert np.array_equal(image_io.read_image(pictures / name), expected_CHW), name
    grey_CHW = image_io.read_image(pictures / "grey.pgm")
    assert grey_CHW.shape == (3, 2, 4)
    assert (grey_CHW == np.arange(8).reshape(2, 4) * 17).all()


def test_image_orientation_is_applied(tmp_path: Path) -> None:
    bright_HW3 = np.zeros((16, 32, 3), np.uint8)
    bright_HW3[:, :16] = 200  # the left half
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # rotated clockwise by 90 degrees
    Image.fromarray(bright_HW3).save(tmp_path / "a.JPG", exif=exif, quality=95)
    actual_CHW = image_io.read_image(tmp_path / "a.JPG")
    assert actual_CHW.shape == (3, 32, 16)
    assert actual_CHW[:, :12].min() > 190
    assert actual_CHW[:, 20:].max() < 10


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_image_modes_convert_to_rgb(mode: str, tmp_path: Path) -> None:
    white_image, name = Image.new("RGB", (4, 2), "white"), "a.jpg" if mode == "CMYK" else "a.png"
    white_image.convert(mode).save(tmp_path / name)
    assert (image_io.read_image(tmp_path / name) == np.full((3, 2, 4), 255)).all()


def test_image_without_pillow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    np.save(tmp_path / "a.npy", random_pixels())
    image_io.read_image(tmp_path / "a.npy")
    with pytest.raises(ValueError, match=r"requires Pillow.*pip install 'scalewise\[images\]'"):
        image_io.read_image(tmp_path / "a.jpg")


def test_image_formats_start_no_program(tmp_path: Path) -> None:
    (tmp_path / "a.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n")
    with pytest.raises(ValueError, match="cannot identify"):
        image_io.read_image(tmp_path / "a.eps")


def _png() -> bytes:
    buffer = BytesIO()
    Image.fromarray(random_pixels(16)).save(buffer, "PNG")
    return buffer.getvalue()


PNG = _png()


INVALID_IMAGES = {
    "empty.png": (b"", "cannot identify"),
    "none.png": (None, "cannot be read"),
    "cut.png": (PNG[: len(PNG) // 2], "cannot be read"),
    "none.npy": (None, "cannot be read"),
    "half.npy": (b"\x93NUMPY", "not an image|cannot be read"),
    "float.npy": (np.zeros((2, 2, 3)), "an image of 2x2x3 float64"),
    "deep.npy": (np.zeros((2, 2, 4), np.uint8), "an image of 2x2x4 uint8"),
    "pickled.npy": (np.array([{}], dtype=object), "has a file that is not an image"),
    "empty.npy": (np.zeros((0, 2, 3), np.uint8), "without pixels"),
    "short.ppm": (b"P6 2 2 255\n123", "has a file that is not an image|cannot be read"),
    "wide.pgm": (b"P5 1 1 65535\n12", "more than 8 bits per channel"),
}


@pytest.mark.parametrize("name", INVALID_IMAGES)
def test_file_that_is_no_image_is_rejected(name: str, tmp_path: Path) -> None:
    content, reason = INVALID_IMAGES[name]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content, allow_pickle=True)
    with pytest.raises(ValueError, match=reason):
        image_io.read_image(tmp_path / name)


@pytest.mark.parametrize("side", [9_500, 13_304, 20_000])
def test_image_with_too_many_pixels_is_rejected(side: int, tmp_path: Path) -> None:
    Image.new("1", (side, side)).save(tmp_path / "a.png")
    open_memmap(tmp_path / "a.npy", mode="w+", dtype=np.uint8, shape=(side, side, 3))
    for name in ("a.png", "a.npy"):
        with pytest.raises(ValueError, match=f"{name} .more than 89,478,485 pixels"):
            image_io.read_image(tmp_path / name)


def test_array_archive_is_rejected_as_image(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", one=random_pixels())
    (tmp_path / "a.npz").rename(tmp_path / "a.NPY")
    with pytest.raises(
        ValueError, match=r"has a file that is not an image: a\.NPY .it contains several arrays"
    ):
        image_io.read_image(tmp_path / "a.NPY")


@pytest.mark.parametrize("name", ["pipe.npy", "pipe.png"])
def test_fifo_is_rejected_as_image(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"has an image that cannot be read: .*is a FIFO"):
        image_io.read_image(path)
