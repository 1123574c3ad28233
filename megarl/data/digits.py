"""Handwritten digits as a data set that needs no network: scikit-learn ships 1,797 scans."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from megarl.data.folder import whole_folder

HELD_OUT = 360
"""How many scans, the last in scikit-learn's order, are kept for `test.jsonl`."""


def write_digits(folder: Path, image_size: int = 16, question: str = "?") -> None:
    """Write the data set: `images/NNNN.png`, `train.jsonl` (1,437 rows) and `test.jsonl` (360 rows).

    Each 8x8 scan with values 0 to 16 is scaled to 0 to 255 and resized to an RGB picture of `image_size` x
    `image_size` pixels.  A row asks `question` beside one picture; its answer is the digit.  The bytes are
    the same on every run, and `folder` appears only when it is complete.

    Raises:
        UserError: `folder` is there already and is not empty.
    """
    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    first_held_out = len(pixels) - HELD_OUT
    rows = []
    with whole_folder(folder) as temporary:
        (temporary / "images").mkdir()
        for number, (scan, digit) in enumerate(zip(pixels, digits.target, strict=True)):
            name = f"images/{number:04d}.png"
            image = Image.fromarray(scan).resize((image_size, image_size), Image.Resampling.BICUBIC)
            image.convert("RGB").save(temporary / name)
            rows.append(_row(name, question, str(digit)))
        (temporary / "train.jsonl").write_text("".join(rows[:first_held_out]))
        (temporary / "test.jsonl").write_text("".join(rows[first_held_out:]))


def _row(image: str, question: str, answer: str) -> str:
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    row = {"messages": [{"role": "user", "content": content}], "answer": answer, "source": "digits"}
    return json.dumps(row) + "\n"
