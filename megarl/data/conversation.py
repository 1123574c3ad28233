"""Conversations of rows to messages, with each medium at its place.

Media stand in the parts of a message, or in columns of the row; then the places are parts without a medium
of their own, markers (`<image>`, `<video>`) in texts, or, where there are neither, the beginning.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.media_values import MediaReader
from megarl.data.prompt import Kind, MediaSource
from megarl.data.rejection import BadRow, describe
from megarl.data.values import MEDIA_COLUMNS, first_of, media_column, text

ROLES = ("system", "user", "assistant")
PART_TYPES = ("text", "image", "video")
CONVERSATION_COLUMNS = ("messages", "prompt", "problem", "question")


@dataclass(frozen=True)
class _Part:
    kind: str
    """One of `PART_TYPES`."""
    item: str
    """Its place in the row."""
    value: Any = None
    """Text, or the medium as the row gives it; None: a place for a medium of the row's columns."""
    base64: bool = False
    """The value is bytes, spelled."""
    whole: bool = False
    """The text was the message's whole content: markers may stand in it."""


@dataclass(frozen=True)
class _Message:
    role: str
    parts: list[_Part]


def read_conversation(
    row: dict[str, Any], media: MediaReader, row_name: str
) -> tuple[str, tuple[dict, ...], tuple[str, ...]]:
    """The column that holds the conversation, `Prompt.messages`, and the places of the media in the row.

    Raises:
        BadRow: there is none, or it is not well-formed.
    """
    column = first_of(row, CONVERSATION_COLUMNS)
    if column is None:
        raise BadRow("row", f"has none of the columns {', '.join(CONVERSATION_COLUMNS)}, input_ids")
    drafts = _drafts(row[column], column)
    if not any(part.kind != "text" and part.value is not None for draft in drafts for part in draft.parts):
        drafts = _fill(drafts, row)
    messages, items = [], []
    for draft in drafts:
        content = []
        for part in draft.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": text(part.value, part.item)})
            else:
                content.append({"type": part.kind, part.kind: _source(part, media, row_name)})
                items.append(part.item)
        messages.append({"role": draft.role, "content": content})
    return column, tuple(messages), tuple(items)


def _source(part: _Part, media: MediaReader, row_name: str) -> MediaSource:
    if part.value is None:
        raise BadRow(part.item, f"names no {part.kind}, though another part of the row does")
    if part.base64:
        return media.read_base64(part.kind, text(part.value, part.item), part.item, row_name)
    return media.read(part.kind, part.value, part.item, row_name)


def _drafts(value: Any, column: str) -> list[_Message]:
    if isinstance(value, str) and column != "messages":
        return [_Message("user", [_Part("text", column, value, whole=True)])]
    if not isinstance(value, list) or not value:
        kinds = "a list" if column == "messages" else "a string or a list"
        raise BadRow(column, f"{describe(value)}, not {kinds} of at least one message")
    drafts = [_draft(message, f"{column}[{i}]") for i, message in enumerate(value)]
    if drafts[-1].role != "user":
        raise BadRow(f"{column}[{len(drafts) - 1}].role", f"{drafts[-1].role!r}: a prompt ends with 'user'")
    return drafts


def _draft(message: Any, item: str) -> _Message:
    message = _known(message, item, {"role", "content"})
    for key in ("content", "role"):
        if key not in message:
            raise BadRow(item, f"has no key {key!r}")
    if message["role"] not in ROLES:
        raise BadRow(f"{item}.role", f"{str(message['role'])[:40]!r}; accepted: {', '.join(ROLES)}")
    content = message["content"]
    if isinstance(content, str):
        return _Message(message["role"], [_Part("text", f"{item}.content", content, whole=True)])
    if not isinstance(content, list) or not content:
        raise BadRow(f"{item}.content", f"{describe(content)}, not a string or a list of at least one part")
    return _Message(message["role"], [_part(part, f"{item}.content[{i}]") for i, part in enumerate(content)])


def _part(part: Any, item: str) -> _Part:
    if not isinstance(part, dict):
        raise BadRow(item, f"{describe(part)}, not an object")
    kind = part.get("type")
    if kind not in PART_TYPES:
        raise BadRow(f"{item}.type", f"{str(kind)[:40]!r} is not supported; accepted: {', '.join(PART_TYPES)}")
    if kind == "text":
        part = _known(part, item, {"type", "text"})
        if "text" not in part:
            raise BadRow(item, "has no key 'text'")
        return _Part(kind, f"{item}.text", part["text"])
    part = _known(part, item, {"type", kind, "path", "url", "base64"})
    keys = sorted(part.keys() - {"type"})
    if not keys:
        return _Part(kind, item)
    if len(keys) > 1:
        raise BadRow(item, f"has {' and '.join(keys)}: only one of them may name the {kind}")
    return _Part(kind, f"{item}.{keys[0]}", part[keys[0]], base64=keys[0] == "base64")


def _known(value: Any, item: str, keys: set[str]) -> dict[str, Any]:
    """An object without its nulls, in which nothing else is known than `keys`."""
    if not isinstance(value, dict):
        raise BadRow(item, f"{describe(value)}, not an object")
    value = {key: inner for key, inner in value.items() if inner is not None}
    if unknown := value.keys() - keys:
        raise BadRow(item, f"unknown key {min(unknown)[:40]!r}; accepted: {', '.join(sorted(keys))}")
    return value


def _fill(drafts: Sequence[_Message], row: dict[str, Any]) -> list[_Message]:
    """The messages with the media of the row's columns at their places.

    A kind of which the row has no media has no markers either: `<image>` is prose there.
    """
    columns = {kind: media_column(row, kind) for kind in MEDIA_COLUMNS}
    marked = [kind for kind, (_, values) in columns.items() if values]
    messages = [_Message(draft.role, _split(draft.parts, marked)) for draft in drafts]
    first = next(message for message in messages if message.role == "user")
    leading: list[_Part] = []
    for kind, (column, values) in columns.items():
        places = [part for message in messages for part in message.parts if part.kind == kind]
        if places and not values:
            names = " or ".join(MEDIA_COLUMNS[kind])
            raise BadRow(places[0].item, f"has no key {kind!r}, and the row has no column {names}")
        if places and len(places) != len(values):
            raise BadRow(
                column, f"{len(values)} {kind}s, but {len(places)} places for them (<{kind}>, or parts of type {kind})"
            )
        filled = [_Part(kind, item, value) for item, value in values]
        for part in filled:
            if part.value is None:
                raise BadRow(part.item, describe(None))
        if places:
            remaining = iter(filled)
            for message in messages:
                message.parts[:] = [next(remaining) if part.kind == kind else part for part in message.parts]
        else:
            leading += filled
    first.parts[:0] = leading
    return messages


def _split(parts: Sequence[_Part], kinds: Sequence[Kind]) -> list[_Part]:
    """The parts, with texts that are a message's whole content cut at the markers of `kinds`."""
    if not kinds:
        return list(parts)
    pattern = f"<({'|'.join(kinds)})>"
    cut = []
    for part in parts:
        if not part.whole:
            cut.append(part)
            continue
        pieces = re.split(pattern, text(part.value, part.item))
        for place, piece in enumerate(pieces):
            if place % 2:
                cut.append(_Part(piece, part.item))
            elif piece or len(pieces) == 1:
                cut.append(_Part("text", part.item, piece))
    return cut
