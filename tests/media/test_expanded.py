"""Prompts that come as tokens are taken as they are, or refused by name; they are never expanded again."""

from dataclasses import replace

import pytest
import torch

from megarl.data.prompt import ExpandedIds, Prompt
from megarl.errors import ExpansionError, PromptError, PromptTooLong
from tests.media.prompts import encode, load, media, reference, reference_positions, user

A, WIDE = media("16x16.png"), media("64x8.png")
EVEN, ODD = media("16x16x4.mp4"), media("8x8x5.mp4")
IMAGE, VIDEO = 5, 6
"""Ids in the tiny tokenizer."""


def tokens_only(expanded, row=1):
    return Prompt(0, row, (), "answer", "test", expanded)


def by_transformers(processor, prompt):
    """The prompt as transformers' processor expands it, with its columns: images first, then videos."""
    made = reference(processor, prompt)
    grids = [tuple(grid) for key in ("image_grid_thw", "video_grid_thw") if key in made for grid in made[key].tolist()]
    sources = sorted(prompt.media, key=lambda source: source.kind == "video")
    ids, kinds = made["input_ids"][0].tolist(), made["mm_token_type_ids"][0].tolist()
    return ExpandedIds(tuple(ids), tuple(kinds), tuple(grids), tuple(sources))


@pytest.mark.parametrize(
    "prompt",
    [
        user("text alone"),
        user(A, "?"),
        user(EVEN, ODD, "?", A),
        user(A, ODD, "and", WIDE, EVEN, A),
        user(EVEN, EVEN),
    ],
    ids=range(5),
)
def test_what_transformers_expanded_is_taken_id_for_id(tiny, prompt):
    expected = encode(tiny, prompt)
    given = by_transformers(tiny, prompt)
    encoded = encode(tiny, tokens_only(given))
    assert encoded.ids.tolist() == list(given.ids) == expected.ids.tolist()
    assert encoded.ids.dtype == torch.int64 and encoded.media_mask.dtype == torch.bool
    assert torch.equal(encoded.media_mask, expected.media_mask)
    assert torch.equal(encoded.positions, expected.positions) and encoded.next_position == expected.next_position
    assert torch.equal(encoded.positions, reference_positions(reference(tiny, prompt))[0])
    assert [item.name for item in encoded.items] == [source.name for source in prompt.media], "in token order"
    assert [item.digest for item in encoded.items] == [item.digest for item in expected.items]


def rows(*groups):
    """Ids and kinds of groups of (kind, count); text is the letter 50."""
    ids = [{0: 50, 1: IMAGE, 2: VIDEO}[kind] for kind, count in groups for _ in range(count)]
    return tuple(ids), tuple(kind for kind, count in groups for _ in range(count))


def expanded(*groups, grids=(), sources=()):
    return ExpandedIds(*rows(*groups), grids=tuple(grids), media=tuple(sources))


SQUARE, FLAT, CLIP, SMALL = (1, 4, 4), (1, 2, 16), (2, 4, 4), (3, 2, 2)  # 4, 8, 2 x 4 and 3 x 1 tokens


def test_items_that_touch_are_told_apart_by_their_grids(tiny):
    given = expanded((1, 12), (2, 8), (1, 4), grids=[SQUARE, FLAT, SQUARE, CLIP], sources=[A, WIDE, A, EVEN])
    encoded = encode(tiny, tokens_only(given))
    assert [item.name for item in encoded.items] == [A.name, WIDE.name, EVEN.name, A.name]
    assert encoded.positions[:, :4].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]
    assert encoded.positions[:, 4].tolist() == [2, 2, 2]
    assert encoded.media_mask.all()


def test_a_video_is_one_run_or_a_run_a_temporal_patch(tiny):
    seen = []

    def rule(mask, grids, merge_size, seconds):
        seen.append(grids)
        return torch.zeros(3, len(mask), dtype=torch.int64), 0

    for groups in [[(2, 8)], [(2, 4), (0, 3), (2, 4)], [(0, 1), (2, 4), (0, 1), (2, 12)]]:
        videos = sum(count for kind, count in groups if kind == 2) // 8
        given = expanded(*groups, grids=[CLIP] * videos, sources=[EVEN] * videos)
        encode(tiny, tokens_only(given), positions=rule)
    assert seen == [[CLIP], [SQUARE, SQUARE], [SQUARE, SQUARE, CLIP]]


def test_a_media_id_of_kind_text_is_text(tiny):
    given = ExpandedIds((IMAGE, 50, VIDEO, *[IMAGE] * 4), (0, 0, 0, 1, 1, 1, 1), (SQUARE,), (A,))
    encoded = encode(tiny, tokens_only(given))
    assert encoded.media_mask.tolist() == [False] * 3 + [True] * 4
    assert encoded.positions[:, :3].tolist() == [[0, 1, 2]] * 3


