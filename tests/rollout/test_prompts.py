"""The engine's tables about prompts, and the keys of the prefix cache."""

import dataclasses

import pytest
import torch

from tests import tiny
from tests.distributed import lazy

tables = lazy("megarl.rollout.prompts")
pytestmark = pytest.mark.ranks(1)


def _table(prompts, group=2):
    """Rows of the features by digest if all distinct items' lay end to end, and the table."""
    rows, start = {}, 0
    for item in [item for prompt in prompts for item in prompt.items]:
        if item.digest not in rows:
            rows[item.digest] = range(start, start + item.feature_count(tiny.MERGE))
            start = rows[item.digest].stop
    owner = torch.arange(len(prompts)).repeat_interleave(group)
    return rows, tables.build_prompt_table(prompts, owner, tiny.MERGE)


def test_lookup(prompts):
    """Every token of every prompt, and 5 sampled ones behind it, against the prompt itself; in one call, mixed."""
    batch = list(prompts.values())
    rows, table = _table(batch)
    requests, places, positions, features = [], [], [], []
    for request in range(2 * len(batch)):
        prompt = batch[request // 2]
        n = prompt.ids.numel()
        requests += [request] * (n + 5)
        places += range(n + 5)
        after = prompt.next_position + torch.arange(5)
        positions.append(torch.cat([prompt.positions, after.expand(3, 5)], 1))
        expected = torch.full((n + 5,), -1)
        expected[:n][prompt.media_mask] = torch.tensor(
            [row for item in prompt.items for row in rows[item.digest]], dtype=torch.long
        )
        features.append(expected)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(1))
    found = table.lookup(torch.tensor(requests)[order], torch.tensor(places)[order])
    assert torch.equal(found[0], torch.cat(positions, 1)[:, order])
    assert torch.equal(found[1], torch.cat(features)[order])


def test_needed_items(prompts):
    """Any set of a step's tokens: their places in the features of the items that they belong to, and no others."""
    _, table = _table(list(prompts.values()))
    total = int(table.item_start[-1])
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(-1, total, (seed + 1,), generator=generator)
        needed, local = table.needed_items(rows)
        end_to_end = torch.cat(
            [torch.empty(0, dtype=torch.long)]
            + [torch.arange(int(table.item_start[i]), int(table.item_start[i + 1])) for i in needed]
        )
        assert torch.equal(local >= 0, rows >= 0)
        assert torch.equal(end_to_end[local[rows >= 0]], rows[rows >= 0])
        owners = {i for i in range(len(table.items)) for r in rows.tolist() if r in range(*table.item_start[i : i + 2])}
        assert needed == sorted(owners)


def test_decode_positions(prompts):
    """Those of `lookup` behind the prompt, on each axis."""
    batch = list(prompts.values())
    _, table = _table(batch)
    requests = torch.arange(2 * len(batch))
    places = torch.tensor([batch[r // 2].ids.numel() + r for r in requests.tolist()])
    expected, features = table.lookup(requests, places)
    assert (features == -1).all()
    assert torch.equal(table.decode_positions(requests, places).expand(3, -1), expected)


def test_text_only(prompts):
    _, table = _table([prompts["text"]])
    positions, features = table.lookup(torch.tensor([0, 1]), torch.tensor([3, 40]))
    assert positions.tolist() == [[3, 40]] * 3 and features.tolist() == [-1, -1]


def test_hashes_of_whole_blocks(prompts):
    """One a whole block, in the range that Megatron takes, all different."""
    for prompt in prompts.values():
        hashes = tables.prefix_hashes(prompt, tiny.MERGE, 16)
        assert len(hashes) == prompt.ids.numel() // 16
        assert all(1 <= h < 2**63 for h in hashes) and len(set(hashes)) == len(hashes)
    assert tables.prefix_hashes(prompts["text"], tiny.MERGE, 64) == []


def common(a, b) -> int:
    """Blocks before the first difference; none is equal after it."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


def test_hashes_tell_pictures_apart(prompts):
    """Equal ids: blocks before the picture match, the picture's block and all later ones do not."""

    def hashes(name):
        return tables.prefix_hashes(prompts[name], tiny.MERGE, 16)

    assert torch.equal(prompts["image"].ids, prompts["other_image"].ids)
    first = int(prompts["image"].media_mask.nonzero()[0])
    assert common(hashes("image"), hashes("other_image")) == first // 16 == 2
    assert hashes("image") == hashes("repeat")
    shared = next(
        i for i, (a, b) in enumerate(zip(prompts["long_text"].ids, prompts["same_prefix"].ids, strict=False)) if a != b
    )
    assert common(hashes("long_text"), hashes("same_prefix")) == shared // 16 >= 8


def test_hashes_tell_speeds_of_a_video_apart(prompts):
    """The same frames further apart, where the family turns them by their times."""
    prompt = prompts["video"]
    positions = prompt.positions.clone()
    positions[0, prompt.media_mask] += torch.arange(int(prompt.media_mask.sum()))
    slower = dataclasses.replace(prompt, positions=positions)
    first = int(prompt.media_mask.nonzero()[0])
    hashes = [tables.prefix_hashes(p, tiny.MERGE, 4) for p in (prompt, slower)]
    assert common(*hashes) == first // 4 > 0


def test_hashes_tell_media_from_prose(prompts):
    """The same ids where the mask says text; the order of two pictures; the place inside a picture."""
    prompt = prompts["images"]
    n = prompt.ids.numel()
    prose = dataclasses.replace(prompt, items=(), media_mask=torch.zeros(n, dtype=torch.bool))
    assert common(tables.prefix_hashes(prompt, tiny.MERGE, 16), tables.prefix_hashes(prose, tiny.MERGE, 16)) == 0
    a, b, c = prompt.items
    swapped = dataclasses.replace(prompt, items=(b, a, c))
    assert common(tables.prefix_hashes(prompt, tiny.MERGE, 16), tables.prefix_hashes(swapped, tiny.MERGE, 16)) == 0
    keys = tables.prefix_hashes(prompt, tiny.MERGE, 1)
    assert len(set(keys)) == n
