"""The vision tower's outputs, kept while the weights stay what they are."""

import torch
from torch import Tensor

from megarl.media.item import MediaItem


class FeatureCache:
    """Encodes each distinct item once per weight version.

    Args:
        encode: `(pixels, grids) -> [1 + deepstack layers, media tokens, hidden]`, the model's.
        merge_size: side of the square of patches that becomes one media token.
        device: where the pixels must be.
        patches_per_pass: bound of the patches that go through the tower at once.
    """

    def __init__(self, encode, merge_size: int, device: torch.device, patches_per_pass: int = 65536):
        self._encode, self._merge_size, self._device = encode, merge_size, device
        self._patches_per_pass = patches_per_pass
        self._features: dict[bytes, Tensor] = {}
        self.encoded = 0
        """Items that went through the tower since the start."""
        self.asked = 0
        """Items that were asked for since the start."""

    def clear(self) -> None:
        """The weights have changed."""
        self._features.clear()

    @torch.no_grad()
    def __call__(self, items: list[MediaItem]) -> tuple[Tensor | None, dict[bytes, range]]:
        """Features `[1 + deepstack layers, rows, hidden]` of the distinct items, and the rows of each by
        digest; (None, {}) without items."""
        self.asked += len(items)
        wanted = {item.digest: item for item in items}
        for batch in self._passes([i for d, i in wanted.items() if d not in self._features]):
            out = self._encode(
                torch.cat([i.pixels for i in batch]).to(self._device), torch.tensor([i.grid for i in batch])
            )
            counts = [i.feature_count(self._merge_size) for i in batch]
            self._features.update(zip((i.digest for i in batch), out.split(counts, 1), strict=True))
            self.encoded += len(batch)
        rows, start = {}, 0
        for digest, item in wanted.items():
            count = item.feature_count(self._merge_size)
            rows[digest] = range(start, start + count)
            start += count
        return (torch.cat([self._features[d] for d in wanted], 1) if wanted else None), rows

    def _passes(self, items: list[MediaItem]):
        batch, patches = [], 0
        for item in items:
            if batch and patches + item.pixels.shape[0] > self._patches_per_pass:
                yield batch
                batch, patches = [], 0
            batch.append(item)
            patches += item.pixels.shape[0]
        if batch:
            yield batch
