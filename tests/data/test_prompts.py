import hashlib
import json
from pathlib import Path

import pytest
from PIL import Image

from megarl.data.prompts import check_rejected, dataset_hash, load_prompts, write_rejections
from megarl.errors import UserError
from megarl.media.expand import PromptTooLong
from megarl.media.image import MediaError, load_image


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for name in ("a", "b"):
        Image.new("RGB", (4, 4)).save(folder / "images" / f"{name}.png")
    (folder / "images" / "broken.png").write_bytes(b"no picture")
    Image.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    return folder


def image(name="images/a.png"):
    return {"type": "image", "image": name}


def text(value="?"):
    return {"type": "text", "text": value}


def row(*content, **changes):
    messages = [{"role": "user", "content": list(content) or [image(), text()]}]
    return {"messages": messages, "answer": "7", "source": "digits", **changes}


def write(folder: Path, *rows, name="train.jsonl") -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return folder / name


def load(folder, *rows, **options):
    return load_prompts(write(folder, *rows), **options)


def test_a_row_becomes_a_prompt(folder):
    [prompt], rejections = load(folder, row())
    assert rejections == []
    path = folder / "images" / "a.png"
    assert prompt.messages == ({"role": "user", "content": [{"type": "image", "image": path}, text()]},)
    assert (prompt.index, prompt.answer, prompt.source) == (0, "7", "digits")
    assert prompt.media_paths == (path,)


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
    assert [prompt.index for prompt in prompts] == [0, 1]
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
        (b"[1]", "row", "a list ('[1]'), not an object"),
        (b"null", "row", "missing or null, not an object"),
        (without("messages"), "messages", "missing or null, not a list of at least one message"),
        (row(messages=[]), "messages", "not a list of at least one message"),
        (row(messages="hello"), "messages", "a string ('hello'), not a list"),
        (row(messages=["hello"]), "messages[0]", "a string ('hello'), not an object"),
        (row(messages=[{"role": "user"}]), "messages[0]", "has no key 'content'"),
        (message(name="x"), "messages[0]", "unknown key 'name'; accepted: content, role"),
        (message(role="bot"), "messages[0].role", "'bot'; accepted: system, user, assistant"),
        (message(role=["user"]), "messages[0].role", "accepted: system, user, assistant"),
        (message(role="assistant"), "messages[0].role", "'assistant': a prompt ends with 'user'"),
        (message(content=7), "messages[0].content", "a number ('7'), not a string or a list"),
        (message(content=[]), "messages[0].content", "not a string or a list of at least one part"),
        (row("text"), "messages[0].content[0]", "a string ('text'), not an object"),
        (row({"text": "?"}), "messages[0].content[0].type", "None is not supported; accepted: text, image"),
        (row({"type": []}), "messages[0].content[0].type", "[] is not supported"),
        (
            row(text(), {"type": "video", "video": "a.mp4"}),
            "messages[0].content[1].type",
            "'video' is not supported; accepted: text, image",
        ),
        (row({"type": "image"}), "messages[0].content[0]", "has no key 'image'"),
        (
            row({**image(), "max_pixels": 9}),
            "messages[0].content[0]",
            "unknown key 'max_pixels'; accepted: image, type",
        ),
        (row(text(None)), "messages[0].content[0].text", "missing or null, not a string"),
        (row(text("\ud800")), "messages[0].content[0].text", "lone surrogate"),
        (row(image(3)), "messages[0].content[0].image", "a number ('3'), not a string"),
        (row(image("images/c.png")), "messages[0].content[0].image", "'images/c.png': no such file in"),
        (row(image("images")), "messages[0].content[0].image", "'images': no such file in"),
        (row(image("https://a.b/c.png")), "messages[0].content[0].image", "no such file in"),
        (row(image("../outside.png")), "messages[0].content[0].image", "leaves the data folder"),
        (row(image("/etc/passwd")), "messages[0].content[0].image", "leaves the data folder"),
        (row(image("link.png")), "messages[0].content[0].image", "leaves the data folder"),
        (row(image("loop.png")), "messages[0].content[0].image", "'loop.png'"),
        (row(image("a" * 5000)), "messages[0].content[0].image", "is not a path: OSError"),
        (row(image("a\0b")), "messages[0].content[0].image", "is not a path: ValueError"),
        (row(text(), image("images/broken.png")), "messages[0].content[1].image", "not a picture in any of"),
        (without("answer"), "answer", "missing or null, not a string"),
        (row(answer=7), "answer", "a number ('7'), not a string"),
        (row(answer=True), "answer", "a boolean ('True'), not a string"),
        (row(source=None), "source", "missing or null, not a string"),
    ],
)
def test_bad_rows_are_rejected_by_name(folder, bad, item, reason):
    (folder / "link.png").symlink_to("../outside.png")
    (folder / "loop.png").symlink_to("loop.png")
    prompts, [rejection] = load(folder, row(), bad, row())
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert (rejection.row, rejection.item) == (2, item)
    assert reason in rejection.reason and "\n" not in rejection.reason


