"""Files as the internet has them: each becomes the right pixels or one line that names it, soon, and leaves nothing
open."""

import os
import struct
import threading
import traceback
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.data.prompt import MediaSource
from megarl.errors import MediaError
from megarl.media.load import load_item
from megarl.media.options import MediaOptions, VideoOptions
from tests.media.files import (
    encoded,
    moving_frames,
    noise,
    png_chunk,
    png_header,
    turned,
    write_clip,
    write_sound,
)

SECONDS = 30
"""Far more than any file here takes on a busy machine, far less than a hang."""

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


def load(processor, source, options=None):
    """The item or the error, on a thread that is given up after a while; no handle stays open."""
    outcome = []

    def work():
        try:
            outcome.append(load_item(processor, source, options or MediaOptions()))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            outcome.append(error)

    before = sorted(os.listdir("/proc/self/fd"))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), f"still busy after {SECONDS} s"
    assert sorted(os.listdir("/proc/self/fd")) == before
    return outcome[0]


def assert_refused(processor, source, reason):
    error = load(processor, source)
    assert type(error) is MediaError, error
    assert str(error) == f"{source.name}: {error.reason}"
    assert reason in error.reason and "\n" not in str(error) and str(error).isprintable()


# pictures

PNG, JPEG = encoded(noise(40, 32), "PNG"), encoded(noise(40, 32), "JPEG")
GIF, WEBP = encoded(noise(40, 32), "GIF"), encoded(noise(40, 32), "WEBP")
BMP, TIFF = encoded(noise(40, 32), "BMP"), encoded(noise(40, 32), "TIFF")
RANDOM = np.random.default_rng(0).bytes(5000)
SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
HTML = b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"
BOMB = zlib.compress(bytes(1 << 27))
PLAYLIST = b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n"
NOT_A_PICTURE, BROKEN, LARGE = "not a picture", "cannot be decoded", "declares"

