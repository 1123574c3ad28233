"""Thinking with pictures: the policy asks for a part of the picture, and gets it enlarged as a new picture."""

import json
import re
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from megarl.data.prompt import Prompt
from megarl.environments.dialogue import Reply, Step

TOOL = "image_zoom_in_tool"
"""The name that Qwen's models know it by; the prompts of the data set have to offer it."""
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_SCALE = 1000
"""Qwen3-VL's coordinates are thousandths of the picture's width and height."""
_SMALLEST = 4
"""Pixels of a side below which a part shows nothing."""
_THINNEST = 100
"""Times that a side is as long as the other; Qwen's processors refuse 200."""


@dataclass(frozen=True)
class Zoom:
    """Answers `<tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [x1, y1, x2, y2]}}</tool_call>` with
    that part of the prompt's picture, enlarged to the picture's own area; `img_idx`, from 0, names one of several.

    A call that cannot be followed is answered with the reason.  A completion without a call is the answer.  Zheng et
    al. 2025, DeepEyes (arXiv 2505.14362) trains this way.
    """

    role: Literal["user", "tool"] = "user"
    """Of the messages with a part; the chat template decides what becomes of it."""

    def reset(self, prompt: Prompt, seed: int) -> Prompt:
        return prompt

    def step(self, state: Prompt, completion: str, finished: bool) -> Step:
        call = _CALL.search(completion)
        if call is None or not finished:
            return Step(state)
        try:
            picture = _part(state, call[1])
        except ValueError as error:
            return Step(state, Reply((f"Error: {error}",), self.role))
        return Step(state, Reply((picture,), self.role))


def _part(prompt: Prompt, text: str) -> Image.Image:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
        box, index = arguments["bbox_2d"], arguments.get("img_idx", 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError('a call is {"name": ..., "arguments": {"bbox_2d": [x1, y1, x2, y2]}}') from None
    if name != TOOL:
        raise ValueError(f"there is no tool of that name, only {TOOL}")
    pictures = [source for source in prompt.media if source.kind == "image"]
    if type(index) is not int or not 0 <= index < len(pictures):
        raise ValueError(f"img_idx should be in 0 .. {len(pictures) - 1}")
    if not (isinstance(box, list) and len(box) == 4 and all(type(x) in (int, float) and 0 <= x <= _SCALE for x in box)):
        raise ValueError(f"bbox_2d should be four numbers in 0 .. {_SCALE}")
    from megarl.media.image import load_image  # not for each process that judges

    picture = load_image(pictures[index])
    width, height = picture.size
    left, upper = int(box[0] * width / _SCALE), int(box[1] * height / _SCALE)
    right, lower = -int(-box[2] * width // _SCALE), -int(-box[3] * height // _SCALE)
    if right - left < _SMALLEST or lower - upper < _SMALLEST:
        raise ValueError(f"bbox_2d should have x1 < x2 and y1 < y2, at least {_SMALLEST} pixels apart")
    if max(right - left, lower - upper) > _THINNEST * min(right - left, lower - upper):
        raise ValueError(f"a side of bbox_2d should be at most {_THINNEST} times the other, in pixels")
    factor = (width * height / ((right - left) * (lower - upper))) ** 0.5
    size = max(1, round((right - left) * factor)), max(1, round((lower - upper) * factor))
    return picture.crop((left, upper, right, lower)).resize(size, Image.Resampling.BICUBIC)
