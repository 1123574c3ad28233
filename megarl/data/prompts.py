"""Prompts from JSONL files.  Bad rows are rejected by name before a run begins, and never repaired."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.data.prompt import Prompt
from megarl.errors import MediaError, PromptError, UserError
from megarl.media.image import load_image

ROLES = ("system", "user", "assistant")
PART_TYPES = ("text", "image")


@dataclass(frozen=True)
class Rejection:
    row: int
    """Line in the file, from 1."""
    item: str
    """What is wrong in the row, as a path into it: `messages[0].content[1].image`; `row` for all of it."""
    reason: str
    """Why, in one line."""


def load_prompts(
    file: Path,
    check_image: Callable[[Path], object] = load_image,
    check_prompt: Callable[[Prompt], object] | None = None,
    threads: int = 8,
) -> tuple[list[Prompt], list[Rejection]]:
    """Read a JSONL file of chat prompts.

    A row is `{"messages": [...], "answer": "7", "source": "digits"}`; other keys are columns of the data set
    and are not read.  A message has `role` (`ROLES`) and `content`: a string, or a list of parts
    `{"type": "text", "text": ...}` and `{"type": "image", "image": path}`, where the path is relative to the
    file's folder and stays in it.  The last message is the user's.  `source` may be missing: then it is the
    file's name without its suffix.

    Args:
        file: the JSONL file, in UTF-8; empty lines are skipped.
        check_image: called once for each distinct picture, in a pool of `threads` threads; raises
            `MediaError` for one that cannot be used.
        check_prompt: called for each prompt that is left, in order; raises `MediaError` or `PromptError`.
            `Encoder.encode` finds prompts that are too long and pictures that the image processor refuses.

    Returns:
        The prompts in file order, with absolute media paths; and of each other row the first thing that is
        wrong with it.

    Raises:
        UserError: the file or its folder does not exist.
    """
    if not file.parent.is_dir():
        raise UserError(f"data folder {file.parent} does not exist (for {file.name})")
    if not file.is_file():
        raise UserError(f"data file {file} does not exist")

    folder = file.parent.resolve()
    parsed: dict[int, Prompt] = {}
    rejections: list[Rejection] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            parsed[number] = _parse_row(line, folder, file.stem)
        except _BadRow as bad:
            rejections.append(Rejection(number, bad.item, bad.reason))

    broken = _broken_images({path for prompt in parsed.values() for path in prompt.media_paths}, check_image, threads)
    prompts = []
    for number, prompt in parsed.items():
        prompt = replace(prompt, index=len(prompts))
        try:
            _check(prompt, broken, check_prompt)
        except _BadRow as bad:
            rejections.append(Rejection(number, bad.item, bad.reason))
        else:
            prompts.append(prompt)
    return prompts, sorted(rejections, key=lambda rejection: rejection.row)


def write_rejections(rejections: Sequence[Rejection], file: Path) -> None:
    """Write one JSON object a line: `row`, `item`, `reason`; an empty file where nothing was rejected."""
    file.write_text("".join(json.dumps(asdict(rejection)) + "\n" for rejection in rejections))


def check_rejected(file: Path, prompts: Sequence[Prompt], rejections: Sequence[Rejection], ceiling: float) -> None:
    """Refuse a data file of which too much was rejected.

    Args:
        ceiling: accepted share of rejected rows, 0 to 1 (`data.max_rejected_fraction`).

    Raises:
        UserError: the share is above the ceiling, or no prompt is left.
    """
    rows = len(prompts) + len(rejections)
    if rows == 0:
        raise UserError(f"data file {file} has no rows")
    if not prompts or len(rejections) > ceiling * rows:
        first = rejections[0]
        raise UserError(
            f"data file {file}: {len(rejections)} of {rows} rows were rejected, "
            f"data.max_rejected_fraction = {ceiling} accepts {int(ceiling * rows)}; "
            f"the first: row {first.row}, {first.item}: {first.reason}"
        )


def dataset_hash(files: Iterable[Path]) -> str:
    """SHA-256, in hexadecimal, of the files' bytes one after the other: what `cat FILES | sha256sum` prints.

    It covers the rows and their order, not the media files that they name.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _BadRow(Exception):
    def __init__(self, item: str, reason: str):
        self.item = item
        self.reason = reason


