"""What the tests of all generators ask of a data folder."""

import hashlib
import json
from pathlib import Path


def rows(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def parts(row: dict) -> list[dict]:
    """The content of a row's only message, which is the user's."""
    (message,) = row["messages"]
    assert message["role"] == "user"
    return message["content"]


def digest(folder: Path) -> str:
    """SHA-256 of names and bytes of all files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)
    return hashlib.sha256(content).hexdigest()


def examples(folder: Path, split: str) -> set[tuple]:
    """Each row with the bytes of its media in place of their names: what a policy is asked, and the answer."""
    found = set()
    for row in rows(folder, split):
        asked = tuple(
            (folder / part[part["type"]]).read_bytes() if part["type"] != "text" else part["text"]
            for part in parts(row)
        )
        found.add((asked, row["answer"]))
    return found


def assert_held_out(folder: Path) -> None:
    """No example is in both files, and none twice in one."""
    train, test = examples(folder, "train"), examples(folder, "test")
    assert (len(train), len(test)) == (len(rows(folder, "train")), len(rows(folder, "test")))
    assert not {asked for asked, _ in train} & {asked for asked, _ in test}
