import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.data.prompt import MediaSource
from megarl.errors import MediaError
from megarl.media.image import MAX_PIXELS, load_image, prepare_image
from megarl.media.options import ImageOptions
from tests.media.files import encoded, noise, png_header

RED, WHITE = (255, 0, 0), (255, 255, 255)


def load(folder: Path, data: bytes, name: str = "picture.png") -> Image.Image:
    (folder / name).write_bytes(data)
    image = load_image(MediaSource("image", name, path=folder / name))
    assert image.mode == "RGB"
    return image


PNG, JPEG = encoded(noise(32, 32), "PNG"), encoded(noise(32, 32), "JPEG")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "data",
    [b"", b"a text file\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", PNG[:8], PNG[:20]]
    + [PNG[:-200], PNG[: len(PNG) // 2], JPEG[:20], JPEG[: len(JPEG) // 2]]
    + [PNG[:100] + bytes(200) + PNG[300:], png_header(16, 16), png_header(0, 16)]
    + [png_header(1_000_000, 1_000_000), b"GIF89a" + bytes(20), b"II*\0" + b"\xff" * 30],
    ids=["zero bytes", "text", "eps", "png signature", "png head", "png tail missing", "half a png"]
    + ["jpeg head", "half a jpeg", "png with a hole", "no pixels in the png", "width 0"]
    + ["a terapixel declared", "empty gif", "broken tiff"],
)
def test_what_cannot_be_decoded_is_one_line_that_names_the_file(tmp_path, data):
    with pytest.raises(MediaError) as error:
        load(tmp_path, data)
    assert str(error.value) == f"picture.png: {error.value.reason}"
    assert error.value.reason and "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_size_at_which_pillow_only_warns_is_an_error(tmp_path):
    with pytest.raises(MediaError, match=f"declares 10000 x 10000 pixels, more than {MAX_PIXELS}"):
        load(tmp_path, png_header(10_000, 10_000))


@pytest.mark.parametrize("name", ["absent.png", "folder.png", ""])
def test_what_is_not_a_file(tmp_path, name):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(MediaError, match="no such file"):
        load_image(MediaSource("image", "a", path=tmp_path / name))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(MediaError, match="^a: no such file"):
        load_image(MediaSource("image", "a", path=tmp_path / "pipe.png"))


def test_a_picture_in_the_row_itself():
    image = noise(32, 32)
    decoded = load_image(MediaSource("image", "row 7, image 1", data=encoded(image, "PNG")))
    assert decoded.tobytes() == image.tobytes()
    with pytest.raises(MediaError, match="^row 7, image 1: cannot be decoded"):
        load_image(MediaSource("image", "row 7, image 1", data=PNG[:100]))


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(MediaError("a.png", "two\nlines")))
    assert (error.name, error.reason, str(error)) == ("a.png", "two lines", "a.png: two lines")


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "JPEG", "AVIF"])
def test_the_content_counts_not_the_suffix(tmp_path, format):
    image = load(tmp_path, encoded(Image.new("RGB", (8, 6), RED), format), "picture.txt")
    assert image.size == (8, 6)
    np.testing.assert_allclose(image.getpixel((4, 3)), RED, atol=12)


def test_transparency_lies_over_white(tmp_path):
    rgba = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 0))
    image = load(tmp_path, encoded(rgba, "PNG"))
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [RED, WHITE]
    half = load(tmp_path, encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 128)), "PNG"))
    assert half.getpixel((0, 0)) == (127, 127, 127)
    grey = load(tmp_path, encoded(Image.new("LA", (1, 1), (0, 0)), "PNG"))
    assert grey.getpixel((0, 0)) == WHITE


def test_palettes(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    image = load(tmp_path, encoded(palette, "PNG"))
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [RED, (0, 0, 255)]
    image = load(tmp_path, encoded(palette, "PNG", transparency=1))
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [RED, WHITE]


def test_cmyk_grey_and_bilevel(tmp_path):
    cmyk = load(tmp_path, encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100))
    np.testing.assert_allclose(cmyk.getpixel((4, 4)), RED, atol=3)
    assert load(tmp_path, encoded(Image.new("L", (1, 1), 77), "PNG")).getpixel((0, 0)) == (77, 77, 77)
    assert load(tmp_path, encoded(Image.new("1", (1, 1), 1), "PNG")).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_upper_byte(tmp_path, format):
    samples = np.array([[0, 255, 256, 0x1234, 65535]], dtype=np.uint16)
    image = load(tmp_path, encoded(Image.fromarray(samples), format))
    assert [image.getpixel((x, 0))[0] for x in range(5)] == [0, 0, 1, 0x12, 255]