def _parse_row(line: bytes, folder: Path, default_source: str) -> Prompt:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _BadRow("row", f"not JSON in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise _BadRow("row", f"{_name(row)}, not an object")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _BadRow("messages", f"{_name(messages)}, not a list of at least one message")
    messages = tuple(_parse_message(message, f"messages[{i}]", folder) for i, message in enumerate(messages))
    if messages[-1]["role"] != "user":
        raise _BadRow(f"messages[{len(messages) - 1}].role", f"{messages[-1]['role']!r}: a prompt ends with 'user'")
    return Prompt(-1, messages, _text(row, "answer"), _text(row, "source") if "source" in row else default_source)


def _parse_message(message: Any, item: str, folder: Path) -> dict:
    _check_keys(message, item, {"role", "content"})
    if message["role"] not in ROLES:
        raise _BadRow(f"{item}.role", f"{message['role']!r}; accepted: {', '.join(ROLES)}")
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise _BadRow(f"{item}.content", f"{_name(content)}, not a string or a list of at least one part")
    parts = [_parse_part(part, f"{item}.content[{i}]", folder) for i, part in enumerate(content)]
    return {"role": message["role"], "content": parts}


def _parse_part(part: Any, item: str, folder: Path) -> dict:
    if not isinstance(part, dict):
        raise _BadRow(item, f"{_name(part)}, not an object")
    kind = part.get("type")
    if kind not in PART_TYPES:
        raise _BadRow(f"{item}.type", f"{kind!r} is not supported; accepted: {', '.join(PART_TYPES)}")
    _check_keys(part, item, {"type", kind})
    value = _text(part, kind, f"{item}.")
    return {"type": kind, kind: value if kind == "text" else _resolve(value, f"{item}.{kind}", folder)}


def _resolve(path: str, item: str, folder: Path) -> Path:
    try:
        resolved = (folder / path).resolve()
        inside = resolved.is_relative_to(folder)
        exists = inside and resolved.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, a loop of links
        raise _BadRow(item, f"{path[:200]!r} is not a path: {error.__class__.__name__}") from error
    if not inside:
        raise _BadRow(item, f"{path!r} leaves the data folder {folder}")
    if not exists:
        raise _BadRow(item, f"{path!r}: no such file in {folder}")
    return resolved


def _text(parent: dict, key: str, prefix: str = "") -> str:
    text = parent.get(key)
    if not isinstance(text, str):
        raise _BadRow(f"{prefix}{key}", f"{_name(text)}, not a string")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _BadRow(f"{prefix}{key}", "holds a lone surrogate, which is not a character")
    return text


def _check_keys(value: Any, item: str, keys: set[str]) -> None:
    if not isinstance(value, dict):
        raise _BadRow(item, f"{_name(value)}, not an object")
    if missing := keys - value.keys():
        raise _BadRow(item, f"has no key {min(missing)!r}")
    if unknown := value.keys() - keys:
        raise _BadRow(item, f"unknown key {min(unknown)!r}; accepted: {', '.join(sorted(keys))}")


def _name(value: Any) -> str:
    """A value of the wrong type in an error message: short, in JSON's words."""
    if value is None:
        return "missing or null"
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return f"{kinds[type(value)]} ({str(value)[:40]!r})"


def _check(prompt: Prompt, broken: dict[Path, str], check_prompt: Callable[[Prompt], object] | None) -> None:
    items = {
        part["image"]: f"messages[{i}].content[{j}].image"
        for i, message in enumerate(prompt.messages)
        for j, part in enumerate(message["content"])
        if part["type"] == "image"
    }
    for path, item in items.items():
        if path in broken:
            raise _BadRow(item, broken[path])
    try:
        if check_prompt:
            check_prompt(prompt)
    except MediaError as error:
        raise _BadRow(items.get(error.path, "messages"), str(error)) from error
    except PromptError as error:
        raise _BadRow("messages", error.reason) from error


def _broken_images(paths: set[Path], check_image: Callable[[Path], object], threads: int) -> dict[Path, str]:
    def reason(path: Path) -> str | None:
        try:
            check_image(path)
        except MediaError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(threads) as pool:
        ordered = sorted(paths)
        return {path: why for path, why in zip(ordered, pool.map(reason, ordered), strict=True) if why}
