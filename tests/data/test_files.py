import hashlib

import pytest

from megarl.data.files import dataset_hash, files_name, find_split, split_name
from megarl.errors import UserError

SHARDS = ["train-00000-of-00002", "train-00001-of-00002"]


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def found(folder, split="train"):
    return [str(path.relative_to(folder)) for path in find_split(folder, split)]


@pytest.mark.parametrize("place", ["", "data/"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("stems", [["train"], SHARDS, ["train-0"], ["train-a", "train-b"]])
def test_the_places_of_a_split(tmp_path, place, suffix, stems):
    names = [f"{place}{stem}{suffix}" for stem in stems]
    fill(tmp_path, *names, f"{place}test{suffix}", "README.md", "train.txt", "data/trainer.jsonl", "more/train.jsonl")
    assert found(tmp_path) == names
    assert found(tmp_path, "test") == [f"{place}test{suffix}"]


def test_splits_may_differ_in_form(tmp_path):
    fill(tmp_path, *(f"data/{stem}.parquet" for stem in SHARDS), "test.jsonl")
    assert found(tmp_path, "test") == ["test.jsonl"] and len(found(tmp_path)) == 2


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "train.parquet"],
        ["train.jsonl", "data/train.jsonl"],
        ["train.parquet", "train-00000-of-00001.parquet"],
        ["train-a.jsonl", "train-a.parquet"],
        ["train.jsonl", "data/train-00000-of-00001.parquet"],
    ],
)
def test_several_files_are_refused(tmp_path, names):
    fill(tmp_path, *names)
    with pytest.raises(UserError) as error:
        find_split(tmp_path, "train")
    assert all(name in str(error.value) for name in names) and str(tmp_path) in str(error.value)


def test_what_is_lacking_is_named(tmp_path):
    fill(tmp_path, "test.jsonl", "train.json", "train.jsonl.gz")
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(UserError, match="lacks a file for the split 'train': train.jsonl, train.parquet, train-"):
        find_split(tmp_path, "train")
    with pytest.raises(UserError, match="data.path = '.*/nowhere': no such folder"):
        find_split(tmp_path / "nowhere", "train")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["train-00000-of-00003", "train-00002-of-00003"],
            "of the 3 shards like train-00000-of-00003.jsonl, 1 are",
        ),
        (["train-00001-of-00002"], "1 are missing; the first has number 0"),
        ([*SHARDS, "train-00000-of-00001"], "shards of several sets"),
        (["train-00000-of-00003-0123456789abcdef", "train-00001-of-00003-89abcdef01234567"], "number 2"),
        (["train-00000-of-00001-0123456789abcdef", "train-00000-of-00001-89abcdef01234567"], "shards of several sets"),
        ([*SHARDS, "train-extra"], "shards of several sets: train-00000-of-00002.jsonl, train-extra.jsonl"),
    ],
)
def test_half_a_download_is_refused(tmp_path, names, message):
    fill(tmp_path, *(f"{name}.jsonl" for name in names))
    with pytest.raises(UserError, match=message):
        find_split(tmp_path, "train")


def test_names_for_messages_and_sources(tmp_path):
    shards = [tmp_path / f"{stem}.parquet" for stem in SHARDS]
    assert (files_name(shards), split_name(shards)) == (str(tmp_path / "train-*.parquet"), "train")
    assert (files_name(shards[:1]), split_name(shards[:1])) == (str(shards[0]), "train")
    hashed = [tmp_path / "train-00000-of-00001-0123456789abcdef.parquet"]
    assert (files_name(hashed), split_name(hashed)) == (str(hashed[0]), "train")
    single = [tmp_path / "my-data.jsonl"]
    assert (files_name(single), split_name(single)) == (str(single[0]), "my-data")


def test_the_hash_is_that_of_the_bytes(tmp_path):
    contents = [b"x" * (3 << 20), b"", b"abc"]
    files = [tmp_path / str(number) for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert dataset_hash(files) == hashlib.sha256(b"".join(contents)).hexdigest()
    assert dataset_hash(files[::-1]) != dataset_hash(files)
    for path, reason in ((tmp_path / "none", "does not exist"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(UserError, match=f"data file {path} {reason}"):
            dataset_hash([path])