BAD_PICTURES = {
    "zero bytes": (b"", NOT_A_PICTURE),
    "text": (b"a picture of a cat\n", NOT_A_PICTURE),
    "html": (HTML, NOT_A_PICTURE),
    "svg that names a file": (SVG, NOT_A_PICTURE),
    "pdf": (b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\ntrailer\n<<>>\n%%EOF\n", NOT_A_PICTURE),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NOT_A_PICTURE),
    "ico": (encoded(noise(16, 16), "ICO"), NOT_A_PICTURE),
    "random bytes": (RANDOM, NOT_A_PICTURE),
    "playlist": (PLAYLIST, NOT_A_PICTURE),
    "start of an mp4": (b"\0\0\0\x20ftypisom" + RANDOM, NOT_A_PICTURE),
    "png signature and noise": (PNG[:8] + RANDOM, ""),
    "a quarter of a png": (PNG[: len(PNG) // 4], BROKEN),
    "png but the last tenth": (PNG[: len(PNG) * 9 // 10], BROKEN),
    "png with a hole": (PNG[:500] + bytes(300) + PNG[800:], BROKEN),
    "jpeg of ten bytes": (JPEG[:10], ""),
    "half a jpeg": (JPEG[: len(JPEG) // 2], BROKEN),
    "jpeg but its last bytes": (JPEG[:-40], BROKEN),
    "half a gif": (GIF[: len(GIF) // 2], BROKEN),
    "half a webp": (WEBP[: len(WEBP) // 2], ""),
    "half a bmp": (BMP[: len(BMP) // 2], BROKEN),
    "half a tiff": (TIFF[: len(TIFF) // 2], ""),
    "png of a terapixel": (png_header(1_000_000, 1_000_000), LARGE),
    "png just above the bound": (png_header(9460, 9460), LARGE),
    "gif of 65535 squared": (GIF[:6] + b"\xff\xff\xff\xff" + GIF[10:], ""),
    "bmp of 2 ** 30 squared": (BMP[:18] + struct.pack("<ii", 1 << 30, 1 << 30) + BMP[26:], LARGE),
    "png with no pixels": (png_header(16, 16), BROKEN),
    "png of width zero": (png_header(0, 16), ""),
    "png with a text bomb": (
        png_header(16, 16, png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27)))),
        "",
    ),
    "tiff that points at itself": (b"II*\0\x08\0\0\0" + b"\0\0\x08\0\0\0" * 9, ""),
    "tiff of noise": (b"II*\0\x08\0\0\0" + RANDOM, ""),
    "floats without a range": (encoded(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"), "32-bit samples"),
    "a line of pixels": (encoded(noise(401, 1), "PNG"), "401 x 1 pixels refused"),
    "a column of pixels": (encoded(noise(2, 2000), "PNG"), "2 x 2000 pixels refused"),
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("name", BAD_PICTURES)
def test_bad_pictures(tmp_path, tiny, name):
    data, reason = BAD_PICTURES[name]
    (tmp_path / "a.png").write_bytes(data)
    assert_refused(tiny, MediaSource("image", "a.png", path=tmp_path / "a.png"), reason)
    assert_refused(tiny, MediaSource("image", "row 3, image 1", data=data), reason)


def rotated(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(noise(40, 32), "PNG", exif=exif)


def on_white(rgba):
    alpha = rgba[..., 3:].astype(float) / 255
    return np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def palette():
    image = noise(40, 32).quantize(16)
    seen = np.array(image.convert("RGB"))
    seen[np.array(image) == 3] = 255
    return encoded(image, "PNG", transparency=3), seen


def animated(format, **options):
    first, second = (noise(40, 32, seed=seed) for seed in (1, 2))
    return encoded(first, format, save_all=True, append_images=[second], duration=100, **options), np.array(first)


SIXTEEN = np.random.default_rng(0).integers(0, 65536, (32, 40), dtype=np.uint16)
CMYK = encoded(noise(40, 32, "CMYK"), "TIFF")
RGB, RGBA, GREY = (np.array(noise(40, 32, mode)) for mode in ("RGB", "RGBA", "L"))
UPRIGHT = [
    lambda a: a,
    lambda a: a[:, ::-1],
    lambda a: a[::-1, ::-1],
    lambda a: a[::-1],
    lambda a: a.transpose(1, 0, 2),
    lambda a: a.transpose(1, 0, 2)[:, ::-1],
    lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    lambda a: a.transpose(1, 0, 2)[::-1],
]
ODD_PICTURES = {
    "png called jpg": (PNG, RGB),
    "one pixel": (encoded(noise(1, 1), "PNG"), np.array(noise(1, 1))),
    "one row": (encoded(noise(200, 1), "PNG"), np.array(noise(200, 1))),
    "png and rubbish behind it": (PNG + RANDOM, RGB),
    "16-bit png": (encoded(Image.fromarray(SIXTEEN), "PNG"), np.stack([SIXTEEN >> 8] * 3, -1).astype(np.uint8)),
    "16-bit tiff": (encoded(Image.fromarray(SIXTEEN), "TIFF"), np.stack([SIXTEEN >> 8] * 3, -1).astype(np.uint8)),
    "grey": (encoded(noise(40, 32, "L"), "PNG"), np.stack([GREY[..., 0] if GREY.ndim == 3 else GREY] * 3, -1)),
    "palette with a transparent colour": palette(),
    "transparency": (encoded(noise(40, 32, "RGBA"), "PNG"), on_white(RGBA)),
    "animated png": animated("PNG"),
    "animated webp": animated("WEBP", lossless=True),
} | {f"exif {value}": (rotated(value), upright(RGB)) for value, upright in enumerate(UPRIGHT, 1)}


@pytest.mark.parametrize("name", ODD_PICTURES)
def test_odd_pictures(tmp_path, tiny, name):
    data, expected = ODD_PICTURES[name]
    (tmp_path / "a.jpg").write_bytes(data)
    item = load(tiny, MediaSource("image", "a.jpg", path=tmp_path / "a.jpg"))
    reference = tiny.image_processor(images=[Image.fromarray(np.ascontiguousarray(expected))], return_tensors="pt")
    assert list(item.grid) == reference["image_grid_thw"][0].tolist()
    # half a level of 255, normalised, where the blending of transparency rounds another way
    tolerance = 0.009 if name == "transparency" else 0
    torch.testing.assert_close(item.pixels, reference["pixel_values"], atol=tolerance, rtol=0)


def test_cmyk(tiny):
    """Ink: red is 255 - cyan - black, and so on."""
    ink = np.zeros((32, 40, 4), np.uint8)
    ink[..., 0], ink[..., 3] = np.arange(40) * 3, np.arange(32)[:, None] * 3
    image = Image.frombytes("CMYK", (40, 32), ink.tobytes())
    item = load(tiny, MediaSource("image", "a", data=encoded(image, "JPEG", quality=100)))
    light = (255 - ink[..., :3].astype(int)) * (255 - ink[..., 3:].astype(int)) // 255
    reference = tiny.image_processor(images=[Image.fromarray(light.astype(np.uint8))], return_tensors="pt")
    torch.testing.assert_close(item.pixels, reference["pixel_values"], atol=0.06, rtol=0)


# videos

NOT_A_VIDEO, CUT = "not a video", "cut off"


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Encoded videos by name, to be spoiled."""
    folder = tmp_path_factory.mktemp("clips")
    frames = moving_frames(30)
    paths = {
        "mp4": write_clip(folder / "a.mp4", frames),
        "moov first": write_clip(folder / "b.mp4", frames, muxer={"movflags": "faststart"}),
        "fragments": write_clip(folder / "c.mp4", frames, muxer={"movflags": "frag_keyframe+empty_moov"}, g="10"),
        "webm": write_clip(folder / "a.webm", frames, audio=True),
        "vp8": write_clip(folder / "b.webm", frames, codec="libvpx"),
        "mkv": write_clip(folder / "a.mkv", frames),
        "gif": write_clip(folder / "a.gif", frames, 10),
        "avi": write_clip(folder / "a.avi", frames, codec="mjpeg"),
        "ts": write_clip(folder / "a.ts", frames),
        "flv": write_clip(folder / "a.flv", frames),
        "mpeg2": write_clip(folder / "d.mkv", frames, codec="mpeg2video"),
        "wide": write_clip(folder / "e.mp4", moving_frames(2, 8, 2048)),
        "specks": write_clip(folder / "b.gif", moving_frames(3, 4, 4), 10),
        "sound": write_sound(folder / "a.m4a"),
        "sound in mp4": write_sound(folder / "f.mp4"),
    }
    return {name: path.read_bytes() for name, path in paths.items()}


def part(name, fraction):
    return lambda clips: clips[name][: int(len(clips[name]) * fraction)]


def spoiled(name, old, new):
    def make(clips):
        assert old in clips[name]
        return clips[name].replace(old, new)

    return make


def larger_vp8(clips):
    """The key frame declares 16383 squared."""
    place = clips["vp8"].index(b"\x9d\x01\x2a") + 3
    return clips["vp8"][:place] + b"\xff\x3f\xff\x3f" + clips["vp8"][place + 4 :]


def larger_jpegs(clips):
    """Every frame of the Motion JPEG declares 65500 squared."""
    return clips["avi"].replace(b"\x08" + struct.pack(">HH", 32, 48), b"\x08" + struct.pack(">HH", 65500, 65500))


def holes(name):
    def make(clips):
        data = bytearray(clips[name])
        middle = len(data) // 2
        data[middle : middle + len(data) // 5] = bytes(len(data) // 5)
        return bytes(data)

    return make


BAD_VIDEOS = {
    "zero bytes": (b"", "has no bytes"),
    "one byte": (b"\0", NOT_A_VIDEO),
    "text": (b"a video of a cat\n", NOT_A_VIDEO),
    "html": (HTML, NOT_A_VIDEO),
    "playlist": (PLAYLIST, NOT_A_VIDEO),
    "concat script": (b"ffconcat version 1.0\nfile '/etc/passwd'\n", NOT_A_VIDEO),
    "sdp": (b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n", NOT_A_VIDEO),
    "dash manifest": (b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"/>', NOT_A_VIDEO),
    "random bytes": (RANDOM, NOT_A_VIDEO),
    "png": (PNG, NOT_A_VIDEO),
    "jpeg": (JPEG, NOT_A_VIDEO),
    "avif": (encoded(noise(32, 32), "AVIF"), NOT_A_VIDEO),
    "transport stream": (part("ts", 1), NOT_A_VIDEO),
    "flash": (part("flv", 1), NOT_A_VIDEO),
    "mpeg-2": (part("mpeg2", 1), "is encoded with mpeg2video"),
    "mp4 head and noise": (b"\0\0\0\x20ftypisom" + RANDOM, ""),
    "webm head and noise": (b"\x1a\x45\xdf\xa3" + RANDOM, ""),
    "gif head and noise": (b"GIF89a" + RANDOM, ""),
    "avi head and noise": (b"RIFF\xff\xff\0\0AVI " + RANDOM, ""),
    "boxes of no size": (b"\0\0\0\x08free" * 500, ""),
    "mp4, a third": (part("mp4", 1 / 3), CUT),
    "mp4 but the last byte": (lambda clips: clips["mp4"][:-1], CUT),
    "moov first, half": (part("moov first", 0.6), CUT),
    "moov first, all but the last bytes": (lambda clips: clips["moov first"][:-9], CUT),
    "fragments, half": (part("fragments", 0.5), CUT),
    "webm, head alone": (part("webm", 0.05), CUT),
    "webm, half": (part("webm", 0.5), CUT),
    "webm, nine tenths": (part("webm", 0.9), CUT),
    "mkv, half": (part("mkv", 0.5), CUT),
    "gif, half": (part("gif", 0.5), CUT),
    "gif but its trailer": (lambda clips: clips["gif"][:-1], CUT),
    "avi, half": (part("avi", 0.5), CUT),
    "mp4 with a hole": (holes("moov first"), ""),
    "webm with a hole": (holes("webm"), ""),
    "gif with a hole": (holes("gif"), ""),
    "mp4 without a decoder's set-up": (spoiled("mp4", b"avcC", b"xxxx"), ""),
    "mp4 with an unknown codec": (spoiled("mp4", b"avc1\0\0", b"zzzz\0\0"), "unknown codec"),
    "mp4 without samples": (spoiled("mp4", b"stsz", b"xxxx"), ""),
    "gif of 65535 squared": (lambda clips: clips["gif"][:6] + b"\xff\xff\xff\xff" + clips["gif"][10:], ""),
    "vp8 of 16383 squared": (larger_vp8, ""),
    "jpegs of 65500 squared": (larger_jpegs, ""),
    "sound alone": (part("sound", 1), "has no video stream"),
    "sound alone in an mp4": (part("sound in mp4", 1), "has no video stream"),
    "very wide": (part("wide", 1), "2 frames of 2048 x 8 pixels refused"),
    "smaller than a media token": (part("specks", 1), "3 frames of 4 x 4 pixels refused"),
}


@pytest.mark.parametrize("name", BAD_VIDEOS)
def test_bad_videos(tmp_path, tiny, clips, name):
    data, reason = BAD_VIDEOS[name]
    data = data(clips) if callable(data) else data
    (tmp_path / "a.mp4").write_bytes(data)
    assert_refused(tiny, MediaSource("video", "a.mp4", path=tmp_path / "a.mp4"), reason)
    assert_refused(tiny, MediaSource("video", "row 3, video 1", data=data), reason)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("what", ["nothing", "folder", "pipe"])
def test_what_is_no_file(tmp_path, tiny, kind, what):
    path = tmp_path / "a"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    assert_refused(tiny, MediaSource(kind, "a", path=path), "no such file")


EVERY_FRAME = MediaOptions(video=VideoOptions(fps=1000, min_frames=1, max_frames=1000))
ODD_VIDEOS = {
    "one frame": dict(total=1, suffix=".mkv"),
    "three frames": dict(total=3, suffix=".mp4"),
    "seven frames": dict(total=7, suffix=".mkv"),
    "odd height and width": dict(total=4, suffix=".mkv", height=33, width=47),
    "variable frame rate": dict(total=5, suffix=".mkv", timestamps=(0, 0.01, 0.5, 2, 7)),
    "starts at an hour": dict(total=3, suffix=".mkv", timestamps=(3600, 3600.5, 3601)),
    "with sound": dict(total=4, suffix=".mp4", audio=True),
    "in fragments": dict(total=9, suffix=".mp4", muxer={"movflags": "frag_keyframe+empty_moov"}),
    "a live recording, without sizes": dict(total=9, suffix=".mkv", muxer={"live": "1"}),
    "turned": dict(total=3, suffix=".mp4", turn=True),
    "called png": dict(total=3, suffix=".mov", name="a.png"),
}


@pytest.mark.parametrize("case", ODD_VIDEOS)
def test_odd_videos(tmp_path, tiny, case):
    values = dict(ODD_VIDEOS[case])
    height, width = values.pop("height", 32), values.pop("width", 48)
    pixels = moving_frames(values.pop("total"), height, width)
    turn, name = values.pop("turn", False), values.pop("name", "video")
    path = write_clip(tmp_path / f"a{values.pop('suffix')}", pixels, 10, "libx264rgb", **values)
    data = path.read_bytes()
    if turn:
        data, pixels = turned(data, (0, 1, -1, 0)), np.rot90(pixels, -1, (1, 2)).copy()
    item = load(tiny, MediaSource("video", name, data=data), EVERY_FRAME)
    frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    reference = tiny.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    assert torch.equal(item.pixels, reference["pixel_values_videos"])
    assert list(item.grid) == reference["video_grid_thw"][0].tolist() and item.name == name
    shown = values.get("timestamps") or [0.1 * index for index in range(len(pixels))]
    np.testing.assert_allclose(item.timestamps, np.subtract(shown, shown[0]), atol=1e-9)


def test_an_animated_gif_is_a_video_over_white(tmp_path, tiny):
    """Each frame changes a part of the picture; the rest of the first stays transparent."""
    pictures = []
    for place in range(4):
        picture = Image.new("RGBA", (48, 32))
        picture.paste((255, 0, 0, 255), (place * 8, 0, place * 8 + 8, 16))
        pictures.append(picture)
    data = encoded(
        pictures[0], "GIF", save_all=True, append_images=pictures[1:], duration=[100, 300, 100, 100], disposal=2
    )
    item = load(tiny, MediaSource("video", "a.gif", data=data), EVERY_FRAME)
    over_white = [on_white(np.array(picture)) for picture in pictures]
    frames = torch.from_numpy(np.stack(over_white)).permute(0, 3, 1, 2).contiguous()
    reference = tiny.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    assert torch.equal(item.pixels, reference["pixel_values_videos"])
    assert item.timestamps == (0.0, 0.1, 0.4, 0.5)
