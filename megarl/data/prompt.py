"""A prompt as the data set gives it, before anything was decoded or tokenised."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    index: int
    """Place in its file after bad rows were dropped, from 0; stable for a given data set."""
    messages: tuple[dict, ...]
    """Chat messages as transformers' templates take them: `role`, and `content` as a list of parts
    `{"type": "text", "text": str}` or `{"type": "image", "image": Path}`.  Read only."""
    answer: str
    """Ground truth, given to the reward only."""
    source: str
    """Name of the data set or task that the row comes from."""

    @property
    def media_paths(self) -> tuple[Path, ...]:
        """Files of the media items, in prompt order."""
        return tuple(part[part["type"]] for m in self.messages for part in m["content"] if part["type"] != "text")
