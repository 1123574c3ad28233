"""The check of a data set at the start: each row once in a job, errors by name."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.data.checked import WINDOW, Ranks
from megarl.data.ledger import Ledger
from megarl.data.media_values import MediaReader
from megarl.data.prompts import load_prompts
from megarl.data.rejection import check_rejected, read_rejections, write_rejections
from megarl.errors import MediaError, UserError
from tests.data.rows import Checker, image, load, row, text, write

SETTINGS = {"max_prompt_tokens": 8, "folders": ("a", "b")}


def test_each_prompt_is_checked_once_in_windows(folder):
    check = Checker()
    prompts, rejections = load(folder, *(row(answer=str(i)) for i in range(2 * WINDOW + 3)), check=check)
    assert [len(window) for window in check.windows] == [WINDOW, WINDOW, 3]
    assert check.rows == [prompt.row for prompt in prompts] == list(range(1, 2 * WINDOW + 4))
    assert rejections == []


def test_errors_of_the_check_are_rejections_at_their_place(folder):
    check = Checker()
    broken = image("images/broken.png")
    rows = [
        row(answer="long"),
        row(),
        row(text(), image(), broken, broken),
        {"prompt": "<image>?", "images": ["images/broken.png"], "answer": "7"},
        {"prompt": "?", "answer": "long"},
        b"{",
        row(answer="9"),
    ]
    prompts, rejections = load(folder, *rows, check=check)
    assert [(prompt.index, prompt.row) for prompt in prompts] == [(0, 2), (1, 7)]
    assert check.rows == [1, 2, 3, 4, 5, 7]
    assert [(r.row, r.item) for r in rejections] == [
        (1, "messages"),
        (3, "messages[0].content[2].image"),
        (4, "images[0]"),
        (5, "prompt"),
        (6, "row"),
    ]
    assert rejections[0].reason == "9 tokens, but max_prompt_tokens = 8"
    assert rejections[1].reason == "images/broken.png: not a picture"


def test_bytes_in_a_row_are_named_by_their_place(folder):
    def check(prompts):
        return [MediaError(prompt.media[1].name, "damaged") for prompt in prompts]

    bad = {"prompt": "?", "images": ["images/a.png", "data:;base64,AAAA"], "answer": "7"}
    _, [rejection] = load(folder, bad, check=check)
    assert rejection.item == "images[1]" and rejection.reason == "train.jsonl row 1 images[1]: damaged"


def test_a_name_that_no_medium_has_is_the_prompts(folder):
    _, [rejection] = load(folder, row(), check=lambda prompts: [MediaError("elsewhere", "damaged")])
    assert (rejection.item, rejection.reason) == ("messages", "elsewhere: damaged")


def test_a_bug_in_a_check_is_not_a_rejection(folder):
    with pytest.raises(ZeroDivisionError):
        load(folder, row(), check=lambda prompts: 1 / 0)
    with pytest.raises(ValueError, match="shorter"):
        load(folder, row(), row(), check=lambda prompts: [bytes(32)])


def in_ranks(world, job):
    """`job(ranks, check)` on so many threads, which gather from each other; the results in rank order."""
    barrier, values = threading.Barrier(world, timeout=20), [None] * world

    def ranks(rank):
        def gather(value):
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        return Ranks(rank, world, gather, lambda value: gather(value)[0])

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: job(ranks(rank)), range(world)))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_rows_and_know_them_all(folder, tmp_path, world):
    rows = [row(answer="long" if i % 7 == 0 else str(i)) for i in range(WINDOW * world + 5)]
    file = write(folder, *rows[:50], b"", b"{", *rows[50:])
    alone_check = Checker()
    alone, rejected = load_prompts(file, check=alone_check, ledger=Ledger(tmp_path / "alone", "train", SETTINGS))
    checks = [Checker() for _ in range(world)]

    def job(ranks):
        resumed = (tmp_path / "shared" / "data_train.json").exists()
        ledger = Ledger(tmp_path / "shared", "train", SETTINGS, resumed)
        return load_prompts(file, check=checks[ranks.rank], ranks=ranks, ledger=ledger)

    for prompts, rejections in in_ranks(world, job):
        assert rejections == rejected and list(prompts) == list(alone)
        assert (prompts.answers, prompts.sources) == (alone.answers, alone.sources)
    assert sorted(row for check in checks for row in check.rows) == alone_check.rows
    sizes = [len(check.rows) for check in checks]
    assert max(sizes) - min(sizes) <= 2
    report = (tmp_path / "alone" / "data_train.json").read_text()
    assert (tmp_path / "shared" / "data_train.json").read_text() == report
    # A resume on another number of ranks finds it too.
    again = in_ranks(world, job)
    assert all(list(prompts) == list(alone) for prompts, _ in again)
    assert sorted(row for check in checks for row in check.rows) == alone_check.rows


def test_rejections_are_written(folder, tmp_path):
    _, rejections = load(folder, b"{", row(answer=True))
    file = tmp_path / "rejected.jsonl"
    write_rejections(rejections, file)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["row"], r["item"]) for r in written] == [(1, "row"), (2, "answer")]
    assert written[1]["reason"] == "a boolean ('True'), not a string or a number"
    assert read_rejections(file) == rejections
    write_rejections([], file)
    assert file.read_bytes() == b"" and read_rejections(file) == read_rejections(tmp_path / "none") == []


def test_a_ceiling_on_rejected_rows(folder):
    file = write(folder, row(), row(answer=True), row(), row())
    prompts, rejections = load_prompts(file, MediaReader(folder))
    check_rejected(file, len(prompts), rejections, 0.25)
    with pytest.raises(UserError) as error:
        check_rejected(file, len(prompts), rejections, 0.24)
    assert str(error.value) == (
        f"data file {file}: 1 of 4 rows were rejected, data.max_rejected_fraction = 0.24 accepts 0; "
        "the first: row 2, answer: a boolean ('True'), not a string or a number"
    )
    with pytest.raises(UserError, match="1 of 1 rows were rejected"):
        check_rejected(file, 0, rejections, 1.0)
    with pytest.raises(UserError, match="has no rows"):
        check_rejected(Path("x"), 0, [], 1.0)
