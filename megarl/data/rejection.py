"""Rows that a run leaves out: by name, counted, and never repaired."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UserError, one_line


@dataclass(frozen=True)
class Rejection:
    row: int
    """`Prompt.row`: place in the file or files, from 1."""
    item: str
    """What is wrong in the row, as a path into it: `messages[0].content[1].image`; `row` for all of it."""
    reason: str
    """Why, in one line."""


class BadRow(Exception):
    """A row that cannot become a prompt: a rejection that does not know its row yet."""

    def __init__(self, item: str, reason: str):
        self.item = item
        self.reason = one_line(reason)
        super().__init__(item, self.reason)


def describe(value: Any) -> str:
    """A value of the wrong type in an error message: short, and in JSON's words where JSON has one."""
    if value is None:
        return "missing or null"
    words = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return f"{words.get(type(value), f'of type {type(value).__name__}')} ({str(value)[:40]!r})"


def write_rejections(rejections: Sequence[Rejection], file: Path) -> None:
    """Write one JSON object a line: `row`, `item`, `reason`; an empty file where nothing was rejected."""
    file.write_text("".join(json.dumps(asdict(rejection)) + "\n" for rejection in rejections))


def read_rejections(file: Path) -> list[Rejection]:
    """What `write_rejections` wrote; none where there is no such file.

    Raises:
        ValueError: the file holds something else.
    """
    if not file.is_file():
        return []
    try:
        return [Rejection(**json.loads(line)) for line in file.read_text().splitlines()]
    except TypeError as error:
        raise ValueError(f"{file} holds no rejections: {error}") from error


def check_rejected(name: str | Path, accepted: int, rejections: Sequence[Rejection], ceiling: float) -> None:
    """Refuse data of which too much was rejected.

    Args:
        name: the file or files, for the message.
        accepted: prompts that are left.
        ceiling: accepted share of rejected rows, 0 to 1 (`data.max_rejected_fraction`).

    Raises:
        UserError: the share is above the ceiling, or no prompt is left.
    """
    rows = accepted + len(rejections)
    if rows == 0:
        raise UserError(f"data file {name} has no rows")
    if not accepted or len(rejections) > ceiling * rows:
        first = rejections[0]
        raise UserError(
            f"data file {name}: {len(rejections)} of {rows} rows were rejected, "
            f"data.max_rejected_fraction = {ceiling} accepts {int(ceiling * rows)}; "
            f"the first: row {first.row}, {first.item}: {first.reason}"
        )
