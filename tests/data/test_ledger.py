"""What a run keeps of the check of its data: believed once it has begun, and then the data must be the same."""

import hashlib
import json

import numpy as np
import pytest

from megarl.data.checked import Checked
from megarl.data.ledger import Ledger
from megarl.data.prompts import load_prompts
from megarl.data.rejection import Rejection, read_rejections
from megarl.errors import UserError
from tests.data.rows import Checker, image, row, write

SETTINGS = {"max_prompt_tokens": 8, "folders": ("a", "b")}


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def start(run):
    """Starts a run, or resumes it; the rows that were checked are `check.rows`."""

    def start(file, resumed=False, check=None, ceiling=None, **settings):
        ledger = Ledger(run, "train", {**SETTINGS, **settings}, resumed)
        found = load_prompts(file, check=check or Checker(), ledger=ledger, max_rejected_fraction=ceiling)
        return list(found[0]), found[1]

    return start


def test_the_record_says_what_was_checked(folder, run, start):
    file = write(folder, row(answer="1"), row(answer="long"), b"", row(answer="2", source="é\0"))
    start(file)
    report = json.loads((run / "data_train.json").read_text())
    digests = [hashlib.sha256(answer).digest() for answer in (b"1", b"2")]
    assert report == {
        "files": [{"path": str(file), "bytes": file.stat().st_size}],
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "rows": 3,
        "accepted": 2,
        "rejected": 1,
        "content_sha256": hashlib.sha256(b"".join(digests)).hexdigest(),
        "settings": {"max_prompt_tokens": 8, "folders": ["a", "b"]},
    }
    kept = read_rejections(run / "rejected_train.jsonl")
    assert [(r.row, r.item) for r in kept] == [(2, "messages")]
    found = Ledger(run, "train", SETTINGS, resumed=True).read(report["sha256"])
    assert found.places.tolist() == [0, 3] and found.places.dtype == np.int64
    assert (found.answers, found.sources) == (["1", "2"], ["digits", "é\0"]) and found.rejections == kept
    assert [row.tobytes() for row in found.fingerprints] == digests
    assert sorted(path.name for path in run.iterdir()) == ["data_train.json", "data_train.npz", "rejected_train.jsonl"]


def test_fingerprints_of_prompts(folder, run):
    file = write(folder, row(answer="long"), row(answer="1"), row(answer="2"))
    for resumed in (False, True):
        prompts, _ = load_prompts(file, check=Checker(), ledger=Ledger(run, "train", SETTINGS, resumed))
        part = prompts[1:]
        assert part.fingerprint(part[0].index) == prompts.fingerprint(1) == hashlib.sha256(b"2").digest()
        assert prompts.fingerprint(0) == hashlib.sha256(b"1").digest()
    assert load_prompts(file)[0].fingerprint(0) is None


def test_a_run_that_has_not_begun_checks_again(folder, run, start):
    """A picture that was away at the first start costs no row for good."""
    file = write(folder, row(), row(image("images/later.png")))
    assert len(start(file)[1]) == 1
    (folder / "images" / "later.png").write_bytes(b"here")
    prompts, rejections = start(file)
    assert len(prompts) == 2 and rejections == [] and not (run / "rejected_train.jsonl").exists()


def test_a_refused_start_leaves_its_rejections_and_no_record(folder, run, start):
    file = write(folder, row(), row(answer="long"))
    with pytest.raises(UserError, match="1 of 2 rows were rejected"):
        start(file, ceiling=0.1)
    assert [r.row for r in read_rejections(run / "rejected_train.jsonl")] == [2]
    assert not (run / "data_train.json").exists()
    start(file, ceiling=0.5)
    assert (run / "data_train.json").exists()
    with pytest.raises(UserError):
        start(file, ceiling=0.1)
    assert not (run / "data_train.json").exists()


