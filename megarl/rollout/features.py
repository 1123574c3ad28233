"""The vision tower's outputs, kept while the weights stay what they are and as far as memory allows."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from megarl.data.prompt import Grid
from megarl.media.item import MediaItem


class FeatureCache:
    """Encodes each distinct item once a weight version, as long as its features fit into the budget.

    Args:
        encode: `(pixels, grids) -> [1 + deepstack layers, media tokens, hidden]`, the model's.
        merge_size: side of the square of patches that becomes one media token.
        device: where the pixels must be.
        row_bytes: bytes of one media token's features.
        max_bytes: bound of the features that are kept; a step that needs more than this at once still gets them.
        patches_per_pass: bound of the patches that go through the tower at once.  A larger video is cut between
            temporal patches, which the tower does not mix; a larger picture goes alone.
    """

    def __init__(
        self,
        encode,
        merge_size: int,
        device: torch.device,
        row_bytes: int,
        max_bytes: int,
        patches_per_pass: int = 65536,
    ):
        self._encode, self._merge_size, self._device = encode, merge_size, device
        self._row_bytes, self._max_bytes, self._patches_per_pass = row_bytes, max_bytes, patches_per_pass
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoded = 0
        """Items that went through the tower since the start."""
        self.bytes = 0
        """Of the features that are kept now."""
        self.peak_bytes = 0
        """The most that was kept at a time since the start."""

    def clear(self) -> None:
        """The weights have changed."""
        self._features.clear()
        self.bytes = 0

    @torch.no_grad()
    def gather(self, needed: Sequence[MediaItem], ahead: Iterable[MediaItem] = ()) -> Tensor:
        """Features `[1 + deepstack layers, rows, hidden]` of the needed items, one after another.

        Args:
            needed: distinct, at least one.
            ahead: what will be needed next, in order.  Where a needed item must go through the tower, these
                fill up its pass, and half of the budget at most.
        """
        missing = {item.digest: item for item in needed if item.digest not in self._features}
        for item in needed:
            if item.digest in self._features:
                self._features.move_to_end(item.digest)
        if missing:
            self._fill_up(missing, ahead)
            self._add(list(missing.values()))
        found = torch.cat([self._features[item.digest] for item in needed], 1)
        self._shrink()
        return found

    def _fill_up(self, missing: dict[bytes, MediaItem], ahead: Iterable[MediaItem]) -> None:
        patches = sum(len(item.pixels) for item in missing.values())
        size = sum(map(self._bytes_of, missing.values()))
        for item in ahead:
            if item.digest in missing or item.digest in self._features:
                continue
            patches += len(item.pixels)
            size += self._bytes_of(item)
            if patches > self._patches_per_pass or size > self._max_bytes // 2:
                break
            missing[item.digest] = item

    def _add(self, items: list[MediaItem]) -> None:
        parts: dict[bytes, list[Tensor]] = {item.digest: [] for item in items}
        for batch in self._passes(items):
            pixels = torch.cat([pixels for _, pixels, _ in batch]).to(self._device)
            out = self._encode(pixels, torch.tensor([grid for _, _, grid in batch]))
            counts = [len(pixels) // self._merge_size**2 for _, pixels, _ in batch]
            for (digest, _, _), part in zip(batch, out.split(counts, 1), strict=True):
                # A copy: what is dropped later must not keep the pass's whole output alive.
                parts[digest].append(part.clone())
        for item in items:
            pieces = parts[item.digest]
            self._features[item.digest] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
            self.bytes += self._bytes_of(item)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self.encoded += len(items)

    def _shrink(self) -> None:
        """Drops what was used longest ago."""
        while self.bytes > self._max_bytes:
            _, dropped = self._features.popitem(last=False)
            self.bytes -= dropped.shape[1] * self._row_bytes

    def _bytes_of(self, item: MediaItem) -> int:
        return item.feature_count(self._merge_size) * self._row_bytes

    def _passes(self, items: Iterable[MediaItem]) -> Iterator[list[tuple[bytes, Tensor, Grid]]]:
        batch, patches = [], 0
        for piece in chain.from_iterable(map(self._pieces, items)):
            if batch and patches + len(piece[1]) > self._patches_per_pass:
                yield batch
                batch, patches = [], 0
            batch.append(piece)
            patches += len(piece[1])
        if batch:
            yield batch

    def _pieces(self, item: MediaItem) -> Iterator[tuple[bytes, Tensor, Grid]]:
        t, h, w = item.grid
        step = min(t, max(1, self._patches_per_pass // (h * w)))
        for first in range(0, t, step):
            count = min(step, t - first)
            yield item.digest, item.pixels[first * h * w : (first + count) * h * w], (count, h, w)