def test_nothing_is_rendered_or_tokenised(tiny, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("expanded again")

    for name in ("apply_chat_template", "replace_image_token", "replace_video_token"):
        monkeypatch.setattr(type(tiny), name, forbidden)
    monkeypatch.setattr(type(tiny.tokenizer), "encode", forbidden)
    encode(tiny, tokens_only(expanded((0, 2), (1, 4), grids=[SQUARE], sources=[A])))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (expanded(), "input_ids is empty"),
        (ExpandedIds((50, 50), (0,), (), ()), "2 input_ids but 1 mm_token_type_ids"),
        (expanded((0, 1), grids=[SQUARE]), "1 grids for 0 media items"),
        (expanded((1, 4), sources=[A]), "0 grids for 1 media items"),
        (ExpandedIds((50, 50), (0, 3), (), ()), "token 1: kind 3; accepted: 0 text, 1 image, 2 video"),
        (ExpandedIds((50, 50), (0, -1), (), ()), "token 1: kind -1; accepted: 0 text, 1 image, 2 video"),
        (ExpandedIds((50, 103), (0, 0), (), ()), "token 1: id 103 is not in the vocabulary of 103"),
        (ExpandedIds((-1,), (0,), (), ()), "token 0: id -1 is not in the vocabulary of 103"),
        (ExpandedIds((IMAGE, 50), (1, 1), (SQUARE,), (A,)), "token 1: kind 1 (image) but id 50; should be 5"),
        (ExpandedIds((IMAGE,), (2,), (SQUARE,), (EVEN,)), "token 0: kind 2 (video) but id 5; should be 6"),
    ],
    ids=range(10),
)
def test_arrays_that_do_not_fit_are_refused(tiny, given, message):
    with pytest.raises(PromptError) as error:
        encode(tiny, tokens_only(given, row=12))
    assert str(error.value) == f"row 12: {message}"


def no_features(name, tokens, grid, features):
    return f"{name} fills {tokens} media tokens but its grid {grid} has {features} features (merge 2 x 2)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (expanded((0, 2), (1, 3), grids=[SQUARE], sources=[A]), no_features("16x16.png", 3, SQUARE, 4)),
        (expanded((1, 3), (0, 1), (1, 1), grids=[SQUARE], sources=[A]), no_features("16x16.png", 3, SQUARE, 4)),
        (expanded((1, 5), grids=[SQUARE], sources=[A]), "1 image tokens at token 4 belong to no image"),
        (expanded((0, 2), (2, 4)), "4 video tokens at token 2 belong to no video"),
        (
            expanded((0, 2), (1, 4), grids=[SQUARE, FLAT], sources=[A, WIDE]),
            "no media tokens are left for 64x8.png (1 in all)",
        ),
        (expanded((0, 2), grids=[CLIP], sources=[EVEN]), "no media tokens are left for 16x16x4.mp4 (1 in all)"),
        (expanded((2, 3), grids=[CLIP], sources=[EVEN]), no_features("16x16x4.mp4", 3, CLIP, 8)),
        (expanded((2, 4), (0, 1), grids=[CLIP], sources=[EVEN]), no_features("16x16x4.mp4", 4, CLIP, 8)),
        (expanded((2, 4), (0, 1), (2, 2), grids=[CLIP], sources=[EVEN]), no_features("16x16x4.mp4", 6, CLIP, 8)),
        (expanded((2, 2), (0, 1), (2, 1), grids=[SMALL], sources=[ODD]), no_features("8x8x5.mp4", 2, SMALL, 3)),
        (
            expanded((2, 4), (1, 4), (2, 4), grids=[SQUARE, CLIP], sources=[A, EVEN]),
            no_features("16x16x4.mp4", 4, CLIP, 8),
        ),
        (
            expanded((1, 4), grids=[(1, 3, 4)], sources=[A]),
            "16x16.png: grid (1, 3, 4) does not divide into squares of 2 x 2",
        ),
        (
            expanded((1, 4), grids=[(1, -4, -4)], sources=[A]),
            "16x16.png: grid (1, -4, -4) does not divide into squares of 2 x 2",
        ),
        (
            expanded((2, 4), grids=[(0, 4, 4)], sources=[EVEN]),
            "16x16x4.mp4: grid (0, 4, 4) does not divide into squares of 2 x 2",
        ),
        (
            expanded((1, 8), grids=[(2, 4, 4)], sources=[A]),
            "16x16.png: grid (2, 4, 4) of an image has 2 temporal patches",
        ),
        (
            expanded((1, 4), grids=[(1, 2**40, 2**40)], sources=[A]),
            no_features("16x16.png", 4, (1, 2**40, 2**40), 2**78),
        ),
    ],
    ids=range(16),
)
def test_tokens_and_grids_that_differ_are_refused(tiny, given, message):
    with pytest.raises(ExpansionError) as error:
        encode(tiny, tokens_only(given, row=12))
    assert str(error.value) == f"row 12: {message}"


def test_the_prepared_item_must_have_the_given_grid(tiny):
    given = expanded((0, 1), (1, 4), grids=[(1, 2, 8)], sources=[A])
    message = r"row 1: 16x16.png was expanded with grid \(1, 2, 8\), but is prepared with grid \(1, 4, 4\)"
    with pytest.raises(ExpansionError, match=message):
        encode(tiny, tokens_only(given))


def test_the_prepared_item_must_have_a_feature_for_each_token(tiny):
    def load_item(source):
        item = load(tiny, source)
        return replace(item, pixels=item.pixels[:12])

    message = r"row 1: 16x16.png fills 4 media tokens but has 3 features \(12 patches, grid \(1, 4, 4\), merge 2 x 2\)"
    with pytest.raises(ExpansionError, match=message):
        encode(tiny, tokens_only(expanded((1, 4), grids=[SQUARE], sources=[A])), load_item=load_item)


def test_too_long_a_prompt_is_refused_before_its_media_is_loaded(tiny):
    given = tokens_only(expanded((0, 6), (1, 4), grids=[SQUARE], sources=[A]))
    assert len(encode(tiny, given, max_prompt_tokens=10).ids) == 10
    with pytest.raises(PromptTooLong, match="row 1: 10 tokens, but max_prompt_tokens = 9"):
        encode(tiny, given, max_prompt_tokens=9, load_item=pytest.fail)
