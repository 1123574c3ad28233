from collections import Counter

import pytest

from megarl.data.generators.largest_digit import write_largest_digit
from tests.data.generators.folders import assert_held_out, digest, parts, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    write_largest_digit(folder, train=180, test=90)
    return folder


def test_rows(folder):
    for split, count in (("train", 20), ("test", 10)):
        for row in rows(folder, split):
            (part,) = parts(row)
            assert part["type"] == "text" and len(part["text"]) == 9
            assert row["answer"] == max(part["text"].removesuffix("?")) and row["source"] == "largest_digit"
        assert Counter(row["answer"] for row in rows(folder, split)) == dict.fromkeys("123456789", count)
    assert_held_out(folder)


def test_the_bytes_are_the_same_every_time(folder, tmp_path):
    write_largest_digit(tmp_path, train=180, test=90)
    assert digest(tmp_path) == digest(folder)


def test_more_rows_than_there_are_are_refused(tmp_path):
    """Of two digits, three have 1 as the largest."""
    with pytest.raises(ValueError, match="different examples"):
        write_largest_digit(tmp_path, train=36, test=9, length=2)
