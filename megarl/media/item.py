"""Media items and expanded prompts: what rollout, training, scoring and evaluation all share."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megarl.data.prompt import Grid, Prompt

MODALITIES = ("text", "image", "video", "image+video")


def modality(kinds: Iterable[str]) -> str:
    """One of `MODALITIES`, of the kinds of a prompt's media."""
    return "+".join(sorted(set(kinds))) or "text"


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, or one video, prepared for the vision tower."""

    kind: str
    """`image` or `video`."""
    pixels: torch.Tensor
    """float32 `[t * h * w, channels * temporal_patch * patch * patch]`, normalised, in patch order."""
    grid: Grid
    """(t, h, w) in patches; t counts temporal patches, and is 1 for an image."""
    digest: bytes
    """SHA-256 of the decoded pixels, the grid and how they were prepared: equal digests give equal features."""
    name: str
    """Where it came from (`MediaSource.name`), for messages and logs."""
    timestamps: tuple[float, ...] = ()
    """Of a video: presentation time of each sampled frame in seconds, before padding to whole temporal patches.
    No part of the digest: they become text."""

    def seconds_per_patch(self, temporal_patch_size: int) -> float:
        """Of a video: mean time between temporal patches of so many frames; 0 where there is one frame."""
        times = self.timestamps
        if len(times) < 2:
            return 0.0
        # To the microsecond, since some count whole seconds only.
        return round(temporal_patch_size * (times[-1] - times[0]) / (len(times) - 1), 6)

    def feature_count(self, merge_size: int) -> int:
        """Media tokens that this item fills: `t * h * w / merge_size**2`."""
        t, h, w = self.grid
        return t * h * w // merge_size**2


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt with its media expanded, once (`megarl.media.expand`)."""

    prompt: Prompt
    ids: torch.Tensor
    """int64 `[n]` on the CPU."""
    media_mask: torch.Tensor
    """bool `[n]`: which tokens are places of media features.  Never derived from `ids` again."""
    positions: torch.Tensor
    """int64 `[3, n]`: the family's rotary positions (time, height, width)."""
    next_position: int
    """Position, on all three axes, of the token that follows the prompt."""
    items: tuple[MediaItem, ...]
    """In the order of their media tokens."""

    def followed_by(self, ids: torch.Tensor) -> "EncodedPrompt":
        """With sampled tokens (int64 `[m]`) at its end; those are text, whatever their ids."""
        m = ids.numel()
        after = (self.next_position + torch.arange(m)).expand(3, m)
        return EncodedPrompt(
            self.prompt,
            torch.cat([self.ids, ids]),
            torch.cat([self.media_mask, torch.zeros(m, dtype=torch.bool)]),
            torch.cat([self.positions, after], 1),
            self.next_position + m,
            self.items,
        )

    @property
    def modality(self) -> str:
        """One of `MODALITIES`."""
        return modality(item.kind for item in self.items)
