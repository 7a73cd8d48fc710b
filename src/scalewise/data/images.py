"""Pictures in files, without a library for them: arrays of NumPy's, and portable pixmaps.

Shapes: C colours, H rows and W columns of pixels.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEADER = re.compile(rb"(P[56])" + rb"(?:\s|#[^\n]*\n)+(\d+)" * 3 + rb"\s")
"""Of a portable pixmap or graymap (netpbm): width, height and the brightest number."""


def read(path: Path) -> NDArray[np.uint8]:
    """Returns ``pixels_CHW``: red, green and blue, bytes; raises ``ValueError`` with what is wrong.

    Arrays are ``pixels_HWC`` or ``pixels_HW`` of bytes.
    """
    kinds = {".npy": _array, ".ppm": _pixmap, ".pgm": _pixmap}
    if path.suffix not in kinds:
        known = " ".join(kinds)
        raise ValueError(f"names a picture of another kind than {known}: {path.name}")
    try:
        pixels = kinds[path.suffix](path)
    except (OSError, EOFError) as error:
        raise ValueError(f"names a picture that cannot be read: {path.name} ({error})") from error
    except ValueError as error:
        raise ValueError(f"names what is no picture: {path.name} ({error})") from error
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        shape = "x".join(map(str, pixels.shape))
        raise ValueError(f"names {shape} of {pixels.dtype}, not HxWx3 of uint8: {path.name}")
    if not pixels.size:
        raise ValueError(f"names a picture without pixels: {path.name}")
    height, width, _ = pixels.shape
    return np.broadcast_to(pixels, (height, width, 3)).transpose(2, 0, 1)


def _array(path: Path) -> NDArray[np.generic]:
    found: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def _pixmap(path: Path) -> NDArray[np.generic]:
    held = path.read_bytes()
    if (header := HEADER.match(held)) is None:
        raise ValueError("it has no header P5 or P6")
    kind, width, height, most = header[1], *map(int, header.groups()[1:])
    if not 0 < most < 256:
        raise ValueError(f"its brightest number is {most}, not of one byte")
    shape = (height, width, 3 if kind == b"P6" else 1)
    pixels = np.frombuffer(held, np.uint8, offset=header.end())
    if pixels.size < np.prod(shape):
        raise ValueError(f"it ends after {pixels.size} of {np.prod(shape)} numbers")
    pixels = pixels[: np.prod(shape)].reshape(shape)
    return pixels if most == 255 else np.rint(pixels * (255.0 / most)).clip(0, 255).astype(np.uint8)


def resized(pixels_CHW: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Returns the same picture as a square, bicubic and smoothed, as CLIP's are made."""
    import torch
    from torch.nn import functional as F

    if pixels_CHW.shape[1:] == (side, side):
        return pixels_CHW
    given_1CHW = torch.from_numpy(np.ascontiguousarray(pixels_CHW))[None]
    # Of bytes, as Pillow has it to a number or two.
    return F.interpolate(given_1CHW, (side, side), mode="bicubic", antialias=True)[0].numpy()
