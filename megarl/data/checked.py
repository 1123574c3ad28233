"""What the check of a data set found: worked out once for a job, by all ranks together, and kept in the run folder."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.parse import ParsedRow, RowParser
from megarl.data.prompt import Prompt
from megarl.data.rejection import BadRow, Rejection, read_rejections, write_rejections
from megarl.data.rows import Rows
from megarl.errors import MediaError, PromptError

Check = Callable[[Sequence[Prompt]], Sequence[bytes | MediaError | PromptError]]
"""One result a prompt: 32 bytes that identify what it became (ids and pixels), or why it cannot be used."""

WINDOW = 64
"""Prompts that are checked at a time."""

type _Accepted = tuple[int, bytes | None, str, str]
"""Place, result of the check, answer, source."""


@dataclass(frozen=True)
class Ranks:
    """The processes that share a check.  The default is one alone."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = field(default=lambda value: [value])
    """Collective: every rank's value, in rank order.  `megarl.data` knows no torch.distributed."""


@dataclass(frozen=True, eq=False)
class Checked:
    """The accepted rows, with the little of them that is wanted of all rows at once."""

    places: np.ndarray
    """int64 `[accepted]`: places in the files, from 0."""
    answers: list[str]
    sources: list[str]
    rejections: list[Rejection]
    content_sha256: str | None
    """Over the 32 bytes of each accepted row in order, in hexadecimal; None where nothing was checked."""

    @property
    def rows(self) -> int:
        """Rows of the files, empty lines left out."""
        return len(self.places) + len(self.rejections)


def check_rows(rows: Rows, parser: RowParser, check: Check | None, ranks: Ranks, threads: int = 1) -> Checked:
    """Parse and check every row, each on one rank.  Collective over `ranks`.

    The rows are dealt out one by one, so that long videos at one end of a file do not fall to one rank.

    Args:
        check: None accepts whatever parses.
        threads: that parse; more than one pays where rows name URLs, which are fetched then.
    """
    everything: list[tuple[list[_Accepted], list[Rejection]]] = []
    mine = range(ranks.rank, len(rows), ranks.world)
    for start in range(0, math.ceil(len(rows) / ranks.world), WINDOW):
        accepted: list[_Accepted] = []
        rejections: list[Rejection] = []
        parsed: dict[int, ParsedRow] = {}
        for place, found in _parse(rows, parser, mine[start : start + WINDOW], threads):
            if isinstance(found, BadRow):
                rejections.append(Rejection(place + 1, found.item, found.reason))
            elif found is not None:
                parsed[place] = found
        prompts = [row.prompt for row in parsed.values()]
        results = check(prompts) if check and prompts else [None] * len(prompts)
        for (place, row), result in zip(parsed.items(), results, strict=True):
            if isinstance(result, MediaError | PromptError):
                rejections.append(_rejection(place + 1, row, result))
            else:
                accepted.append((place, result, row.prompt.answer, row.prompt.source))
        # At every window, so that no rank is ahead by the minutes after which a collective gives up.
        everything += ranks.gather((accepted, rejections))
    accepted = sorted(row for part, _ in everything for row in part)
    names: dict[str, str] = {}  # one string object for equal texts
    digest = hashlib.sha256(b"".join(result for _, result, _, _ in accepted)).hexdigest() if check else None
    return Checked(
        np.array([place for place, _, _, _ in accepted], np.int64),
        [names.setdefault(answer, answer) for _, _, answer, _ in accepted],
        [names.setdefault(source, source) for _, _, _, source in accepted],
        sorted((rejection for _, part in everything for rejection in part), key=lambda rejection: rejection.row),
        digest,
    )


def read_row(rows: Rows, parser: RowParser, place: int) -> ParsedRow | None:
    """The parsed row at a place, from 0; None for an empty line.

    Raises:
        BadRow: it cannot become a prompt.
    """
    try:
        row = rows[place]
        return None if row is None else parser.parse(row, place + 1)
    except RecursionError as error:  # lists in lists in lists, in a column that is named in a message
        raise BadRow("row", "is nested too deeply") from error


def _parse(
    rows: Rows, parser: RowParser, places: Sequence[int], threads: int
) -> Iterator[tuple[int, ParsedRow | BadRow | None]]:
    def parse(place: int) -> ParsedRow | BadRow | None:
        try:
            return read_row(rows, parser, place)
        except BadRow as bad:
            return bad

    if threads == 1:
        yield from ((place, parse(place)) for place in places)
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield from zip(places, pool.map(parse, places), strict=True)


def _rejection(number: int, row: ParsedRow, error: MediaError | PromptError) -> Rejection:
    if isinstance(error, PromptError):
        return Rejection(number, row.column, " ".join(error.reason.split()))
    items = {source.name: item for source, item in reversed(list(zip(row.prompt.media, row.items, strict=True)))}
    return Rejection(number, items.get(error.name, row.column), str(error))


class Ledger:
    """`data_<split>.json`, `data_<split>.npz` and `rejected_<split>.jsonl` in the run folder.

    The first says what was checked and is written last: without it the others count for nothing.
    """

    def __init__(self, folder: Path, split: str, settings: dict[str, Any]):
        """`settings` is all that decides what a row becomes, beside the files: as JSON has it."""
        self._report = folder / f"data_{split}.json"
        self._accepted = folder / f"data_{split}.npz"
        self._rejected = folder / f"rejected_{split}.jsonl"
        self._settings = json.loads(json.dumps(settings))

    def read(self, sha256: str) -> Checked | None:
        """What a check of the same files under the same settings found; None where there was none."""
        try:
            report = json.loads(self._report.read_text())
            if (report["sha256"], report["settings"]) != (sha256, self._settings):
                return None
            with np.load(self._accepted, allow_pickle=False) as kept:
                places = kept["places"]
                answers, sources = _unpack(kept["answers"]), _unpack(kept["sources"])
            found = Checked(places, answers, sources, read_rejections(self._rejected), report["content_sha256"])
            whole = len(places) == len(answers) == len(sources) == report["accepted"]
            return found if whole and len(found.rejections) == report["rejected"] else None
        except (OSError, ValueError, KeyError, TypeError, EOFError):  # none, or half of one, or another version's
            return None

    def write(self, files: Sequence[Path], sha256: str, found: Checked) -> None:
        """Keep it, and say what was rejected; `sha256` is `dataset_hash(files)`."""
        self._report.parent.mkdir(parents=True, exist_ok=True)
        self._report.unlink(missing_ok=True)
        self._rejected.unlink(missing_ok=True)
        if found.rejections:
            write_rejections(found.rejections, self._rejected)
        with self._accepted.open("wb") as file:
            answers, sources = _pack(found.answers), _pack(found.sources)
            np.savez_compressed(file, places=found.places, answers=answers, sources=sources)
        report = {
            "files": [{"path": str(path), "bytes": path.stat().st_size} for path in files],
            "sha256": sha256,
            "rows": found.rows,
            "accepted": len(found.places),
            "rejected": len(found.rejections),
            "content_sha256": found.content_sha256,
            "settings": self._settings,
        }
        partial = self._report.with_name(f".{self._report.name}.tmp")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(partial, self._report)


def _pack(texts: Sequence[str]) -> np.ndarray:
    """uint8: a JSON list.  Unlike numpy's own strings it keeps NULs at the end, and short texts short."""
    return np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)


def _unpack(packed: np.ndarray) -> list[str]:
    names: dict[str, str] = {}
    return [names.setdefault(text, text) for text in json.loads(packed.tobytes())]
