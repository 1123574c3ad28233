from collections import Counter

import pytest

from megarl.data.generators.mixed import write_mixed
from tests.data.generators.folders import digest, examples, parts, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "mixed"
    write_mixed(folder, clips=200)
    return folder


def test_every_task_has_a_fifth_held_out(folder):
    train, test = (Counter(row["source"] for row in rows(folder, split)) for split in ("train", "test"))
    assert train == {"digits": 1437, "motion": 160, "successor": 720}
    assert test == {"digits": 360, "motion": 40, "successor": 180}


def test_kinds_of_content(folder):
    kinds = {"digits": ["image", "text"], "motion": ["video", "text"], "successor": ["text"]}
    for row in rows(folder, "train") + rows(folder, "test"):
        assert [part["type"] for part in parts(row)] == kinds[row["source"]]


def test_first_rows_hold_every_task(folder):
    for split in ("train", "test"):
        assert {row["source"] for row in rows(folder, split)[:64]} == {"digits", "motion", "successor"}


def test_answers_follow_the_last_digit(folder):
    asked = {split: set() for split in ("train", "test")}
    for split in asked:
        answers = Counter()
        for row in rows(folder, split):
            if row["source"] == "successor":
                (part,) = parts(row)
                first, second, last, mark = part["text"]
                assert mark == ">" and (first + second).isdigit() and int(row["answer"]) == int(last) + 1
                answers[row["answer"]] += 1
                asked[split].add(part["text"])
        assert len(answers) == 9 and len(set(answers.values())) == 1
    assert not asked["train"] & asked["test"]


def test_nothing_is_on_both_sides(folder):
    """Of scikit-learn's scans, which are distinct, too."""
    train, test = (examples(folder, split) for split in ("train", "test"))
    assert not {asked for asked, _ in train} & {asked for asked, _ in test}


def test_the_bytes_are_the_same_every_time(folder, tmp_path):
    write_mixed(tmp_path, clips=200)
    assert digest(tmp_path) == digest(folder)
