"""Text, pictures and videos in one data set, so that one batch holds rows of all three."""

from pathlib import Path

import numpy as np

from megarl.data.folder import whole_folder
from megarl.data.generators.digits import train_and_test, write_scans
from megarl.data.generators.motion_video import write_clips
from megarl.data.generators.rows import draw_distinct, row, write_rows


def write_mixed(folder: Path, text: int = 900, clips: int = 1797) -> None:
    """Write the data set: `images/`, `clips/`, `train.jsonl` and `test.jsonl`.

    Three tasks, by `source`: `digits` (see `megarl/data/generators/digits.py`), `motion` (see
    `motion_video.py`) and `successor`, which has no medium: three digits of which the last is at most 8, and
    the answer is the digit that follows the last.  Of each task a fifth is held out, as of the digits.  The
    rows of a file are shuffled, so that its first rows hold every task.

    Args:
        text: rows of `successor`, at most the 900 that there are.
        clips: rows of `motion`.

    Raises:
        UserError: `folder` is there already and is not empty.
    """
    with whole_folder(folder) as temporary:
        scans = write_scans(temporary, image_size=16, question="?")
        train, test = [], []
        for rows in (scans, write_clips(temporary, clips, "?", "motion"), _successors(text)):
            kept, held_out = train_and_test(rows)
            train += kept
            test += held_out
        write_rows(temporary, _shuffled(train), _shuffled(test))


def _successors(count: int) -> list[str]:
    def draw(generator: np.random.RandomState, number: int) -> tuple[int, int, int]:
        first, second = generator.randint(0, 10, 2)
        return int(first), int(second), number % 9

    return [row([f"{a}{b}{c}>"], str(c + 1), "successor") for a, b, c in draw_distinct(13, count, draw)]


def _shuffled(rows: list[str]) -> list[str]:
    return [rows[place] for place in np.random.RandomState(17).permutation(len(rows))]