def test_each_picture_is_checked_once(folder):
    seen = []

    def check(path):
        seen.append(path.name)
        load_image(path)

    rows = [
        row(),
        row(image("images/../images/a.png")),
        row(image("images/broken.png")),
        row(image("images/b.png")),
    ]
    prompts, rejections = load(folder, *rows, row(image("images/broken.png"), image()), check_image=check)
    assert sorted(seen) == ["a.png", "b.png", "broken.png"]
    assert [prompt.media_paths[0].name for prompt in prompts] == ["a.png", "a.png", "b.png"]
    assert [rejection.row for rejection in rejections] == [3, 5]


def test_whole_prompts_are_checked_too(folder):
    def check(prompt):
        seen.append(prompt.index)
        if prompt.answer == "long":
            raise PromptTooLong(prompt.index, "9 tokens, but max_prompt_tokens = 8")
        if prompt.answer == "odd":
            raise MediaError(prompt.media_paths[0], "aspect ratio")

    seen = []
    rows = [row(answer="long"), row(), row(text(), image("images/b.png"), answer="odd"), row()]
    prompts, rejections = load(folder, *rows, check_prompt=check)
    assert seen == [0, 0, 1, 1]
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert [(r.row, r.item) for r in rejections] == [(1, "messages"), (3, "messages[0].content[1].image")]
    assert rejections[0].reason == "9 tokens, but max_prompt_tokens = 8"
    assert rejections[1].reason.endswith("b.png: aspect ratio")


def test_a_bug_in_a_check_is_not_a_rejection(folder):
    with pytest.raises(ZeroDivisionError):
        load(folder, row(), check_image=lambda path: 1 / 0)


def test_rejections_are_written(folder):
    _, rejections = load(folder, b"{", row(answer=7))
    file = folder / "rejected.jsonl"
    write_rejections(rejections, file)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["row"], r["item"]) for r in written] == [(1, "row"), (2, "answer")]
    assert written[1]["reason"] == "a number ('7'), not a string"
    write_rejections([], file)
    assert file.read_bytes() == b""


def test_a_ceiling_on_rejected_rows(folder):
    file = write(folder, row(), row(answer=7), row(), row())
    prompts, rejections = load_prompts(file)
    check_rejected(file, prompts, rejections, 0.25)
    with pytest.raises(UserError) as error:
        check_rejected(file, prompts, rejections, 0.24)
    assert str(error.value) == (
        f"data file {file}: 1 of 4 rows were rejected, data.max_rejected_fraction = 0.24 accepts 0; "
        "the first: row 2, answer: a number ('7'), not a string"
    )
    with pytest.raises(UserError, match="1 of 1 rows were rejected"):
        check_rejected(file, [], rejections, 1.0)
    with pytest.raises(UserError, match="has no rows"):
        check_rejected(file, [], [], 1.0)


def test_a_missing_folder_or_file_is_named(folder):
    with pytest.raises(UserError, match=r"data folder .*/nowhere does not exist \(for train.jsonl\)"):
        load_prompts(folder / "nowhere" / "train.jsonl")
    with pytest.raises(UserError, match=r"data file .*/test.jsonl does not exist"):
        load_prompts(folder / "test.jsonl")


def test_the_hash_is_that_of_the_bytes(folder):
    first, second = write(folder, row()), write(folder, row(text()), name="test.jsonl")
    content = first.read_bytes() + second.read_bytes()
    assert dataset_hash([first, second]) == hashlib.sha256(content).hexdigest()
    assert dataset_hash([second, first]) != dataset_hash([first, second])
