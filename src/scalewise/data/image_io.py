"""Reading and resizing of images: NumPy arrays, and formats that Pillow reads.

Shapes: C colors, H rows and W columns of pixels.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalewise import regular_files

PILLOW_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
"""Formats that are read, by their names in Pillow; none of them starts a program. PPM includes all
portable pixmaps."""
MAX_PIXELS = 89_478_485
"""Maximum number of pixels of an image, the limit of Pillow; bounds memory."""
PILLOW_FIX = "pip install 'scalewise[images]', or use NumPy arrays (.npy)"


def read_image(path: Path) -> NDArray[np.uint8]:
    """Return ``pixels_CHW``, RGB uint8; raises ``ValueError`` with the reason.

    Arrays are ``pixels_HWC`` or ``pixels_HW`` of uint8. Images are rotated by their EXIF
    orientation.
    """
    try:
        regular_files.check_regular(path)  # opening a FIFO would block
        pixels = _read_npy(path) if path.suffix.lower() == ".npy" else _read_with_pillow(path)
    except (OSError, EOFError) as error:
        raise ValueError(f"has an image that cannot be read: {path.name} ({error})") from error
    except ValueError as error:
        raise ValueError(f"has a file that is not an image: {path.name} ({error})") from error
    except regular_files.IrregularFileError as error:
        reason = f"has an image that cannot be read: {error.issues[0].reason}"
        raise ValueError(reason) from error
    except ImportError as error:
        reason = f"has an image that requires Pillow, which is not installed: {path.name}"
        raise ValueError(f"{reason} ({PILLOW_FIX})") from error
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        shape = "x".join(map(str, pixels.shape))
        raise ValueError(f"has an image of {shape} {pixels.dtype}, not HxWx3 uint8: {path.name}")
    if not pixels.size:
        raise ValueError(f"has an image without pixels: {path.name}")
    height, width, _ = pixels.shape
    return np.broadcast_to(pixels, (height, width, 3)).transpose(2, 0, 1)


def _read_npy(path: Path) -> NDArray[np.generic]:
    array: object = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it contains several arrays")
    if math.prod(array.shape[:2]) > MAX_PIXELS:
        raise OSError(f"more than {MAX_PIXELS:,} pixels")
    return array


def _read_with_pillow(path: Path) -> NDArray[np.generic]:
    from PIL import Image, ImageOps  # optional dependency

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path, formats=PILLOW_FORMATS)
        with image as image_file:
            if image_file.mode.startswith(("I", "F")):
                raise ValueError("its pixels have more than 8 bits per channel")
            rotated = ImageOps.exif_transpose(image_file)
            if rotated.has_transparency_data:
                rotated = rotated.convert("RGBA")
            return np.asarray(rotated.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise OSError(f"more than {MAX_PIXELS:,} pixels") from error
    except SyntaxError as error:  # Pillow raises it for an invalid header
        raise ValueError(str(error)) from error


def resize_image(pixels_CHW: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Return the image as a square: bicubic with antialiasing, as for CLIP."""
    import torch
    from torch.nn import functional as F

    if pixels_CHW.shape[1:] == (side, side):
        return pixels_CHW
    image_1CHW = torch.from_numpy(np.ascontiguousarray(pixels_CHW))[None]
    # Interpolation of uint8 differs from that of Pillow by at most two.
    return F.interpolate(image_1CHW, (side, side), mode="bicubic", antialias=True)[0].numpy()
