"""A prompt as the data set gives it, before anything was decoded or tokenised."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

Kind = Literal["image", "video"]
Grid = tuple[int, int, int]
"""(t, h, w) in patches."""


@dataclass(frozen=True)
class MediaSource:
    """Where the bytes of one media item are: in a file, or in the row itself."""

    kind: Kind
    name: str
    """For messages and logs: the path as the row gives it, or the place in the row."""
    path: Path | None = None
    """The file, absolute; None where `data` has the bytes."""
    data: bytes | None = field(default=None, repr=False)
    """The encoded bytes; None where they are in a file."""

    @cached_property
    def key(self) -> tuple[str, str]:
        """Equal for sources that give the same item: kind, and path or hash of the bytes."""
        where = str(self.path) if self.data is None else "sha256:" + hashlib.sha256(self.data).hexdigest()
        return self.kind, where


@dataclass(frozen=True)
class ExpandedIds:
    """Token ids from outside in which media was expanded already, in transformers' terms."""

    ids: tuple[int, ...]
    """`input_ids` of one row."""
    kinds: tuple[int, ...]
    """`mm_token_type_ids`, of the same length: 0 text, 1 image, 2 video."""
    grids: tuple[Grid, ...]
    """Of `media`: the images' in the order of their tokens, then the videos'."""
    media: tuple[MediaSource, ...]
    """The images, then the videos, as `image_grid_thw` and `video_grid_thw` have them."""


@dataclass(frozen=True)
class Prompt:
    index: int
    """Place in its data set after bad rows were dropped, from 0; stable for a given data set."""
    row: int
    """Place in its file or files, from 1, bad rows and, in JSONL, empty lines counted."""
    messages: tuple[dict, ...]
    """Chat messages as transformers' templates take them: `role`, and `content` as a list of parts
    `{"type": "text", "text": str}`, `{"type": "image", "image": MediaSource}` or
    `{"type": "video", "video": MediaSource}`.  Read only.  Empty where `expanded` is given."""
    answer: str
    """Ground truth, given to the reward only."""
    source: str
    """Name of the data set or task that the row comes from."""
    expanded: ExpandedIds | None = None
    """In place of messages: the prompt as tokens, never to be expanded again."""

    @property
    def media(self) -> tuple[MediaSource, ...]:
        """Sources of the media items, in prompt order; of `expanded` in its own."""
        if self.expanded is not None:
            return self.expanded.media
        return tuple(part[part["type"]] for m in self.messages for part in m["content"] if part["type"] != "text")
