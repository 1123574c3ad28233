import io
import json

import numpy as np
import pytest
from PIL import Image

from megarl.data.prompt import MediaSource, Prompt
from megarl.environments.zoom import TOOL, Zoom

ZOOM = Zoom()


def picture(width, height, kind="image"):
    """The red of a pixel is its column, the green its row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width), np.arange(height)[:, None]
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return {"type": kind, kind: MediaSource(kind, "p", data=stream.getvalue())}


def ask(arguments, *, name=TOOL, pictures=((200, 100),), finished=True):
    prompt = Prompt(0, 1, ({"role": "user", "content": [picture(*size) for size in pictures]},), "7", "test")
    text = json.dumps({"name": name, "arguments": arguments})
    return ZOOM.step(ZOOM.reset(prompt, 1), f"let me see <tool_call>\n{text}\n</tool_call>", finished)


def test_a_part_of_the_picture():
    """Enlarged to the area of the whole, with its own shape; coordinates are thousandths."""
    step = ask({"bbox_2d": [500, 200, 750, 700]})
    (part,) = step.reply.content
    assert part.size == (round(50 * 8**0.5), round(50 * 8**0.5))
    pixels = np.asarray(part).astype(int)
    assert abs(pixels[0, 0, 0] - 100) <= 1 and abs(pixels[-1, -1, 0] - 149) <= 1
    assert abs(pixels[0, 0, 1] - 20) <= 1 and abs(pixels[-1, -1, 1] - 69) <= 1


def test_the_whole_picture_is_itself():
    (part,) = ask({"bbox_2d": [0, 0, 1000, 1000]}).reply.content
    assert part.size == (200, 100) and part.getpixel((199, 99)) == (199, 99, 0)


def test_one_of_several():
    (part,) = ask({"bbox_2d": [0, 0, 1000, 1000], "img_idx": 1}, pictures=((200, 100), (8, 40))).reply.content
    assert part.size == (8, 40)


@pytest.mark.parametrize("completion, finished", [("7", True), ("<tool_call>", True), ("", True)])
def test_no_call_is_the_answer(completion, finished):
    step = ZOOM.step(None, completion, finished)
    assert step.reply is None and step.score is None


def test_a_call_that_was_cut_off_is_not_followed():
    assert ask({"bbox_2d": [0, 0, 1000, 1000]}, finished=False).reply is None


@pytest.mark.parametrize(
    "arguments, options, complaint",
    [
        ({"bbox_2d": [0, 0, 1000]}, {}, "bbox_2d should be four numbers in 0 .. 1000"),
        ({"bbox_2d": [0, 0, 1001, 9]}, {}, "bbox_2d should be four numbers in 0 .. 1000"),
        ({"bbox_2d": [0, 0, True, 9]}, {}, "bbox_2d should be four numbers in 0 .. 1000"),
        ({"bbox_2d": [float("nan"), 0, 9, 9]}, {}, "bbox_2d should be four numbers in 0 .. 1000"),
        ({"bbox_2d": [500, 0, 500, 900]}, {}, "bbox_2d should have x1 < x2 and y1 < y2, at least 4 pixels apart"),
        (
            {"bbox_2d": [0, 0, 1000, 50]},
            {"pictures": ((1000, 100),)},
            "a side of bbox_2d should be at most 100 times the other, in pixels",
        ),
        ({"bbox_2d": [0, 0, 9, 9], "img_idx": 1}, {}, "img_idx should be in 0 .. 0"),
        ({"bbox_2d": [0, 0, 9, 9], "img_idx": "0"}, {}, "img_idx should be in 0 .. 0"),
        ({"bbox_2d": [0, 0, 9, 9]}, {"name": "shell"}, f"there is no tool of that name, only {TOOL}"),
        ({"box": [0, 0, 9, 9]}, {}, 'a call is {"name": ..., "arguments": {"bbox_2d": [x1, y1, x2, y2]}}'),
        ([], {}, 'a call is {"name": ..., "arguments": {"bbox_2d": [x1, y1, x2, y2]}}'),
    ],
)
def test_a_call_that_cannot_be_followed(arguments, options, complaint):
    """The policy is told why, and may try again."""
    assert ask(arguments, **options).reply.content == (f"Error: {complaint}",)


def test_no_json_at_all():
    step = ZOOM.step(Prompt(0, 1, (), "7", "t"), "<tool_call>{zoom}</tool_call>", True)
    assert step.reply.content[0].startswith("Error: a call is")
