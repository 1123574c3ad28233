import base64
from pathlib import Path

import pytest

from megarl.data.media_values import MediaReader
from megarl.data.prompt import MediaSource
from megarl.data.rejection import BadRow

BYTES = b"\x89PNG, or what calls itself so"
SPELLED = base64.b64encode(BYTES).decode()
ROW = "train.jsonl row 7"


def read(folder, value, **options):
    return MediaReader(folder, **options).read("image", value, "images[0]", ROW)


@pytest.mark.parametrize(
    "path", ["images/a.png", "./images/../images/a.png", "images//a.png", {"path": "images/a.png", "bytes": None}]
)
def test_paths_lie_in_the_data_folder(folder, path):
    source = read(folder, path)
    assert source.path == folder.resolve() / "images" / "a.png" and source.data is None
    assert source.name == (path if isinstance(path, str) else "images/a.png") and source.kind == "image"
    assert source.key == read(folder, "images/a.png").key


def test_absolute_paths_and_links_inside_the_folder(folder):
    (folder / "link.png").symlink_to("images/b.png")
    assert read(folder, str(folder / "images" / "b.png")).path == read(folder, "link.png").path
    (folder.parent / "seen").symlink_to(folder)
    assert read(folder.parent / "seen", "images/a.png") == read(folder, "images/a.png")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("images/c.png", "'images/c.png': no such file in"),
        ("images", "'images': no such file in"),
        ("", "'': no such file in"),
        ("../outside.png", "'../outside.png' leaves the data folder"),
        ("/etc/passwd", "'/etc/passwd' leaves the data folder"),
        ("link.png", "'link.png' leaves the data folder"),
        ("folder/outside.png", "leaves the data folder"),
        ("loop.png", "'loop.png': no such file in"),
        ("images/a.png/b.png", "no such file in"),
        (".", "'.'"),
        ("a" * 5000, "aaa': no such file in"),
        ("a\0b", "is not a path: ValueError"),
        ("\ud800.png", "'\\ud800.png'"),
        ("file:///etc/passwd", "file:// is not supported; accepted: paths, data:, http://, https://"),
        ("s3://bucket/a.png", "s3:// is not supported"),
        ("https://example.org/a.png", "is on the network: download it, or set data.allow_remote = true"),
        ("HTTP://example.org/a.png", "is on the network"),
        ({"path": "https://example.org/a.png"}, "is on the network"),
        ("data:image/png,abc", "is not a data URI in base64"),
        ("data:image/png;base64", "is not a data URI in base64"),
        ("data:image/png;base64,####", "'####' is not base64"),
        ("data:image/png;base64,abc", "is not base64"),
        ("data:image/png;base64,", "has no bytes"),
        ("data:image/png;base64,ü", "is not base64"),
        (b"", "has no bytes"),
        ({"bytes": None, "path": None}, "has neither bytes nor a path"),
        ({}, "has neither bytes nor a path"),
        ({"bytes": SPELLED, "url": "x"}, "unknown key 'url'; accepted: bytes, path"),
        ({"path": 3}, "a number ('3'), not a path or bytes"),
        (["images/a.png"], "a list"),
        (None, "missing or null, not a path or bytes"),
    ],
)
def test_what_is_no_medium(folder, value, reason):
    (folder / "link.png").symlink_to("../outside.png")
    (folder / "folder").symlink_to("..")
    (folder / "loop.png").symlink_to("loop.png")
    with pytest.raises(BadRow) as error:
        read(folder, value)
    assert error.value.item == "images[0]"
    assert reason in error.value.reason and "\n" not in error.value.reason and len(error.value.reason) < 600


def test_other_folders_that_media_may_lie_in(folder, tmp_path):
    more = tmp_path / "more"
    (more / "images").mkdir(parents=True)
    for name in ("a", "z"):
        (more / "images" / f"{name}.png").write_bytes(b"z")
    (folder / "link.png").symlink_to(more / "images" / "z.png")
    options = {"more": [more]}
    assert read(folder, "images/z.png", **options).path == (more / "images" / "z.png").resolve()
    assert read(folder, str(more / "images" / "z.png"), **options).path == read(folder, "link.png", **options).path
    # The data folder goes first.
    assert read(folder, "images/a.png", **options).path == folder.resolve() / "images" / "a.png"
    with pytest.raises(BadRow, match="leaves the data folder"):
        read(folder, "../outside.png", **options)
    with pytest.raises(BadRow, match="no such file in .* or in data.media_folders"):
        read(folder, "images/y.png", **options)
    with pytest.raises(BadRow, match="leaves the data folder"):
        read(folder, "link.png")


@pytest.mark.parametrize(
    "value",
    [
        BYTES,
        {"bytes": BYTES, "path": None},
        {"bytes": BYTES, "path": "images/a.png"},
        f"data:image/png;base64,{SPELLED}",
        f"DATA:image/png;BASE64,{SPELLED[:8]}\n{SPELLED[8:]}",
    ],
)
def test_bytes_in_the_row(folder, value):
    source = read(folder, value)
    assert source == MediaSource("image", "train.jsonl row 7 images[0]", data=BYTES)
    assert source.key == read(folder, BYTES).key != MediaReader(folder).read("video", BYTES, "video", ROW).key
    assert repr(BYTES) not in repr(source)


def test_base64_of_its_own(folder):
    reader = MediaReader(folder)
    for value in (SPELLED, f"data:;base64,{SPELLED}"):
        assert reader.read_base64("video", value, "messages[0].content[0].base64", ROW).data == BYTES
    with pytest.raises(BadRow, match=r"'images/a.png' is not base64"):
        reader.read_base64("video", "images/a.png", "x", ROW)


def test_names_are_of_one_line(folder):
    path = Path("images") / "a\nb.png"
    (folder / path).write_bytes(b"x")
    source = read(folder, str(path))
    assert source.path == folder.resolve() / path and source.name == r"'images/a\nb.png'"
