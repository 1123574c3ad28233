"""Noisy pictures of one colour each, and the code word that every colour has: two tokens that must agree."""

from pathlib import Path

import numpy as np
from PIL import Image

from megarl.data.folder import whole_folder
from megarl.data.generators.rows import row, write_rows

CODE_WORDS = {
    "ba": (40, 40, 40),
    "be": (215, 40, 40),
    "da": (40, 215, 40),
    "di": (40, 40, 215),
    "ge": (215, 215, 40),
    "go": (215, 40, 215),
    "ki": (40, 215, 215),
    "ko": (215, 215, 215),
}
"""Colour, in RGB, by code word.  Each letter is in two words: neither letter alone gives a colour away."""

NOISE = 40
"""Standard deviation of the noise on each sample, in the units of 8 bits."""


def write_color_codeword(folder: Path, train: int = 1024, test: int = 256, image_size: int = 16) -> None:
    """Write the data set: `images/NNNN.png`, `train.jsonl` and `test.jsonl`.

    A picture is `image_size` x `image_size` RGB pixels of independent noise round one colour of `CODE_WORDS`,
    which come in turn, so that answers are balanced in both files.  No two pictures are equal: there are
    3 x `image_size`**2 independent samples in each.  The bytes are the same on every run.

    Raises:
        UserError: `folder` is there already and is not empty.
    """
    generator = np.random.RandomState(7)
    rows = []
    with whole_folder(folder) as temporary:
        (temporary / "images").mkdir()
        for number in range(train + test):
            word, colour = list(CODE_WORDS.items())[number % len(CODE_WORDS)]
            noisy = generator.normal(colour, NOISE, (image_size, image_size, 3))
            name = f"images/{number:04d}.png"
            Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8)).save(temporary / name)
            rows.append(row([("image", name), "?"], word, "color_codeword"))
        write_rows(temporary, rows[:train], rows[train:])
