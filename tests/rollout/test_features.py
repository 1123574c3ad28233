"""The feature cache: what goes through the tower, in which passes, and where it ends up."""

import pytest
import torch

from megarl.media.item import MediaItem
from tests.distributed import lazy

features = lazy("megarl.rollout.features")
pytestmark = pytest.mark.ranks(1)

MERGE = 2


def item(number: int, h: int = 2, w: int = 2) -> MediaItem:
    return MediaItem("image", torch.full((h * w, 3), float(number)), (1, h, w), bytes([number, h, w]), "x.png")


class Tower:
    """Counts its passes; a feature is its item's number plus the weights."""

    def __init__(self):
        self.passes, self.weights = [], 0.0

    def __call__(self, pixels, grids):
        assert torch.is_grad_enabled() is False
        assert len(pixels) == int(grids.prod(1).sum())
        self.passes.append(len(pixels))
        row = pixels.view(-1, MERGE**2, 3)[:, 0, :1] + self.weights
        return torch.stack([row, row * 10])


def make(**options):
    tower = Tower()
    return tower, features.FeatureCache(tower, MERGE, torch.device("cpu"), **options)


def values(found, rows, one):
    return found[0, list(rows[one.digest]), 0].tolist()


def test_rows_by_digest():
    """Each distinct item once, in the order it is first asked for; equal digests share rows."""
    tower, cache = make()
    a, b, again = item(1, 2, 4), item(2, 4, 4), item(1, 2, 4)
    found, rows = cache([b, a, again, b])
    assert found.shape == (2, 6, 1) and len(rows) == 2
    assert values(found, rows, a) == [1, 1] and values(found, rows, b) == [2] * 4
    assert torch.equal(found[1], found[0] * 10)
    assert (cache.encoded, cache.asked, tower.passes) == (2, 4, [24])


def test_remembered_until_cleared():
    tower, cache = make()
    cache([item(1)])
    found, rows = cache([item(2), item(1)])
    assert (cache.encoded, tower.passes) == (2, [4, 4])
    assert values(found, rows, item(1)) == [1] and values(found, rows, item(2)) == [2]
    tower.weights = 0.5
    assert values(*cache([item(1)]), item(1)) == [1]  # stale, as nobody said that the weights changed
    cache.clear()
    assert values(*cache([item(1)]), item(1)) == [1.5]
    assert cache.encoded == 3


def test_passes_are_bounded():
    """At most 10 patches at a time; a larger item goes alone."""
    tower, cache = make(patches_per_pass=10)
    batch = [item(1), item(2), item(3), item(4, 4, 4), item(5)]
    found, rows = cache(batch)
    assert tower.passes == [8, 4, 16, 4]
    for one in batch:
        assert set(values(found, rows, one)) == {one.digest[0]}


def test_nothing():
    tower, cache = make()
    assert cache([]) == (None, {})
    assert tower.passes == []
