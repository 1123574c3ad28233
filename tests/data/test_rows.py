import io
import json
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Json, List, Value, Video
from PIL import Image as Pillow

from megarl.data.parse import COLUMNS
from megarl.data.prompts import load_prompts
from megarl.data.rejection import Rejection
from megarl.data.rows import open_rows
from megarl.errors import UserError
from tests.data.rows import content, row, write


def png(colour="red"):
    file = io.BytesIO()
    Pillow.new("RGB", (4, 4), colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def parquet(path: Path, columns: dict, features: dict | None = None) -> Path:
    Dataset.from_dict(columns, features=features and Features(features)).to_parquet(path)
    return path


# JSON lines


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b"\r\n"])
def test_lines_are_found_by_their_offsets(tmp_path, end):
    lines = [json.dumps({"prompt": "x" * n}).encode() for n in (1, 0, 50, 3)]
    files = []
    for name in ("a.jsonl", "empty.jsonl", "b.jsonl"):
        files.append(tmp_path / name)
        files[-1].write_bytes(b"" if name == "empty.jsonl" else b"\n".join(lines) + end)
    rows = open_rows(files, COLUMNS, "")
    read = [rows[place] for place in range(len(rows))]
    assert [len(r["prompt"]) for r in read if r is not None] == [1, 0, 50, 3] * 2
    assert read.count(None) == 2 * (end == b"\n\n")
    assert read[1] == {"prompt": ""}


def test_lines_longer_than_what_is_read_at_a_time(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "' + b"x" * (40 << 20) + b'"}\n{"prompt": "y"}\n')
    rows = open_rows([file], COLUMNS, "")
    assert len(rows) == 2 and len(rows[0]["prompt"]) == 40 << 20 and rows[1] == {"prompt": "y"}


def test_no_file_stays_open(tmp_path):
    rows = [open_rows([write(tmp_path, row(), name=f"{n}.jsonl")], COLUMNS, "") for n in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    for place in range(300):
        assert rows[place % 3][0]["answer"] == "7"
    assert len(os.listdir("/proc/self/fd")) == before


# Parquet


def test_columns_of_pictures_and_clips_stay_bytes(folder, cache):
    """Features of `datasets`, whose decoding would need torchcodec for a clip, and would lose what a file says."""
    features = {"problem": Value("string"), "answer": Value("string"), "images": List(Image()), "video": Video()}
    columns = {
        "problem": ["<image>is<image>", "?"],
        "answer": ["7", "8"],
        "images": [[{"bytes": png(), "path": None}, {"bytes": png("blue"), "path": "x.png"}], []],
        "video": [None, {"bytes": b"a clip", "path": None}],
    }
    prompts, rejections = load_prompts(parquet(folder / "train.parquet", columns, features), cache=cache)
    assert rejections == []
    assert content(prompts[0]) == [
        ("image", "train.parquet row 1 images[0]"),
        "is",
        ("image", "train.parquet row 1 images[1]"),
    ]
    assert [source.data for source in prompts[0].media] == [png(), png("blue")]
    assert content(prompts[1]) == [("video", "train.parquet row 2 video"), "?"]
    assert prompts[1].media[0].data == b"a clip" and prompts[1].media[0].kind == "video"


def test_paths_and_nulls_in_columns(folder, cache):
    features = {"prompt": Value("string"), "solution": Value("float32"), "image": Image(decode=False)}
    columns = {
        "prompt": ["a", "b", "c"],
        "solution": [0.1, None, 2.0],
        "image": [{"bytes": None, "path": "images/a.png"}, None, {"bytes": None, "path": "images/c.png"}],
    }
    schema = Features(features).arrow_schema
    pq.write_table(pa.table(columns, schema=schema), folder / "train.parquet")
    prompts, rejections = load_prompts(folder / "train.parquet", cache=cache)
    assert [(p.row, p.answer, [s.path.name for s in p.media]) for p in prompts] == [(1, "0.1", ["a.png"])]
    assert [(r.row, r.item) for r in rejections] == [(2, "answer"), (3, "image")]


def test_messages_in_columns(folder, cache):
    """Arrow gives every part the keys of all parts; `datasets` keeps messages of mixed types as JSON."""
    parts = [{"type": "image", "image": "images/a.png"}, {"type": "text", "text": "<image>?"}]
    chat = [{"role": "user", "content": parts}]
    pq.write_table(pa.Table.from_pylist([{"messages": chat, "answer": 7}]), folder / "train.parquet")
    mixed = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]]
    features = {"messages": List(Json()), "answer": Json()}
    parquet(folder / "mixed.parquet", {"messages": mixed, "answer": [{"a": 1}]}, features)
    prompts, rejections = load_prompts(folder / "train.parquet", cache=cache)
    assert rejections == [] and content(prompts[0]) == [("image", "images/a.png"), "<image>?"]
    assert prompts.answers == ["7"]
    prompts, [rejection] = load_prompts(folder / "mixed.parquet", cache=cache)
    assert (rejection.item, rejection.reason) == ("answer", "an object (\"{'a': 1}\"), not a string or a number")
    parquet(folder / "fine.parquet", {"messages": mixed, "answer": ["7"]}, {**features, "answer": Json()})
    prompts, rejections = load_prompts(folder / "fine.parquet", cache=cache)
    assert rejections == [] and content(prompts[0]) == ["Be brief.", ("image", "images/a.png"), "<image>?"]


