"""Media of which a part is hidden."""

import hashlib
from dataclasses import replace

import torch

from megarl.media.item import MediaItem


def mask_patches(item: MediaItem, ratio: float, key: str) -> MediaItem:
    """The item with each patch hidden with probability `ratio`: set to 0, the middle of the normalised range.

    Which ones is a function of the key and the item: rollouts that share it see the same part of it.
    """
    seed = hashlib.blake2b(key.encode() + item.digest, digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
    hidden = torch.rand(len(item.pixels), generator=generator) < ratio
    digest = hashlib.sha256(item.digest + hidden.numpy().tobytes()).digest()
    return replace(item, pixels=item.pixels.masked_fill(hidden[:, None], 0.0), digest=digest)
