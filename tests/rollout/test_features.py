"""The feature cache: what goes through the tower, in which passes, what is kept, and what comes out."""

import pytest
import torch

from megarl.media.item import MediaItem
from tests.distributed import lazy

features = lazy("megarl.rollout.features")
pytestmark = pytest.mark.ranks(1)

MERGE = 2
ROW_BYTES = 8
"""Of `Tower`: two layers of one float32."""


def item(number: int, h: int = 2, w: int = 2, t: int = 1) -> MediaItem:
    """Each temporal patch has a value of its own: `number`, `number + 0.25`, ..."""
    values = number + torch.arange(t).repeat_interleave(h * w) / 4
    digest = bytes([number, t, h, w])
    return MediaItem("video" if t > 1 else "image", values[:, None].expand(-1, 3).clone(), (t, h, w), digest, "x")


class Tower:
    """Counts its passes; a feature is its patch's number plus the weights."""

    def __init__(self):
        self.passes, self.weights = [], 0.0

    def __call__(self, pixels, grids):
        assert torch.is_grad_enabled() is False
        assert len(pixels) == int(grids.prod(1).sum())
        self.passes.append(len(pixels))
        row = pixels.view(-1, MERGE**2, 3)[:, 0, :1] + self.weights
        return torch.stack([row, row * 10])


def make(max_bytes=1 << 20, **options):
    tower = Tower()
    return tower, features.FeatureCache(tower, MERGE, torch.device("cpu"), ROW_BYTES, max_bytes, **options)


def expected(*items):
    return torch.cat([one.pixels.view(-1, MERGE**2, 3)[:, 0, 0] for one in items])


def test_needed_items_end_to_end():
    tower, cache = make()
    a, b = item(1, 2, 4), item(2, 4, 4)
    found = cache.gather([b, a])
    assert found.shape == (2, 6, 1)
    assert torch.equal(found[0, :, 0], expected(b, a))
    assert torch.equal(found[1], found[0] * 10)
    assert (cache.encoded, tower.passes, cache.bytes) == (2, [24], 6 * ROW_BYTES)


def test_remembered_until_cleared():
    tower, cache = make()
    cache.gather([item(1)])
    assert cache.gather([item(2), item(1)])[0, :, 0].tolist() == [2, 1]
    assert (cache.encoded, tower.passes) == (2, [4, 4])
    tower.weights = 0.5
    assert cache.gather([item(1)])[0, :, 0].tolist() == [1]  # stale, as nobody said that the weights changed
    cache.clear()
    assert cache.bytes == 0
    assert cache.gather([item(1)])[0, :, 0].tolist() == [1.5]
    assert cache.encoded == 3


def test_passes_are_bounded():
    """At most 10 patches at a time; a larger picture goes alone."""
    tower, cache = make(patches_per_pass=10)
    batch = [item(1), item(2), item(3), item(4, 4, 4), item(5)]
    assert torch.equal(cache.gather(batch)[0, :, 0], expected(*batch))
    assert tower.passes == [8, 4, 16, 4]


@pytest.mark.parametrize("bound", [1, 4, 8, 9, 12, 27, 28, 100])
def test_videos_are_cut_between_their_frames(bound):
    tower, cache = make(patches_per_pass=bound)
    batch = [item(1, t=5), item(2), item(3, t=2)]
    assert torch.equal(cache.gather(batch)[0, :, 0], expected(*batch))
    assert sum(tower.passes) == 32 and max(tower.passes) <= max(bound, 4)
    assert cache.encoded == 3


def test_looks_ahead_when_it_must_run_the_tower():
    """What comes next fills up the pass, and nothing is encoded when nothing is missing."""
    tower, cache = make(patches_per_pass=12)
    order = [item(n) for n in range(1, 8)]
    cache.gather(order[:1], order[1:])
    assert (tower.passes, cache.encoded) == ([12], 3)
    for place in (1, 2):
        cache.gather([order[place]], order[place + 1 :])
    assert tower.passes == [12]
    cache.gather([order[3]], order[4:])
    assert (tower.passes, cache.encoded) == ([12, 12], 6)


def test_memory_is_bounded():
    """A walk over a set larger than the budget keeps to it, with every feature right and encoded once; the pass
    ahead takes half of it at most."""
    budget = 8 * ROW_BYTES
    tower, cache = make(max_bytes=budget)
    order = [item(n) for n in range(1, 41)]
    for place, one in enumerate(order):
        assert cache.gather([one], order[place + 1 :])[0, :, 0].tolist() == [place + 1]
        assert cache.bytes <= budget
    assert cache.encoded == len(order)
    assert tower.passes == [16] * 10
    assert cache.peak_bytes <= budget + budget // 2


def test_a_step_that_needs_more_than_the_budget_gets_it():
    tower, cache = make(max_bytes=2 * ROW_BYTES)
    batch = [item(n) for n in range(1, 6)]
    assert torch.equal(cache.gather(batch)[0, :, 0], expected(*batch))
    assert cache.bytes == 2 * ROW_BYTES
    assert torch.equal(cache.gather(batch)[0, :, 0], expected(*batch))
    assert cache.encoded == 8  # the last two were kept


def test_what_is_kept_does_not_hold_the_pass():
    """Dropped features are free memory: each is a tensor of its own."""
    _, cache = make()
    cache.gather([item(n) for n in range(1, 9)])
    assert all(kept.untyped_storage().nbytes() == ROW_BYTES for kept in cache._features.values())
