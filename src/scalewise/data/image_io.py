"""Pictures in files: arrays of NumPy's, and what Pillow reads.

Shapes: C colours, H rows and W columns of pixels.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
"""As Pillow calls those that are read: none of them starts a program. Portable pixmaps are PPM."""
MAX_PIXELS = 89_478_485
"""Pixels of the largest picture that is read, the limit of Pillow; bounds memory."""
CURE = "pip install 'scalewise[images]', or give arrays of NumPy's (.npy)"


def read_image(path: Path) -> NDArray[np.uint8]:
    """Returns ``pixels_CHW``: red, green and blue, bytes; raises ``ValueError`` with what is wrong.

    Arrays are ``pixels_HWC`` or ``pixels_HW`` of bytes; other pictures stand as their camera did.
    """
    try:
        pixels = _read_npy(path) if path.suffix.lower() == ".npy" else _read_picture(path)
    except (OSError, EOFError) as error:
        raise ValueError(f"names a picture that cannot be read: {path.name} ({error})") from error
    except ValueError as error:
        raise ValueError(f"names what is no picture: {path.name} ({error})") from error
    except ImportError as error:
        reason = f"names a picture that needs Pillow, which is not installed: {path.name}"
        raise ValueError(f"{reason} ({CURE})") from error
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        shape = "x".join(map(str, pixels.shape))
        raise ValueError(f"names {shape} of {pixels.dtype}, not HxWx3 of uint8: {path.name}")
    if not pixels.size:
        raise ValueError(f"names a picture without pixels: {path.name}")
    height, width, _ = pixels.shape
    return np.broadcast_to(pixels, (height, width, 3)).transpose(2, 0, 1)


def _read_npy(path: Path) -> NDArray[np.generic]:
    found: object = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(found, np.ndarray):
        raise ValueError("several arrays in one file")
    if math.prod(found.shape[:2]) > MAX_PIXELS:
        raise OSError(f"more than {MAX_PIXELS:,} pixels")
    return found


def _read_picture(path: Path) -> NDArray[np.generic]:
    from PIL import Image, ImageOps  # of an extra

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path, formats=FORMATS)
        with image as opened:
            if opened.mode.startswith(("I", "F")):
                raise ValueError("its numbers are not of one byte")
            upright = ImageOps.exif_transpose(opened)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
            return np.asarray(upright.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise OSError(f"more than {MAX_PIXELS:,} pixels") from error
    except SyntaxError as error:  # of a header that is none
        raise ValueError(str(error)) from error


def resize_image(pixels_CHW: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Returns the same picture as a square, bicubic and smoothed, as CLIP's are made."""
    import torch
    from torch.nn import functional as F

    if pixels_CHW.shape[1:] == (side, side):
        return pixels_CHW
    given_1CHW = torch.from_numpy(np.ascontiguousarray(pixels_CHW))[None]
    # Of bytes, as Pillow has it to a number or two.
    return F.interpolate(given_1CHW, (side, side), mode="bicubic", antialias=True)[0].numpy()
