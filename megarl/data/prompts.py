"""A data set as a sequence of prompts.  Bad rows are rejected by name before a run begins, and never repaired."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import overload

from megarl.data.checked import Check, Checked, Ranks, check_rows, read_row
from megarl.data.files import dataset_hash, files_name, split_name
from megarl.data.ledger import Ledger
from megarl.data.media_values import MediaReader
from megarl.data.parse import COLUMNS, RowParser
from megarl.data.prompt import Prompt
from megarl.data.rejection import BadRow, Rejection, check_rejected
from megarl.data.rows import Rows, open_rows
from megarl.errors import UserError

_FETCHING = 16
"""Threads that fetch URLs."""

ALONE = Ranks()


class PromptSet(Sequence[Prompt]):
    """The accepted rows of a data set.

    Only where they are is kept, with their answers and sources: a prompt is read from its file whenever it is
    asked for, so that a data set may be larger than memory.  A slice is a `PromptSet`, whose prompts keep
    their `index`.
    """

    def __init__(self, rows: Rows, parser: RowParser, checked: Checked, indices: range | None = None):
        self._rows = rows
        self._parser = parser
        self._checked = checked
        self._indices = range(len(checked.places)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "PromptSet": ...
    def __getitem__(self, index):
        """The prompt, or the part of the data set.

        Raises:
            UserError: a row that was accepted when the run began is not what it was.
        """
        if isinstance(index, slice):
            return PromptSet(self._rows, self._parser, self._checked, self._indices[index])
        index = self._indices[index]
        place = int(self._checked.places[index])
        try:
            parsed = read_row(self._rows, self._parser, place)
            if parsed is None:
                raise BadRow("row", "is empty")
        except BadRow as bad:
            where = f"{self._parser.file_name} row {place + 1}"
            raise UserError(
                f"{where}, {bad.item}: {bad.reason}; the row was accepted when the run began: data must not change"
            ) from bad
        return replace(parsed.prompt, index=index)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))

    @cached_property
    def answers(self) -> list[str]:
        """`Prompt.answer` of each prompt, without a look at the files."""
        return [self._checked.answers[index] for index in self._indices]

    @cached_property
    def sources(self) -> list[str]:
        """`Prompt.source` of each prompt, without a look at the files."""
        return [self._checked.sources[index] for index in self._indices]

    @property
    def content_sha256(self) -> str | None:
        """See `megarl.data.checked.Checked`: of the whole data set."""
        return self._checked.content_sha256

    def fingerprint(self, index: int) -> bytes | None:
        """The 32 bytes that the check gave for the prompt of this `Prompt.index`; None where nothing was checked.
        Where a check gives others now, files were changed since."""
        fingerprints = self._checked.fingerprints
        return None if fingerprints is None else fingerprints[index].tobytes()


def load_prompts(
    files: Path | Sequence[Path],
    media: MediaReader | None = None,
    check: Check | None = None,
    ranks: Ranks = ALONE,
    ledger: Ledger | None = None,
    cache: Path | None = None,
    max_rejected_fraction: float | None = None,
) -> tuple[PromptSet, list[Rejection]]:
    """Read data files and check each row once in the job.  Collective over `ranks`.

    Args:
        files: one file, or shards of a split (`megarl.data.files.find_split`); docs/data.md has the forms of
            their rows.
        media: finds the media of a row; None: paths relative to the first file's folder, nothing else.
        check: called for up to 64 prompts at a time, with one result a prompt; None accepts what can be parsed.
        ranks: who shares the work.
        ledger: what a resumed run began with is taken from there, and what this check finds is kept there.
        cache: where `datasets` keeps what it makes of Parquet files; None: where it always does, since it is
            a copy of the data that other runs use too.
        max_rejected_fraction: see `check_rejected`; None accepts that all rows are rejected.

    Returns:
        The prompts in the files' order; and of each other row the first thing that is wrong with it.

    Raises:
        UserError: a file does not exist or cannot be read, too many rows were rejected, or a resumed run finds
            other data than it began with.
    """
    files = [files] if isinstance(files, Path) else list(files)
    media = media or MediaReader(files[0].parent)
    sha256 = ""
    if ranks.rank == 0:  # the copy of Parquet files is made by one rank, then found by the others
        sha256 = dataset_hash(files)
        rows = open_rows(files, COLUMNS, sha256, cache)
    sha256 = ranks.broadcast(sha256)
    if ranks.rank != 0:
        rows = open_rows(files, COLUMNS, sha256, cache)
    parser = RowParser(media, Path(files_name(files)).name, split_name(files))
    ledger = ledger if ranks.rank == 0 else None
    checked = ranks.broadcast(ledger.read(sha256) if ledger else None)
    known = checked is not None
    if not known:
        checked = check_rows(rows, parser, check, ranks, _FETCHING if media.remote else 1)
        if ledger:
            ledger.refuse_other(checked)
            ledger.write_rejections(checked)
    if max_rejected_fraction is not None:
        check_rejected(files_name(files), len(checked.places), checked.rejections, max_rejected_fraction)
    if ledger and not known:
        ledger.write(files, sha256, checked)
    return PromptSet(rows, parser, checked), checked.rejections
