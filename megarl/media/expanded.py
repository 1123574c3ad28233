"""Prompts that come as tokens, their media expanded already: read and checked, never expanded again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from megarl.data.prompt import ExpandedIds, Grid, Kind
from megarl.errors import ExpansionError, PromptError

KINDS: dict[int, Kind] = {1: "image", 2: "video"}
"""transformers' `mm_token_type_ids`, where 0 is text."""


@dataclass(eq=False)
class Span:
    """Where the tokens of one item are."""

    place: int
    """Of the item in `ExpandedIds.media`."""
    runs: list[int] = field(default_factory=list)
    """Length of each run of its media tokens: one run, or one a temporal patch."""


def find_spans(
    row: int, expanded: ExpandedIds, tokens: Mapping[Kind, int], vocabulary: int, merge_size: int
) -> list[Span]:
    """Which item each media token belongs to; one span an item, in the order of their tokens.

    Items are told apart by the lengths of their grids, so that two may touch.  What has kind 0 is text
    whatever its id: only the kinds say what is media.  A video is one run of tokens (Qwen2-VL), or a run a
    temporal patch with text between them (Qwen3-VL).

    Args:
        tokens: id of the token that holds the place of a feature, by kind.
        vocabulary: ids are below this.

    Raises:
        PromptError: no tokens, arrays that do not fit together, an id or kind that does not exist, or a media
            token with another id than its kind's.
        ExpansionError: an item's media tokens and grid differ, or tokens or items are left over.
    """
    _check_arrays(row, expanded, tokens, vocabulary, merge_size)
    walk = _Walk(row, expanded, merge_size)
    for kind, group in groupby(expanded.kinds):
        length = sum(1 for _ in group)
        if kind:
            walk.media(KINDS[kind], length)
        else:
            walk.token += length
    walk.finish()
    return walk.spans


def _check_arrays(row: int, e: ExpandedIds, tokens: Mapping[Kind, int], vocabulary: int, merge_size: int) -> None:
    if not e.ids:
        raise PromptError(row, "input_ids is empty")
    if len(e.kinds) != len(e.ids):
        raise PromptError(row, f"{len(e.ids)} input_ids but {len(e.kinds)} mm_token_type_ids")
    if len(e.grids) != len(e.media):
        raise PromptError(row, f"{len(e.grids)} grids for {len(e.media)} media items")
    for source, grid in zip(e.media, e.grids, strict=True):
        if len(grid) != 3 or min(grid) < 1 or grid[1] % merge_size or grid[2] % merge_size:
            reason = f"{source.name}: grid {tuple(grid)} does not divide into squares of {merge_size} x {merge_size}"
            raise ExpansionError(row, reason)
        if source.kind == "image" and grid[0] != 1:
            raise ExpansionError(row, f"{source.name}: grid {tuple(grid)} of an image has {grid[0]} temporal patches")
    for place, (number, kind) in enumerate(zip(e.ids, e.kinds, strict=True)):
        if not 0 <= number < vocabulary:
            raise PromptError(row, f"token {place}: id {number} is not in the vocabulary of {vocabulary}")
        if kind and kind not in KINDS:
            raise PromptError(row, f"token {place}: kind {kind}; accepted: 0 text, 1 image, 2 video")
        if kind and number != tokens.get(KINDS[kind]):
            expected = tokens.get(KINDS[kind], "one that the processor has")
            reason = f"token {place}: kind {kind} ({KINDS[kind]}) but id {number}; should be {expected}"
            raise PromptError(row, reason)


class _Walk:
    """Consumes runs of media tokens by the items of their kind."""

    def __init__(self, row: int, expanded: ExpandedIds, merge_size: int):
        self.spans: list[Span] = []
        self.token = 0
        """Tokens that were consumed."""
        self._row, self._merge_size = row, merge_size
        self._media, self._grids = expanded.media, expanded.grids
        self._places = {k: iter([i for i, s in enumerate(self._media) if s.kind == k]) for k in KINDS.values()}
        self._open = 0
        """Temporal patches that are missing of the last span, a video."""

    def media(self, kind: Kind, length: int) -> None:
        """`length` media tokens of one kind, with none of that kind before or after them."""
        if self._open and kind != "video":
            self._refuse_open()
        while length:
            taken = self._take(kind, length)
            length -= taken
            self.token += taken

    def _take(self, kind: Kind, length: int) -> int:
        """Gives the first of the tokens to an item; how many it takes."""
        if self._open:
            span = self.spans[-1]
        else:
            place = next(self._places[kind], None)
            if place is None:
                reason = f"{length} {kind} tokens at token {self.token} belong to no {kind}"
                raise ExpansionError(self._row, reason)
            span = Span(place)
            self.spans.append(span)
        t, h, w = grid = self._grids[span.place]
        patch = h * w // self._merge_size**2
        if not self._open and length >= t * patch:
            span.runs.append(t * patch)
            return t * patch
        if not self._open:
            self._open = t
        # Only what comes after the last temporal patch may touch it: the patches have text between them.
        if length < patch or (length > patch and self._open > 1):
            self._refuse(span, sum(span.runs) + length, grid)
        span.runs.append(patch)
        self._open -= 1
        return patch

    def finish(self) -> None:
        if self._open:
            self._refuse_open()
        left = [self._media[place].name for places in self._places.values() for place in places]
        if left:
            raise ExpansionError(self._row, f"no media tokens are left for {', '.join(left[:3])} ({len(left)} in all)")

    def _refuse_open(self) -> None:
        span = self.spans[-1]
        self._refuse(span, sum(span.runs), self._grids[span.place])

    def _refuse(self, span: Span, tokens: int, grid: Grid) -> None:
        t, h, w = grid
        m = self._merge_size
        raise ExpansionError(
            self._row,
            f"{self._media[span.place].name} fills {tokens} media tokens but its grid {tuple(grid)} has "
            f"{t * h * w // m**2} features (merge {m} x {m})",
        )
