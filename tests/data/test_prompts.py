import json
from collections import Counter
from pathlib import Path

import pytest

from megarl.data.prompt import MediaSource
from megarl.data.prompts import PromptSet, load_prompts
from megarl.data.sampler import PromptSampler
from megarl.errors import UserError
from tests.data.rows import content, image, load, row, text, write


def test_a_row_becomes_a_prompt(folder):
    [prompt], rejections = load(folder, row())
    assert rejections == []
    source = MediaSource("image", "images/a.png", folder.resolve() / "images" / "a.png")
    assert prompt.messages == ({"role": "user", "content": [{"type": "image", "image": source}, text()]},)
    assert (prompt.index, prompt.row, prompt.answer, prompt.source) == (0, 1, "7", "digits")
    assert prompt.media == (source,) and prompt.expanded is None


def test_several_turns_and_plain_strings(folder):
    messages = [
        {"role": "system", "content": "count"},
        {"role": "user", "content": [image("images/b.png")]},
        {"role": "assistant", "content": [text("1")]},
        {"role": "user", "content": "and now?"},
    ]
    [prompt], rejections = load(folder, row(messages=messages))
    assert rejections == []
    assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in prompt.messages[::3]] == [[text("count")], [text("and now?")]]


def test_other_columns_are_not_read_and_source_has_a_default(folder):
    plain = row(difficulty=3, id="x")
    del plain["source"]
    [prompt], rejections = load(folder, plain)
    assert (prompt.source, rejections) == ("train", [])


def test_empty_lines_byte_order_mark_and_line_ends(folder):
    line = json.dumps(row(text("a\u2028b")), ensure_ascii=False).encode()
    file = folder / "train.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    prompts, rejections = load_prompts(file)
    assert [(prompt.index, prompt.row) for prompt in prompts] == [(0, 1), (1, 4)]
    assert prompts[1].messages[0]["content"] == [text("a\u2028b")]
    assert rejections == []


def message(**changes):
    return row(messages=[{"role": "user", "content": "?", **changes}])


def without(key):
    return {k: v for k, v in row().items() if k != key}


@pytest.mark.parametrize(
    ("bad", "item", "reason"),
    [
        (b"{", "row", "not JSON in UTF-8"),
        (b"\xff\xfe", "row", "not JSON in UTF-8"),
        (b"[" * 100_000, "row", "not JSON in UTF-8"),
        (b'{"answer": ' + b"[" * 900 + b"]" * 900 + b', "prompt": "?"}', "answer", "a list ('[[[["),
        (b'{"prompt": "?", "answer": NaN}', "row", "NaN is no number of JSON"),
        (b'{"prompt": "?", "answer": ' + b"9" * 5000 + b"}", "row", "not JSON in UTF-8: Exceeds the limit"),
        (b"[1]", "row", "a list ('[1]'), not an object"),
        (b"null", "row", "missing or null, not an object"),
        (without("messages"), "row", "has none of the columns messages, prompt, problem, question, input_ids"),
        (row(messages=[]), "messages", "not a list of at least one message"),
        (row(messages="hello"), "messages", "a string ('hello'), not a list"),
        (row(messages=["hello"]), "messages[0]", "a string ('hello'), not an object"),
        (row(messages=[{"role": "user"}]), "messages[0]", "has no key 'content'"),
        (message(content=None), "messages[0]", "has no key 'content'"),
        (message(name="x"), "messages[0]", "unknown key 'name'; accepted: content, role"),
        (message(role="bot"), "messages[0].role", "'bot'; accepted: system, user, assistant"),
        (message(role=["user"]), "messages[0].role", "accepted: system, user, assistant"),
        (message(role="assistant"), "messages[0].role", "'assistant': a prompt ends with 'user'"),
        (message(content=7), "messages[0].content", "a number ('7'), not a string or a list"),
        (message(content=[]), "messages[0].content", "not a string or a list of at least one part"),
        (row("text"), "messages[0].content[0]", "a string ('text'), not an object"),
        (row({"text": "?"}), "messages[0].content[0].type", "'None' is not supported; accepted: text, image, video"),
        (row({"type": []}), "messages[0].content[0].type", "'[]' is not supported"),
        (row({"type": "audio", "audio": "a.wav"}), "messages[0].content[0].type", "'audio' is not supported"),
        (row({"type": "text"}), "messages[0].content[0]", "has no key 'text'"),
        (row({"type": "image"}), "messages[0].content[0]", "has no key 'image', and the row has no column images"),
        (row({"type": "image"}, image()), "messages[0].content[0]", "names no image, though another part"),
        (
            row({**image(), "max_pixels": 9}),
            "messages[0].content[0]",
            "unknown key 'max_pixels'; accepted: base64, image, path, type, url",
        ),
        (row({**image(), "url": "https://a.b/c"}), "messages[0].content[0]", "has image and url: only one"),
        (row(text(None)), "messages[0].content[0]", "has no key 'text'"),
        (row(text(3)), "messages[0].content[0].text", "a number ('3'), not a string"),
        (row(text("\ud800")), "messages[0].content[0].text", "lone surrogate"),
        (without("answer"), "answer", "missing or null; accepted: answer, solution, reward_model.ground_truth"),
        (row(answer=None), "answer", "missing or null"),
        (row(answer=True), "answer", "a boolean ('True'), not a string or a number"),
        (row(answer=["7"]), "answer", "a list (\"['7']\"), not a string or a number"),
        (row(answer={"a": 1}), "answer", "an object"),
        (row(answer="\udfff"), "answer", "lone surrogate"),
        (row(source=3), "source", "a number ('3'), not a string"),
        (row(source=["x"], data_source="y"), "source", "a list"),
    ],
)
def test_bad_rows_are_rejected_by_name(folder, bad, item, reason):
    prompts, [rejection] = load(folder, row(), bad, row())
    assert [(prompt.index, prompt.row) for prompt in prompts] == [(0, 1), (1, 3)]
    assert (rejection.row, rejection.item) == (2, item)
    assert reason in rejection.reason and "\n" not in rejection.reason