def test_shards_are_one_data_set(folder, cache):
    counts = (3, 0, 2)
    files = [folder / f"train-{i:05d}-of-00003.parquet" for i in range(3)]
    for file, count in zip(files, counts, strict=True):
        table = pa.table({"prompt": pa.array(["?"] * count), "answer": pa.array(range(count), pa.int64())})
        pq.write_table(table, file)
    prompts, rejections = load_prompts(files, cache=cache)
    assert rejections == [] and prompts.answers == ["0", "1", "2", "0", "1"]
    assert [prompt.row for prompt in prompts] == [1, 2, 3, 4, 5] and set(prompts.sources) == {"train"}


def test_only_what_is_read_is_read(folder, cache):
    file = parquet(folder / "train.parquet", {"prompt": ["?"], "answer": ["7"], "extra_info": [{"index": 3}]})
    assert open_rows([file], COLUMNS, "", cache)[0] == {"prompt": "?", "answer": "7"}


@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "a page", "not parquet"])
def test_a_file_that_cannot_be_read_is_named(folder, cache, damage, capfd):
    file = parquet(folder / "train.parquet", {"prompt": ["abcdefgh" * 200] * 500, "answer": ["7"] * 500})
    whole = file.read_bytes()
    middle = len(whole) // 4
    file.write_bytes(
        {
            "empty": b"",
            "garbage": os.urandom(len(whole)),
            "truncated": whole[:-300],
            "a page": b"PAR1" + bytes(255 for _ in whole[4:middle]) + whole[middle:],
            "not parquet": b'{"prompt": "?", "answer": "7"}\n',
        }[damage]
    )
    good = parquet(folder / "good.parquet", {"prompt": ["?"], "answer": ["7"]})
    capfd.readouterr()
    with pytest.raises(UserError, match="^data file .*train.* cannot be read: ") as error:
        load_prompts([file] if damage == "a page" else [good, file], cache=cache)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_shards_of_different_types_are_refused(folder, cache):
    files = [folder / "train-0.parquet", folder / "train-1.parquet"]
    pq.write_table(pa.table({"prompt": ["?"], "answer": ["7"]}), files[0])
    pq.write_table(pa.table({"prompt": [[{"role": "user"}]], "answer": ["7"]}), files[1])
    with pytest.raises(UserError, match=r"data file .*/train-\*.parquet cannot be read: "):
        load_prompts(files, cache=cache)


def test_a_file_that_changed_is_read_anew(folder, cache):
    for answer in ("7", "8"):
        prompts, _ = load_prompts(parquet(folder / "train.parquet", {"prompt": ["?"], "answer": [answer]}), cache=cache)
        assert prompts.answers == [answer]


def test_a_file_that_is_replaced_with_its_time_kept(folder, cache):
    file = folder / "train.parquet"
    for answer in ("7", "8"):
        parquet(file, {"prompt": ["?"], "answer": [answer]})
        os.utime(file, (1e9, 1e9))
        assert load_prompts(file, cache=cache)[0].answers == [answer]


def test_columns_that_are_not_read_may_differ(folder, cache):
    files = [folder / f"train-{n}.parquet" for n in range(3)]
    for file, more in zip(files, ({"id": [1]}, {"id": [{"a": "x"}], "extra": [[1.5]]}, {}), strict=True):
        pq.write_table(pa.table({"prompt": ["?"], "answer": [file.stem], **more}), file)
    prompts, rejections = load_prompts(files, cache=cache)
    assert rejections == [] and prompts.answers == ["train-0", "train-1", "train-2"]