def test_a_resume_does_not_check_again(folder, run, start):
    file = write(folder, row(answer="1"), row(answer="long"), row(answer="2"))
    first = start(file)
    check = Checker()
    assert start(file, resumed=True, check=check) == first and check.rows == []
    for spoil in (
        lambda: (run / "rejected_train.jsonl").unlink(),
        lambda: (run / "rejected_train.jsonl").write_text("[]\n"),
        lambda: (run / "data_train.npz").write_bytes(b"half"),
        lambda: (run / "data_train.npz").write_bytes((run / "data_train.npz").read_bytes()[:-30]),
        lambda: (run / "data_train.npz").unlink(),
        lambda: (run / "data_train.json").write_text('{"sha256": '),
        lambda: (run / "data_train.json").write_text("[]"),
        lambda: np.savez((run / "data_train.npz").open("wb"), places=np.array([0])),
    ):
        check = Checker()
        spoil()
        assert start(file, resumed=True, check=check) == first and check.rows == [1, 2, 3]
        assert start(file, resumed=True, check=check) == first and check.rows == [1, 2, 3]


def test_any_damage_of_the_record_is_as_if_there_were_none(run):
    """Byte by byte: what a reader of archives raises is manifold."""
    found = Checked(np.arange(3), ["1"] * 3, ["a"] * 3, [Rejection(4, "row", "x")], np.zeros((3, 32), np.uint8))
    ledger = Ledger(run, "train", SETTINGS, resumed=True)
    ledger.write([], "abc", found)
    whole, damaged = (run / "data_train.npz").read_bytes(), 0
    for place in range(len(whole)):
        (run / "data_train.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        again = ledger.read("abc")
        damaged += again is None
        assert again is None or (again.places.tolist(), again.answers) == ([0, 1, 2], ["1"] * 3)
    assert damaged > len(whole) // 2


def test_an_update_checks_again_and_must_find_the_same(folder, run, start):
    file = write(folder, row(answer="1"), row(answer="long"), row(answer="2"))
    first = start(file)
    check = Checker()
    assert start(file, resumed=True, check=check, processor="new") == first and check.rows == [1, 2, 3]
    assert start(file, resumed=True, check=check, processor="new") == first and check.rows == [1, 2, 3]
    kept = {path.name: path.read_bytes() for path in run.iterdir()}

    def other(prompts):
        return [hashlib.sha256(b"other").digest() for _ in prompts[:1]] + Checker()(prompts)[1:]

    with pytest.raises(UserError) as error:
        start(file, resumed=True, check=other, processor="newer")
    before = json.loads(kept["data_train.json"])["content_sha256"]
    now = hashlib.sha256(hashlib.sha256(b"other").digest() + hashlib.sha256(b"2").digest()).hexdigest()
    assert str(error.value) == (
        f"the data of the split 'train' is not what the run in {run} began with: "
        f"content_sha256 {before[:12]} -> {now[:12]}; restore the data, set allow_dataset_change = true, or give "
        "another run_dir"
    )
    # What it is compared with stays.
    assert {path.name: path.read_bytes() for path in run.iterdir()} == kept


def test_a_resume_with_less_than_it_began_with(folder, run, start):
    file = write(folder, row(answer="1"), row(image("images/b.png")))
    first = start(file)
    kept = (folder / "images" / "b.png").read_bytes()
    (folder / "images" / "b.png").unlink()
    for _ in range(2):
        with pytest.raises(UserError) as error:
            start(file, resumed=True, processor="new")
        assert "accepted rows 2 -> 1; now rejected: row 2, messages[0].content[0].image: " in str(error.value)
    (folder / "images" / "b.png").write_bytes(kept)
    assert start(file, resumed=True, processor="new") == first


def test_a_resume_with_other_files(folder, run, start):
    file = write(folder, row(answer="1"), row(answer="2"))
    start(file)
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    write(folder, row(answer="1"), row(answer="3"))
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    for _ in range(2):
        with pytest.raises(UserError, match=f"'train' is not .* SHA-256 of its files {before[:12]} -> {now[:12]}; "):
            start(file, resumed=True)
    assert len(start(file)[0]) == 2  # a run that has not begun may
