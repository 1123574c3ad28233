"""Pictures: from the bytes of a file to the patches that a vision tower takes."""

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from megarl.errors import MediaError
from megarl.media.item import MediaItem

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""What is decoded, whatever the file is called.  Pillow reads more, but starts other programs for some."""

MAX_PIXELS = 89_478_485
"""Width times height, as the file declares them.  Pillow warns beyond it; here it is an error."""


def load_image(path: Path) -> Image.Image:
    """Decode a picture to 8-bit RGB, upright, and in full.

    The EXIF orientation is applied, transparency lies over white, 16-bit samples keep their upper byte, and
    an animation gives its first frame.

    Raises:
        MediaError: no file, nothing that is decoded here (`FORMATS`), damaged, or larger than `MAX_PIXELS`.
    """
    if not path.is_file():
        raise MediaError(path, "no such file")
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_size(path, image)
            return _to_rgb(path, ImageOps.exif_transpose(image))
    except MediaError:
        raise
    except Image.UnidentifiedImageError as error:
        raise MediaError(path, f"not a picture in any of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # hostile bytes make decoders raise anything, from struct.error to SyntaxError
        raise MediaError(path, f"cannot be decoded: {type(error).__name__}: {error}") from error


def _check_size(path: Path, image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise MediaError(path, f"declares {image.width} x {image.height} pixels, more than {MAX_PIXELS}")


def _to_rgb(path: Path, image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise MediaError(path, f"32-bit samples (mode {image.mode}) have no known range: save it with 8 or 16 bits")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def prepare_image(image: Image.Image, image_processor: Any, path: Path) -> MediaItem:
    """Resize, normalise and cut an RGB picture into patches.

    `image_processor` is Qwen2-VL's, with the torchvision backend that `AutoProcessor` loads: it is
    deterministic, cheaper than the Pillow backend on large pictures, and what transformers itself runs, so
    that pixels can be compared with a reference bit for bit.

    Raises:
        MediaError: the processor refuses the picture, for example for an aspect ratio above 200.
    """
    try:
        prepared = image_processor(images=[image], return_tensors="pt")
    except ValueError as error:
        raise MediaError(path, f"{image.width} x {image.height} pixels refused: {error}") from error
    pixels = prepared["pixel_values"].to(torch.float32).contiguous()
    t, h, w = prepared["image_grid_thw"][0].tolist()
    return MediaItem("image", pixels, (t, h, w), _digest("image", (t, h, w), pixels), str(path))


def _digest(kind: str, grid: tuple[int, int, int], pixels: torch.Tensor) -> bytes:
    digest = hashlib.sha256(kind.encode() + struct.pack("<3q", *grid))
    digest.update(pixels.numpy())
    return digest.digest()