def test_shards_with_other_columns_are_named(folder, cache):
    files = [folder / "train-0.parquet", folder / "train-1.parquet"]
    pq.write_table(pa.table({"prompt": ["?"], "answer": ["7"]}), files[0])
    pq.write_table(pa.table({"prompt": ["?"], "answer": ["7"], "source": ["x"]}), files[1])
    message = "data file .*train-0.parquet lacks the column 'source', which train-1.parquet has"
    for order in (files, files[::-1]):
        with pytest.raises(UserError, match=message):
            load_prompts(order, cache=cache)


def test_a_file_with_none_of_the_columns(folder, cache):
    file = parquet(folder / "train.parquet", {"text": ["?"], "label": ["7"]})
    with pytest.raises(
        UserError, match="train.parquet has none of the columns that are read, but text, label; acc"
    ) as e:
        load_prompts(file, cache=cache)
    assert all(name in str(e.value) for name in COLUMNS)


def test_a_description_of_features_that_is_none(folder, cache):
    for number, features in enumerate(("{", '{"info": 7}', '{"info": {"features": {"answer": {"_type": "No"}}}}')):
        table = pa.table({"prompt": ["?"], "answer": ["7"]}).replace_schema_metadata({"huggingface": features})
        pq.write_table(table, folder / f"{number}.parquet")
        with pytest.raises(UserError, match=f"{number}.parquet cannot be read: "):
            load_prompts(folder / f"{number}.parquet", cache=cache)


def test_labels_are_names(folder, cache):
    label = ClassLabel(names=["cat", "dog"])
    features = {"prompt": Value("string"), "answer": label, "source": ClassLabel(names=["animals"])}
    columns = {"prompt": ["?"] * 3, "answer": [1, 0, -1], "source": [0, 0, 0]}
    prompts, [rejection] = load_prompts(parquet(folder / "train.parquet", columns, features), cache=cache)
    assert prompts.answers == ["dog", "cat"] and prompts.sources == ["animals"] * 2
    assert (rejection.row, rejection.item) == (3, "answer") and "missing or null" in rejection.reason
    features = {"prompt": Value("string"), "reward_model": {"ground_truth": label}}
    columns = {"prompt": ["?"], "reward_model": [{"ground_truth": 1}]}
    nested = load_prompts(parquet(folder / "nested.parquet", columns, features), cache=cache)[0]
    assert nested.answers == ["dog"]


def test_a_label_without_a_name_and_labels_that_differ(folder, cache):
    files = [folder / "train-0.parquet", folder / "train-1.parquet"]
    for file, names in zip(files, (["cat", "dog"], ["dog", "cat"]), strict=True):
        features = {"prompt": Value("string"), "answer": ClassLabel(names=names)}
        table = pa.table({"prompt": ["?", "?"], "answer": [1, 2]}, schema=Features(features).arrow_schema)
        pq.write_table(table, file)
    prompts, [rejection] = load_prompts(files[0], cache=cache)
    assert prompts.answers == ["dog"]
    assert rejection == Rejection(2, "answer", "2 is none of the 2 labels of the column")
    with pytest.raises(UserError, match="train-1.parquet, column 'answer': other labels than in train-0.parquet"):
        load_prompts(files, cache=cache)


def test_rows_are_read_in_several_threads(folder, cache):
    columns = {"prompt": [str(i) for i in range(200)], "answer": ["7"] * 200}
    for rows in (
        open_rows([parquet(folder / "train.parquet", columns)], COLUMNS, "", cache),
        open_rows([write(folder, *({"prompt": str(i)} for i in range(200)))], COLUMNS, ""),
    ):
        with ThreadPoolExecutor(8) as pool:
            assert [r["prompt"] for r in pool.map(rows.__getitem__, range(200))] == columns["prompt"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_come_at_once_share_the_copy(folder, cache):
    file = parquet(folder / "train.parquet", {"prompt": [str(i) for i in range(1000)], "answer": ["7"] * 1000})
    context = multiprocessing.get_context("fork")  # a fresh interpreter imports `datasets` for seconds
    counts = context.SimpleQueue()
    started = [
        context.Process(target=lambda: counts.put(len(load_prompts(file, cache=cache)[0])), daemon=True)
        for _ in range(3)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=60)
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert [counts.get() for _ in started] == [1000] * 3
    assert len(list(cache.rglob("*.arrow"))) == 1
