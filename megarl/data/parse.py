"""Rows to prompts: one path for every row, with media or without, from JSONL or from Parquet.

A row is either a conversation (`megarl.data.conversation`) or tokens in which media was expanded already
(`input_ids`).  A null is a missing key: Arrow gives every row of a column, and every object in a list, the
same keys.
"""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from megarl.data.conversation import CONVERSATION_COLUMNS, read_conversation
from megarl.data.media_values import MediaReader
from megarl.data.prompt import ExpandedIds, Grid, MediaSource, Prompt
from megarl.data.rejection import BadRow, describe
from megarl.data.values import MEDIA_COLUMNS, first_of, media_column, text

EXPANDED_COLUMNS = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
ANSWER_COLUMNS = ("answer", "solution", "reward_model")
SOURCE_COLUMNS = ("source", "data_source")
COLUMNS = (
    *CONVERSATION_COLUMNS,
    *EXPANDED_COLUMNS,
    *(name for names in MEDIA_COLUMNS.values() for name in names),
    *ANSWER_COLUMNS,
    *SOURCE_COLUMNS,
)
"""All that is read of a row; of several names for one thing the first that is not null."""


@dataclass(frozen=True)
class ParsedRow:
    prompt: Prompt
    """Its `index` is -1: only the whole data set knows it."""
    items: tuple[str, ...]
    """Places in the row of `prompt.media`, in the same order, such as `messages[0].content[1].image`."""
    column: str
    """Where the prompt itself is, for what is wrong with all of it."""


class RowParser:
    """Rows of one data set to prompts."""

    def __init__(self, media: MediaReader, file_name: str, default_source: str):
        """
        Args:
            file_name: of the rows, for the names of media in them: `train.parquet`.
            default_source: `Prompt.source` of rows that name none.
        """
        self._media = media
        self.file_name = file_name
        self._default_source = default_source

    def parse(self, row: dict[str, Any], number: int) -> ParsedRow:
        """The prompt of a row, whose place in the file, from 1, is `number`.

        Raises:
            BadRow: the row is none of the accepted forms.
        """
        row_name = f"{self.file_name} row {number}"
        if row.get("input_ids") is not None:
            expanded, items = self._expanded(row, row_name)
            messages, column = (), "input_ids"
        else:
            column, messages, items = read_conversation(row, self._media, row_name)
            expanded = None
        source = first_of(row, SOURCE_COLUMNS)
        source = text(row[source], source) if source else self._default_source
        return ParsedRow(Prompt(-1, number, messages, _answer(row), source, expanded), items, column)

    def _expanded(self, row: dict[str, Any], row_name: str) -> tuple[ExpandedIds, tuple[str, ...]]:
        """The walk over the tokens, which needs the processor, is `megarl.media.expand`'s."""
        ids = _integers(row.get("input_ids"), "input_ids")
        kinds = _integers(row.get("mm_token_type_ids"), "mm_token_type_ids", most=2)
        if not ids:
            raise BadRow("input_ids", "has no tokens")
        if len(kinds) != len(ids):
            raise BadRow("mm_token_type_ids", f"{len(kinds)} values for {len(ids)} input_ids")
        grids: list[Grid] = []
        media: list[MediaSource] = []
        items: list[str] = []
        for kind, grid_column in (("image", "image_grid_thw"), ("video", "video_grid_thw")):
            column, values = media_column(row, kind)
            of_kind = _grids(row.get(grid_column), grid_column)
            if len(of_kind) != len(values):
                raise BadRow(column, f"{len(values)} {kind}s, but {grid_column} has {len(of_kind)} grids")
            grids += of_kind
            media += [self._media.read(kind, value, item, row_name) for item, value in values]
            items += [item for item, _ in values]
        return ExpandedIds(ids, kinds, tuple(grids), tuple(media)), tuple(items)


def _answer(row: dict[str, Any]) -> str:
    """The ground truth as text.  A number becomes its shortest text; what has several spellings is refused."""
    column = first_of(row, ANSWER_COLUMNS)
    if column is None:
        raise BadRow("answer", "missing or null; accepted: answer, solution, reward_model.ground_truth")
    value = row[column]
    if column == "reward_model":
        column = "reward_model.ground_truth"
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise BadRow("reward_model", f"not JSON: {error}") from error
        if not isinstance(value, dict):
            raise BadRow("reward_model", f"{describe(value)}, not an object with ground_truth")
        value = value.get("ground_truth")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise BadRow(column, f"{describe(value)}, not a string or a number")
    if isinstance(value, str):
        return text(value, column)
    if not math.isfinite(value):
        raise BadRow(column, f"{value}, not a finite number")
    return f"{value:f}" if isinstance(value, Decimal) else json.dumps(value)


def _integers(value: Any, item: str, most: int = 2**63 - 1) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadRow(item, f"{describe(value)}, not a list of integers")
    for place, number in enumerate(value):
        if type(number) is not int:
            raise BadRow(f"{item}[{place}]", f"{describe(number)}, not an integer")
        if not 0 <= number <= most:
            raise BadRow(f"{item}[{place}]", f"{str(number)[:40]} is not in 0 .. {most}")
    return tuple(value)


def _grids(value: Any, item: str) -> list[Grid]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(item, f"{describe(value)}, not a list of grids")
    return [_grid(grid, f"{item}[{place}]") for place, grid in enumerate(value)]


def _grid(value: Any, item: str) -> Grid:
    grid = _integers(value, item, most=2**31 - 1)
    if len(grid) != 3 or 0 in grid:
        raise BadRow(item, f"{str(value)[:40]}, not [t, h, w] in patches")
    return grid
