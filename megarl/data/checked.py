"""What the check of a data set found: worked out once for a job, by all ranks together."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.parse import ParsedRow, RowParser
from megarl.data.prompt import Prompt
from megarl.data.rejection import BadRow, Rejection
from megarl.data.rows import Rows
from megarl.errors import MediaError, PromptError, one_line

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
    broadcast: Callable[[Any], Any] = field(default=lambda value: value)
    """Collective: rank 0's value.  Like `gather` it must wait for hours: rank 0 copies and hashes files alone."""


@dataclass(frozen=True, eq=False)
class Checked:
    """The accepted rows, with the little of them that is wanted of all rows at once."""

    places: np.ndarray
    """int64 `[accepted]`: places in the files, from 0."""
    answers: list[str]
    sources: list[str]
    rejections: list[Rejection]
    fingerprints: np.ndarray | None
    """uint8 `[accepted, 32]`: what the check gave for each; None where nothing was checked."""

    @property
    def content_sha256(self) -> str | None:
        """Over the 32 bytes of each accepted row in order, in hexadecimal; None where nothing was checked."""
        return None if self.fingerprints is None else hashlib.sha256(self.fingerprints.tobytes()).hexdigest()

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
        # At every window: a rank waits for another's slowest window, in which videos are fetched and decoded, and
        # never for its whole share of the rows.
        everything += ranks.gather((accepted, rejections))
    accepted = sorted(row for part, _ in everything for row in part)
    names: dict[str, str] = {}  # one string object for equal texts
    fingerprints = None
    if check:
        fingerprints = np.frombuffer(b"".join(result for _, result, _, _ in accepted), np.uint8).reshape(-1, 32)
    return Checked(
        np.array([place for place, _, _, _ in accepted], np.int64),
        [names.setdefault(answer, answer) for _, _, answer, _ in accepted],
        [names.setdefault(source, source) for _, _, _, source in accepted],
        sorted((rejection for _, part in everything for rejection in part), key=lambda rejection: rejection.row),
        fingerprints,
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
        return Rejection(number, row.column, one_line(error.reason))
    items = {source.name: item for source, item in reversed(list(zip(row.prompt.media, row.items, strict=True)))}
    return Rejection(number, items.get(error.name, row.column), str(error))