def test_a_column_nested_as_deeply_as_json_allows(folder):
    """Whatever the depth at which Python gives up, to parse or to name the value: one rejection."""
    depths = (990, 5_000, 20_000, 50_000)
    bad = [b'{"prompt": "?", "answer": ' + b"[" * depth + b"]" * depth + b"}" for depth in depths]
    prompts, rejections = load(folder, *bad, row())
    assert [prompt.row for prompt in prompts] == [5]
    assert [rejection.row for rejection in rejections] == [1, 2, 3, 4]


def test_a_data_set_is_a_sequence_that_reads_on_demand(folder, monkeypatch):
    rows = [row(answer=str(i % 3), source="ab"[i % 2]) for i in range(9)]
    prompts, rejections = load(folder, *rows[:4], b"{", *rows[4:])
    assert len(prompts) == 9 and len(rejections) == 1
    assert prompts.answers == [str(i % 3) for i in range(9)] and prompts.sources == list("ababababa")
    assert [(p.index, p.row) for p in prompts] == [*((i, i + 1) for i in range(4)), *((i, i + 2) for i in range(4, 9))]
    assert prompts[-1] == prompts[8] and prompts[-1].index == 8
    assert Counter(prompt.answer for prompt in prompts) == {"0": 3, "1": 3, "2": 3}
    sampled = PromptSampler(prompts, 3).batch(0, 9)
    assert sorted(prompt.index for prompt in sampled) == list(range(9))
    with pytest.raises(IndexError):
        prompts[9]
    part = prompts[2:7:2]
    assert isinstance(part, PromptSet) and [prompt.index for prompt in part] == [2, 4, 6]
    assert part.answers == ["2", "1", "0"] and part[1:][0] == prompts[4] and prompts[:None].answers == prompts.answers
    assert len(prompts[:0]) == 0 and not prompts[:0]
    # What is asked for later comes from the file, not from memory.
    opened = []
    monkeypatch.setattr(Path, "open", lambda path, mode, _open=Path.open: opened.append(path) or _open(path, mode))
    assert prompts[5].answer == "2" and opened == [folder / "train.jsonl"]


def test_data_that_changes_under_a_run_is_named(folder):
    prompts, _ = load(folder, row(), row(text("two")))
    (folder / "images" / "a.png").unlink()
    with pytest.raises(UserError, match=r"train.jsonl row 1, messages\[0\].content\[0\].image: .*no such file"):
        prompts[0]
    assert content(prompts[1]) == ["two"]
    (folder / "train.jsonl").write_bytes(b"\n" * (folder / "train.jsonl").stat().st_size)
    with pytest.raises(UserError, match="train.jsonl row 2, row: is empty; the row was accepted when the run began"):
        prompts[1]
    (folder / "train.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        prompts[1]


def test_a_missing_file_is_named(folder):
    with pytest.raises(UserError, match=r"data file .*/nowhere/train.jsonl does not exist"):
        load_prompts(folder / "nowhere" / "train.jsonl")
    with pytest.raises(UserError, match=r"data file .*/test.jsonl does not exist"):
        load_prompts(folder / "test.jsonl")


def test_an_empty_file_has_no_rows(folder):
    (folder / "train.jsonl").touch()
    prompts, rejections = load_prompts(folder / "train.jsonl")
    assert len(prompts) == 0 and rejections == [] and list(prompts) == []


def test_rows_are_counted_over_shards(folder):
    files = [write(folder, row(), b"{", name="train-0.jsonl"), write(folder, row(answer="8"), name="train-1.jsonl")]
    # Each file ends with a newline, after which an empty line counts as none.
    prompts, rejections = load_prompts(files)
    assert [(prompt.index, prompt.row, prompt.answer) for prompt in prompts] == [(0, 1, "7"), (1, 3, "8")]
    assert [rejection.row for rejection in rejections] == [2]
