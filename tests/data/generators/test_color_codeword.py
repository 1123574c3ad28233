from collections import Counter

import numpy as np
import pytest
from PIL import Image

from megarl.data.generators.color_codeword import CODE_WORDS, NOISE, write_color_codeword
from megarl.errors import UserError
from tests.data.generators.folders import assert_held_out, digest, parts, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "colours"
    write_color_codeword(folder, train=160, test=80)
    return folder


def test_rows(folder):
    assert rows(folder, "train")[1] == {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "image": "images/0001.png"}, {"type": "text", "text": "?"}],
            }
        ],
        "answer": "be",
        "source": "color_codeword",
    }
    for split, count in (("train", 20), ("test", 10)):
        assert Counter(row["answer"] for row in rows(folder, split)) == dict.fromkeys(CODE_WORDS, count)
    assert_held_out(folder)


def test_every_picture_has_the_colour_of_its_word(folder):
    for row in rows(folder, "test"):
        with Image.open(folder / parts(row)[0]["image"]) as image:
            assert (image.mode, image.size) == ("RGB", (16, 16))
            pixels = np.asarray(image, float)
        distances = {word: np.abs(pixels.mean((0, 1)) - colour).max() for word, colour in CODE_WORDS.items()}
        assert min(distances, key=distances.get) == row["answer"]
        assert 0.5 * NOISE < pixels.std((0, 1)).min()  # clipped at 0 and 255


def test_one_letter_says_too_little():
    for place in (0, 1):
        assert set(Counter(word[place] for word in CODE_WORDS).values()) == {2}
    assert len(set(CODE_WORDS.values())) == len(CODE_WORDS) == 8


def test_the_bytes_are_the_same_every_time(folder, tmp_path):
    write_color_codeword(tmp_path, train=160, test=80)
    assert digest(tmp_path) == digest(folder)


def test_nothing_is_overwritten(folder):
    before = digest(folder)
    with pytest.raises(UserError, match="is there already"):
        write_color_codeword(folder)
    assert digest(folder) == before
