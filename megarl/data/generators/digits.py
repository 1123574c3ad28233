"""Handwritten digits as a data set that needs no network: scikit-learn ships 1,797 scans."""

from pathlib import Path

import numpy as np
from PIL import Image

from megarl.data.folder import whole_folder
from megarl.data.generators.rows import row, write_rows
from megarl.errors import UserError

SCANS, HELD_OUT = 1797, 360
"""How many scans there are, and how many of them, the last in scikit-learn's order, are kept for `test.jsonl`."""


def write_digits(folder: Path, image_size: int = 16, question: str = "?", scans: int = SCANS) -> None:
    """Write the data set: `images/NNNN.png`, `train.jsonl` (1,437 rows) and `test.jsonl` (360 rows), or with fewer
    `scans` the first of them, in this proportion.

    Each 8x8 scan with values 0 to 16 is scaled to 0 to 255 and resized to an RGB picture of `image_size` x
    `image_size` pixels.  A row asks `question` beside one picture; its answer is the digit.  The bytes are
    the same on every run, and `folder` appears only when it is complete.

    Raises:
        UserError: `folder` is there already and is not empty, or there are not so many scans.
    """
    if not 5 <= scans <= SCANS:
        raise UserError(f"data.generator_options.scans = {scans}: should be from 5 to {SCANS}")
    with whole_folder(folder) as temporary:
        write_rows(temporary, *train_and_test(write_scans(temporary, image_size, question, scans)))


def train_and_test(rows: list[str]) -> tuple[list[str], list[str]]:
    """The rows that are trained on, and the last of them, as large a share as of all scans, that are held out."""
    kept = len(rows) - round(HELD_OUT / SCANS * len(rows))
    return rows[:kept], rows[kept:]


def write_scans(folder: Path, image_size: int, question: str, scans: int = SCANS) -> list[str]:
    """`images/NNNN.png` in `folder`, of the first `scans` in scikit-learn's order, and the row of each."""
    from sklearn.datasets import load_digits  # takes a second, which a refused recipe does not wait for

    digits = load_digits()
    pixels = np.round(digits.images[:scans] * (255 / 16)).astype(np.uint8)
    rows = []
    (folder / "images").mkdir()
    for number, (scan, digit) in enumerate(zip(pixels, digits.target[:scans], strict=True)):
        name = f"images/{number:04d}.png"
        image = Image.fromarray(scan).resize((image_size, image_size), Image.Resampling.BICUBIC)
        image.convert("RGB").save(folder / name)
        rows.append(row([("image", name), question], str(digit), "digits"))
    return rows
