"""Rows of digits, and the largest of them: text alone, with an answer that can be checked."""

from pathlib import Path

import numpy as np

from megarl.data.folder import whole_folder
from megarl.data.generators.rows import draw_distinct, row, write_rows


def write_largest_digit(folder: Path, train: int = 1024, test: int = 256, length: int = 8) -> None:
    """Write the data set: `train.jsonl` and `test.jsonl`.

    A prompt is `length` digits and a question mark.  The answers 1 to 9 come in turn, so that they are balanced in
    both files; no row of digits occurs twice.  The bytes are the same on every run.

    Raises:
        UserError: `folder` is there already and is not empty.
        ValueError: there are not so many different rows of digits.
    """

    def draw(generator: np.random.RandomState, number: int) -> str:
        largest = number % 9 + 1
        digits = generator.randint(0, largest + 1, length)
        digits[generator.randint(length)] = largest
        return "".join(map(str, digits))

    examples = draw_distinct(11, train + test, draw)
    rows = [row([f"{digits}?"], max(digits), "largest_digit") for digits in examples]
    with whole_folder(folder) as temporary:
        write_rows(temporary, rows[:train], rows[train:])
