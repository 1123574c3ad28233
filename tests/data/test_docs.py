"""The examples of docs/data.md, through the parser that users meet."""

import json
import re
from pathlib import Path

from tests.data.rows import content, load

DOC = (Path(__file__).parent.parent.parent / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"^```json\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)
ROWS = [line for block in BLOCKS for line in block.splitlines()]
A, B, CLIP = ("image", "images/a.png"), ("image", "images/b.png"), ("video", "clips/a.mp4")


def test_the_examples_are_accepted_and_mean_what_the_text_says(folder):
    assert BLOCKS and DOC.count("```") == 2 * len(BLOCKS)
    prompts, rejections = load(folder, *(line.encode() for line in ROWS))
    assert rejections == []
    assert [(prompt.answer, prompt.source, content(prompt)) for prompt in prompts] == [
        ("1", "digits", [A, "Which digit?"]),
        ("left", "train", ["Be brief.", CLIP, "Where to?"]),
        ("48", "geometry", [A, "\nFind x."]),
        ("the first", "train", [A, "or", B]),
        ("3", "train", [A, "How many?"]),
        ("it shows a picture", "train", ["What does the <image> tag do?"]),
        ("7", "train", []),
    ]
    assert prompts[-1].expanded.ids == (9, 7, 7, 8) and prompts[-1].expanded.grids == ((1, 4, 2),)


def test_every_column_is_documented():
    from megarl.data.parse import COLUMNS

    assert [name for name in COLUMNS if f"`{name}" not in DOC and f'"{name}"' not in DOC] == []
    assert {key for line in ROWS for key in json.loads(line)} <= set(COLUMNS)
