"""What the engine must know of each live prompt beyond its ids, as tables indexed by vector operations.

The rollouts of a group share one entry, so nothing here grows with the group size, and a decode step
looks up one number per request.
"""

import hashlib
from dataclasses import dataclass

import torch
from megatron.core.inference.inference_request import compute_block_hashes_batched
from torch import Tensor

from megarl.media.item import EncodedPrompt, MediaItem


@dataclass(frozen=True, eq=False)
class PromptTable:
    start: Tensor
    """int64 `[prompts + 1]`: where each prompt begins in the flat tables."""
    positions: Tensor
    """int64 `[3, prompt tokens]`: rotary positions."""
    feature_rows: Tensor
    """int64 `[prompt tokens]`: place of the token's feature if those of all `items` lay end to end, -1 for text."""
    items: tuple[MediaItem, ...]
    """Distinct, in the order in which prompts first use them."""
    item_start: Tensor
    """int64 `[items + 1]`: where the features of each item would begin."""
    offset: Tensor
    """int64 `[prompts]`: rotary position of token t of the completion is `t + offset`, t counted from
    the start of the prompt."""
    prompt_of_request: Tensor
    """int64 `[requests]`."""

    def lookup(self, requests: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 `[3, n]` and feature rows int64 `[n]` of tokens, given by their request ids and
        their places in the request, both int64 `[n]`."""
        prompt = self.prompt_of_request[requests]
        flat = self.start[prompt] + places
        inside = flat < self.start[prompt + 1]
        flat = flat.clamp(max=self.feature_rows.numel() - 1)
        positions = torch.where(inside, self.positions[:, flat], places + self.offset[prompt])
        return positions, torch.where(inside, self.feature_rows[flat], -1)

    def needed_items(self, feature_rows: Tensor) -> tuple[list[int], Tensor]:
        """What a step's media tokens need.

        Args:
            feature_rows: int64 `[n]` as `lookup` gives them.

        Returns:
            Indices of the items, ascending; and int64 `[n]`: the tokens' places in the features of these items
            alone, end to end, -1 for text.
        """
        media = feature_rows >= 0
        item = torch.searchsorted(self.item_start, feature_rows[media], right=True) - 1
        needed, which = item.unique(return_inverse=True)
        lengths = self.item_start[needed + 1] - self.item_start[needed]
        local = torch.full_like(feature_rows, -1)
        local[media] = feature_rows[media] - self.item_start[item] + (lengths.cumsum(0) - lengths)[which]
        return needed.tolist(), local

    def decode_positions(self, requests: Tensor, places: Tensor) -> Tensor:
        """int64 `[n]`, equal on the three axes: positions of sampled tokens, one per request."""
        return places + self.offset[self.prompt_of_request[requests]]


def build_prompt_table(prompts: list[EncodedPrompt], prompt_of_request: Tensor, merge_size: int) -> PromptTable:
    """Lays the prompts end to end, and the features of their distinct items as well."""
    items = {item.digest: item for prompt in prompts for item in prompt.items}
    item_start = torch.tensor([0, *(item.feature_count(merge_size) for item in items.values())]).cumsum(0)
    ranges = {digest: torch.arange(*item_start[i : i + 2].tolist()) for i, digest in enumerate(items)}
    lengths = torch.tensor([0, *(p.ids.numel() for p in prompts)])
    feature_rows = torch.full((int(lengths.sum()),), -1)
    if items:
        mask = torch.cat([p.media_mask for p in prompts])
        feature_rows[mask] = torch.cat([ranges[item.digest] for prompt in prompts for item in prompt.items])
    return PromptTable(
        start=lengths.cumsum(0),
        positions=torch.cat([p.positions for p in prompts], 1),
        feature_rows=feature_rows,
        items=tuple(items.values()),
        item_start=item_start,
        offset=torch.tensor([p.next_position for p in prompts]) - lengths[1:],
        prompt_of_request=prompt_of_request,
    )


def prefix_hashes(prompt: EncodedPrompt, merge_size: int, block_size: int) -> list[int]:
    """Keys of the prompt's whole KV blocks for the prefix cache.  A media token counts as its item's
    digest, its rotary positions and its place in it, so equal ids over different pictures never match, nor over
    a video at another speed.

    Returns:
        One int in [1, 2**63 - 1] per whole block, chained from block to block.
    """
    if prompt.ids.numel() < block_size:
        return []
    keys = prompt.ids.clone()
    media = []
    counts = [item.feature_count(merge_size) for item in prompt.items]
    positions = prompt.positions[:, prompt.media_mask].split(counts, 1)
    for item, count, turned in zip(prompt.items, counts, positions, strict=True):
        digest = hashlib.sha256(item.digest + turned.contiguous().numpy().tobytes()).digest()
        media.append(-1 - (int.from_bytes(digest[:7], "little") + torch.arange(count)) % (1 << 55))
    if media:
        keys[prompt.media_mask] = torch.cat(media)
    return compute_block_hashes_batched(keys, block_size)
