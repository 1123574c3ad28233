"""Media files made on the spot."""

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

CODECS = {".gif": "gif", ".webm": "libvpx-vp9", ".avi": "mpeg4"}
"""An encoder by suffix; the others get `libx264`."""
PIXELS = {"libx264rgb": "rgb24", "gif": "rgb8", "mjpeg": "yuvj420p", "prores": "yuv422p10le"}
"""Pixel formats by encoder; the others get `yuv420p`."""
OPTIONS = {
    "libx264rgb": {"qp": "0"},
    "libx265": {"x265-params": "log-level=none"},  # not for frames below 64 x 64: it corrupts its heap
}
BLOCK = 8


def write_clip(
    path: Path,
    frames: np.ndarray,
    rate: float | Fraction = 30,
    codec: str | None = None,
    timestamps: Sequence[float] | None = None,
    audio: bool = False,
    muxer: dict[str, str] | None = None,
    **options: str,
) -> Path:
    """A video file of uint8 `[n, h, w, 3]`; the container goes by the suffix.

    `codec="libx264rgb"` (mp4, mov, mkv) keeps every pixel as it is.  `timestamps` are the presentation times in
    seconds, rounded to milliseconds; without them frame i is shown at i / rate.  `audio` adds a second stream with
    a tone of the same duration.  `muxer` has options of the container, `options` those of the encoder.
    """
    codec = codec or CODECS.get(path.suffix, "libx264")
    rate = Fraction(rate).limit_denominator(1001)
    options = OPTIONS.get(codec, {}) | options
    with av.open(str(path), "w", options=muxer or {}) as container:
        video = container.add_stream(codec, rate=rate, options=options)
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt = PIXELS.get(codec, "yuv420p")
        base = Fraction(1, 1000) if timestamps is not None else 1 / rate
        video.codec_context.time_base = base
        sound = container.add_stream("libopus" if path.suffix == ".webm" else "aac", rate=48000) if audio else None
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = index if timestamps is None else round(timestamps[index] * 1000)
            frame.time_base = base
            container.mux(video.encode(frame))
        if sound is not None:
            container.mux(sound.encode(_tone(len(frames) / rate)))
            container.mux(sound.encode())
        container.mux(video.encode())
    return path


def remux(path: Path, copy: Path, change: Callable[[int, bytes], bytes | None]) -> Path:
    """The packets of a video in another file of the same kind; `change` gives the bytes of packet i, or drops it."""
    with av.open(str(path)) as container, av.open(str(copy), "w") as output:
        video = container.streams.video[0]
        stream = output.add_stream_from_template(video)
        for index, packet in enumerate(packet for packet in container.demux(video) if packet.size):
            if (data := change(index, bytes(packet))) is not None:
                changed = av.Packet(data)
                changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
                changed.is_keyframe, changed.stream = packet.is_keyframe, stream
                output.mux(changed)
    return copy


def write_sound(path: Path) -> Path:
    """A file with one second of sound and no picture."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=48000)
        container.mux(sound.encode(_tone(Fraction(1))))
        container.mux(sound.encode())
    return path


def _tone(seconds: Fraction) -> av.AudioFrame:
    samples = np.sin(np.arange(int(48000 * seconds)) / 20, dtype=np.float32)[None] / 4
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
    frame.rate, frame.pts = 48000, 0
    return frame


def numbered_frames(total: int, height: int = 32, width: int = 48) -> np.ndarray:
    """uint8 `[total, height, width, 3]`: frame i has the bits of i as white blocks on black, which survive codecs."""
    frames = np.zeros((total, height, width, 3), np.uint8)
    blocks = [(y, x) for y in range(0, height, BLOCK) for x in range(0, width, BLOCK)]
    for bit, (y, x) in enumerate(blocks[:12]):
        frames[np.arange(total) >> bit & 1 == 1, y : y + BLOCK, x : x + BLOCK] = 255
    return frames


def read_numbers(frames) -> list[int]:
    """The numbers in decoded frames, `[n, 3, h, w]`."""
    rows = np.asarray(frames)[:, 0, BLOCK // 2 :: BLOCK, BLOCK // 2 :: BLOCK] > 127
    return [int(sum(int(white) << bit for bit, white in enumerate(row.ravel()[:12]))) for row in rows]


def moving_frames(total: int, height: int = 32, width: int = 48, seed: int = 0) -> np.ndarray:
    """uint8 `[total, height, width, 3]`: coarse noise that moves, every frame another; nothing is symmetric."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    whole = blocks.repeat(4, 0).repeat(4, 1)[:height, :width]
    return np.stack([np.roll(whole, 3 * index, 1) for index in range(total)])


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    shape = (height, width, len(Image.new(mode, (1, 1)).getbands()))
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.frombytes(mode, (width, height), pixels.tobytes())


def encoded(image: Image.Image, format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def png_header(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG that declares a size and has one byte of data, after `chunks`."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = png_chunk(b"IDAT", zlib.compress(b"\0"))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *chunks, data, png_chunk(b"IEND", b"")])


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def turned(mp4: bytes, matrix: Sequence[float]) -> bytes:
    """The MP4 with another display matrix, (a, b, c, d): a point (x, y) is shown at (ax + cy, bx + dy)."""
    a, b, c, d = (round(value * 65536) for value in matrix)
    place = mp4.index(b"tkhd") + 44
    return mp4[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + mp4[place + 36 :]
