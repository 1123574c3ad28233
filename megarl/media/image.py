"""Pictures: from encoded bytes to the patches that a vision tower takes."""

import hashlib
import io
import struct
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps

from megarl.data.prompt import Kind, MediaSource
from megarl.errors import MediaError, of_this_machine
from megarl.media.item import MediaItem
from megarl.media.options import ImageOptions, VideoOptions

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""What is decoded, whatever the file is called.  Pillow reads more, but starts other programs for some."""

MAX_PIXELS = 89_478_485
"""Width times height, as the file declares them.  Pillow warns beyond it; here it is an error."""

_AS_IT_IS = ImageOptions()


def load_image(source: MediaSource) -> Image.Image:
    """Decode a picture to 8-bit RGB, upright, and in full.

    The EXIF orientation is applied, transparency lies over white, 16-bit samples keep their upper byte, and
    an animation gives its first frame.

    Raises:
        MediaError: no file, nothing that is decoded here (`FORMATS`), damaged, or larger than `MAX_PIXELS`.
    """
    name = source.name
    try:
        with open_source(source) as stream, Image.open(stream, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise MediaError(name, f"declares {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            return _to_rgb(name, ImageOps.exif_transpose(image))
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(name, f"declares more than {MAX_PIXELS} pixels: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise MediaError(name, f"not a picture in any of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # hostile bytes make decoders raise anything, from struct.error to SyntaxError
        if of_this_machine(error):
            raise
        raise MediaError(name, f"cannot be decoded: {type(error).__name__}: {error}") from error


def open_source(source: MediaSource) -> BinaryIO:
    """The encoded bytes, as a file that can be rewound.

    Raises:
        MediaError: no such file, or it cannot be opened.
    """
    if source.data is not None:
        return io.BytesIO(source.data)
    if source.path is None or not source.path.is_file():  # a pipe would be waited for
        raise MediaError(source.name, "no such file")
    try:
        return source.path.open("rb")
    except OSError as error:
        if of_this_machine(error):
            raise
        raise MediaError(source.name, f"cannot be opened: {error.strerror}") from error


def _to_rgb(name: str, image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise MediaError(name, f"32-bit samples (mode {image.mode}) have no known range: save it with 8 or 16 bits")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def prepare_image(image: Image.Image, image_processor: Any, name: str, options: ImageOptions = _AS_IT_IS) -> MediaItem:
    """Resize, normalise and cut an RGB picture into patches.

    `image_processor` is Qwen2-VL's, with the torchvision backend that `AutoProcessor` loads: it is
    deterministic, cheaper than the Pillow backend on large pictures, and what transformers itself runs, so
    that pixels can be compared with a reference bit for bit.

    Raises:
        MediaError: the processor refuses the picture, for example for an aspect ratio above 200.
    """
    try:
        prepared = image_processor(
            images=[image],
            input_data_format="channels_first",  # else pictures of 1 or 3 pixels' width are guessed at, aloud
            return_tensors="pt",
            **size_arguments(options),
        )
    except ValueError as error:
        raise MediaError(name, f"{image.width} x {image.height} pixels refused: {error}") from error
    pixels, grids = prepared["pixel_values"], prepared["image_grid_thw"]
    return prepared_item(
        "image", pixels, grids, np.asarray(image), preparation_of("image", image_processor, options), name
    )


def size_arguments(options: ImageOptions | VideoOptions) -> dict[str, dict[str, int]]:
    """Arguments of a processor's call that bound an item's pixels; none where the options leave that to it."""
    if options.min_pixels is None or options.max_pixels is None:
        return {}
    # pixel counts, in spite of the names
    return {"size": {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}}


def prepared_item(
    kind: Kind,
    pixels: torch.Tensor,
    grids: torch.Tensor,
    decoded: np.ndarray,
    preparation: bytes,
    name: str,
    timestamps: tuple[float, ...] = (),
) -> MediaItem:
    """An item from what a processor made of it, its `pixel_values` and its `grid_thw`, int64 `[1, 3]`; from what was
    decoded, uint8; and from how it was prepared (`preparation_of`)."""
    t, h, w = grids[0].tolist()
    # Of what was decoded, not of what was prepared: that is a quarter of the bytes or less, and to hash those would
    # take as long as to decode them.
    digest = hashlib.sha256(preparation + struct.pack("<7q", t, h, w, *decoded.shape, *[0] * (4 - decoded.ndim)))
    digest.update(np.ascontiguousarray(decoded))
    return MediaItem(kind, pixels.to(torch.float32).contiguous(), (t, h, w), digest.digest(), name, timestamps)


@lru_cache(maxsize=8)
def preparation_of(kind: Kind, processor: Any, options: ImageOptions | VideoOptions) -> bytes:
    """32 bytes that are equal where equal frames become equal patches.  Asked once: a processor must not change."""
    return hashlib.sha256(f"{kind} {options} {processor.to_json_string()}".encode()).digest()
