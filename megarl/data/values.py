"""What a conversation and a row of tokens both read from a row: texts, and columns of media."""

from collections.abc import Sequence
from typing import Any

from megarl.data.prompt import Kind
from megarl.data.rejection import BadRow, describe

MEDIA_COLUMNS: dict[Kind, tuple[str, str]] = {"image": ("images", "image"), "video": ("videos", "video")}


def first_of(row: dict[str, Any], names: Sequence[str]) -> str | None:
    """The first of the names whose value is not null."""
    return next((name for name in names if row.get(name) is not None), None)


def text(value: Any, item: str) -> str:
    """A string of characters.

    Raises:
        BadRow: it is not one.
    """
    if not isinstance(value, str):
        raise BadRow(item, f"{describe(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(item, "holds a lone surrogate, which is not a character") from error
    return value


def media_column(row: dict[str, Any], kind: Kind) -> tuple[str, list[tuple[str, Any]]]:
    """The column with a row's media of a kind, and of each medium its place in the row and its value.

    One value and a list of one are the same.

    Raises:
        BadRow: both names of the column hold media.
    """
    filled = [name for name in MEDIA_COLUMNS[kind] if row.get(name) not in (None, [])]
    if len(filled) > 1:
        raise BadRow(filled[1], f"the row has {' and '.join(filled)}: only one of them may hold media")
    if not filled:
        return MEDIA_COLUMNS[kind][0], []
    (name,) = filled
    value = row[name]
    if isinstance(value, list):
        return name, [(f"{name}[{place}]", medium) for place, medium in enumerate(value)]
    return name, [(name, value)]
