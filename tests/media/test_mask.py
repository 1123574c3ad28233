import torch

from megarl.media.item import MediaItem
from megarl.media.mask import mask_patches


def item(patches: int, digest: bytes = b"one") -> MediaItem:
    return MediaItem("image", torch.ones(patches, 6), (1, patches // 2, 2), digest, "picture")


def hidden(masked: MediaItem) -> torch.Tensor:
    """Which patches are; each is hidden as a whole or not at all."""
    assert (masked.pixels == masked.pixels[:, :1]).all()
    return masked.pixels[:, 0] == 0


def test_share_and_rest():
    whole = item(4000)
    masked = mask_patches(whole, 0.6, "1/1/")
    assert abs(float(hidden(masked).float().mean()) - 0.6) < 0.04
    assert (whole.pixels == 1).all()  # the cache's item is as it was
    assert (masked.grid, masked.kind, masked.name) == (whole.grid, whole.kind, whole.name)
    assert hidden(mask_patches(whole, 1.0, "")).all()


def test_a_function_of_key_and_item():
    first = mask_patches(item(64), 0.5, "1/1/")
    again = mask_patches(item(64), 0.5, "1/1/")
    assert torch.equal(first.pixels, again.pixels) and first.digest == again.digest
    for other in (mask_patches(item(64), 0.5, "1/2/"), mask_patches(item(64, b"other"), 0.5, "1/1/")):
        assert not torch.equal(first.pixels, other.pixels) and other.digest != first.digest
    assert first.digest != item(64).digest
