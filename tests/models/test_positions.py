import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from megarl.models.qwen3_vl.positions import mrope_positions


@pytest.fixture(scope="module", params=[1, 2, 3])
def reference(request):
    """transformers' model with a merge size, without weights: only its position rule is used."""
    config = Qwen3VLConfig(
        text_config={"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 16},
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 1, "spatial_merge_size": request.param},
    )
    with torch.device("meta"):
        return Qwen3VLModel(config)


# A row: pieces of text, by length, and media items, by kind and merged grid (kind 1 image, 2 video).
images = st.tuples(st.just(1), st.just(1), st.integers(1, 6), st.integers(1, 6))
videos = st.tuples(st.just(2), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
rows = st.lists(st.one_of(st.integers(0, 5), images, videos), max_size=6)


def lay_out(row, merge_size):
    """Token types and the grids of images (1) and videos (2), for transformers; and the grid of each run."""
    types, runs = [], []
    item_grids = {1: [], 2: []}
    for piece in row:
        if isinstance(piece, int):
            types += [0] * piece
            continue
        kind, t, h, w = piece
        item_grids[kind].append([t, h * merge_size, w * merge_size])
        for _ in range(t):  # a timestamp and vision_start, then the frame, then vision_end
            types += [0, *[kind] * (h * w), 0]
            runs.append((1, h * merge_size, w * merge_size))
    return torch.tensor(types, dtype=torch.int64), item_grids, runs


@settings(max_examples=200, deadline=None)
@given(row=rows)
def test_equals_transformers(reference, row):
    merge_size = reference.config.vision_config.spatial_merge_size
    types, item_grids, runs = lay_out(row, merge_size)
    if not len(types):
        return
    grids = {kind: torch.tensor(grids) if grids else None for kind, grids in item_grids.items()}
    ids = torch.zeros_like(types)[None]
    expected, delta = reference.get_rope_index(ids, types[None], grids[1], grids[2])

    positions, next_position = mrope_positions(types > 0, runs, merge_size)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, expected[:, 0])
    assert next_position == len(types) + delta.item()


def test_by_hand():
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    positions, next_position = mrope_positions(mask, [(1, 4, 6)], 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert next_position == 6


def test_pictures_that_touch_are_told_apart_by_their_lengths():
    together, next_position = mrope_positions(torch.ones(6, dtype=torch.bool), [(1, 4, 4), (1, 2, 4)], 2)
    assert together.tolist() == [[0, 0, 0, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 3]]
    assert next_position == 4


@pytest.mark.parametrize("length", [0, 1, 5])
def test_text_alone_counts(length):
    positions, next_position = mrope_positions(torch.zeros(length, dtype=torch.bool), [], 2)
    assert positions.tolist() == [list(range(length))] * 3
    assert next_position == length


@pytest.mark.parametrize(
    ("mask", "grids", "message"),
    [
        ([1, 1, 1], [(1, 4, 4)], "3 media tokens in the mask, 4 in the grids"),
        ([1, 1, 1, 1], [], "4 media tokens in the mask, 0 in the grids"),
        ([1, 1, 0, 1, 1], [(1, 4, 4)], "not contiguous"),
        ([1, 1, 0, 1], [(1, 2, 2), (1, 2, 4)], "not contiguous"),
        ([1, 1], [(1, 2, 5)], r"grid \(1, 2, 5\) does not divide into squares of 2 x 2"),
        ([1], [(0, 2, 2)], "does not divide"),
        ([1], [(1, -2, -2)], "does not divide"),
    ],
)
def test_a_mask_and_grids_that_do_not_fit_are_refused(mask, grids, message):
    with pytest.raises(ValueError, match=message):
        mrope_positions(torch.tensor(mask, dtype=torch.bool), grids, 2)