@pytest.mark.parametrize("samples", [np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32)])
def test_samples_without_a_range_are_refused(tmp_path, samples):
    with pytest.raises(MediaError, match="32-bit samples"):
        load(tmp_path, encoded(Image.fromarray(samples), "TIFF"))


def test_exif_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (16, 8), WHITE)
    image.paste(RED, (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    upright = load(tmp_path, encoded(image, "JPEG", exif=exif, quality=100))
    assert upright.size == (8, 16)
    np.testing.assert_allclose(upright.getpixel((4, 2)), RED, atol=12)
    np.testing.assert_allclose(upright.getpixel((4, 14)), WHITE, atol=12)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation(tmp_path, format):
    first, second = Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), (0, 0, 255))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second], duration=100, **options)
    assert load(tmp_path, data).getpixel((1, 1)) == RED


def test_prepared_pixels_are_those_of_transformers(tiny):
    image = noise(40, 24)
    item = prepare_image(image, tiny.image_processor, "a.png")
    expected = tiny.image_processor(images=[image], return_tensors="pt")
    assert torch.equal(item.pixels, expected["pixel_values"])
    assert item.pixels.dtype == torch.float32 and item.pixels.is_contiguous()
    assert list(item.grid) == expected["image_grid_thw"][0].tolist() == [1, 6, 10]
    assert item.pixels.shape == (60, 3 * 2 * 4 * 4) and item.feature_count(2) == 15
    assert (item.kind, item.name) == ("image", "a.png")


def test_the_options_bound_the_pixels(tiny):
    def grid(options):
        item = prepare_image(noise(64, 64), tiny.image_processor, "a.png", options)
        expected = tiny.image_processor(images=[noise(64, 64)], return_tensors="pt", **bounds)
        assert torch.equal(item.pixels, expected["pixel_values"])
        return item.grid

    bounds = {}
    assert grid(ImageOptions()) == (1, 8, 8), "as the processor has it"
    bounds = {"min_pixels": 64, "max_pixels": 300}
    assert grid(ImageOptions(64, 300)) == (1, 4, 4)
    bounds = {"min_pixels": 10_000, "max_pixels": 20_000}
    assert grid(ImageOptions(10_000, 20_000)) == (1, 26, 26)


def test_the_digest_is_of_what_was_decoded_and_how_it_was_prepared(tiny):
    def digest(image, path="a.png", options=None):
        return prepare_image(image, tiny.image_processor, path, options or ImageOptions()).digest

    image = noise(16, 16)
    changed = image.copy()
    changed.putpixel((0, 0), tuple(255 - value for value in image.getpixel((0, 0))))
    black_wide, black_tall = Image.new("RGB", (32, 8)), Image.new("RGB", (8, 32))
    assert len(digest(image)) == 32
    assert digest(image) == digest(image.copy(), "b.png")
    assert digest(image) != digest(changed)
    assert digest(image) != digest(image, options=ImageOptions(min_pixels=64, max_pixels=64))
    assert digest(black_wide) != digest(black_tall), "the same bytes in another grid"


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 200), (200, 1), (3, 1)])
def test_the_smallest_pictures_are_prepared(tiny, size):
    item = prepare_image(noise(*size), tiny.image_processor, "a.png")
    assert len(item.pixels) == item.grid[1] * item.grid[2]


@pytest.mark.parametrize("size", [(1, 201), (3000, 2)])
def test_an_extreme_aspect_ratio_is_a_media_error(tiny, size):
    with pytest.raises(MediaError, match=f"a.png: {size[0]} x {size[1]} pixels refused: .*aspect ratio"):
        prepare_image(noise(*size), tiny.image_processor, "a.png")
