"""What went wrong in systems of this kind, as far as it is about tokens and media; one test a report.

The tests are named after the kind of fault.
"""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.data.prompt import ExpandedIds, MediaSource, Prompt
from megarl.errors import ExpansionError, PromptTooLong
from megarl.media.encoder import Encoder
from megarl.media.options import MediaOptions, VideoOptions
from megarl.models.qwen3_vl.positions import mrope_positions
from megarl.packing.alignment import Alignment
from megarl.packing.rows import TokenSequence, pack
from tests.media.files import write_clip
from tests.media.prompts import conversation, encode, media, reference, user

A, B, WIDE, CLIP = media("16x16.png"), media("24x16.png"), media("64x8.png"), media("16x16x5.mp4")


def test_expansion_of_expanded_ids_does_not_happen(tiny):
    """Expanded ids and the raw pictures go on together, and are expanded again: 6,817 tokens become 13,313."""
    once = encode(tiny, user(A, "and", CLIP, "and", WIDE))
    made = reference(tiny, user(A, "and", CLIP, "and", WIDE))
    grids = [tuple(grid) for key in ("image_grid_thw", "video_grid_thw") for grid in made[key].tolist()]
    kinds = made["mm_token_type_ids"][0].tolist()
    given = ExpandedIds(tuple(once.ids.tolist()), tuple(kinds), tuple(grids), (A, WIDE, CLIP))
    twice = encode(tiny, Prompt(0, 1, (), "answer", "test", given))
    assert twice.ids.tolist() == once.ids.tolist() == made["input_ids"][0].tolist()
    assert twice.media_mask.sum() == sum(item.feature_count(2) for item in twice.items)


def test_expansion_of_expanded_text_does_not_happen(qwen):
    """Text in which each picture was spelled out as its media tokens already, beside the raw pictures."""
    expanded = f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>?"
    encoded = encode(qwen, user(A, expanded))
    assert encoded.media_mask.sum() == 4 == encoded.items[0].feature_count(2)
    assert (encoded.ids == qwen.image_token_id).sum() == 4


@pytest.mark.parametrize("family", ["tiny", "qwen"])
@pytest.mark.parametrize("marker", ["<image>", "<video>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
def test_expansion_leaves_prose_alone(request, family, marker):
    """A literal marker in the text counts as a picture: 601 placeholders, 600 features."""
    processor = request.getfixturevalue(family)
    prompt = user(A, f"what does {marker} mean?", CLIP)
    encoded = encode(processor, prompt)
    assert encoded.media_mask.sum() == sum(item.feature_count(2) for item in encoded.items)
    assert f"what does {marker} mean?" in processor.tokenizer.decode(encoded.ids[~encoded.media_mask])


def test_expansion_near_the_limit_shrinks_nothing(tiny):
    """An engine shrinks a picture near the length limit: 32,160 placeholders, 40,800 features."""
    prompt = user("x" * 90, WIDE, row=3)
    whole = encode(tiny, prompt)
    n = len(whole.ids)
    at_the_limit = encode(tiny, prompt, max_prompt_tokens=n)
    assert at_the_limit.ids.tolist() == whole.ids.tolist()
    assert at_the_limit.items[0].grid == whole.items[0].grid
    for limit in range(1, n):
        with pytest.raises(PromptTooLong, match=f"row 3: {n} tokens, but max_prompt_tokens = {limit}"):
            encode(tiny, prompt, max_prompt_tokens=limit)


def test_expansion_has_one_token_space(tiny):
    """Compact and expanded ids are mixed between rollout and trainer."""
    prompt = encode(tiny, user("see", A, "and", CLIP))
    assert len(prompt.ids) == len(prompt.media_mask) == prompt.positions.shape[1]
    sequence = TokenSequence(prompt, torch.tensor([60, 61]))
    (row,) = pack([sequence, sequence], 1000, 2)
    assert len(sequence) == len(prompt.ids) + 2 and row.bounds == (0, len(sequence), 2 * len(sequence))
    for first, last in [(0, len(sequence)), (len(sequence), 2 * len(sequence))]:
        assert row.ids[first:last].tolist() == [*prompt.ids.tolist(), 60, 61]
    assert row.predictors.tolist() == [b - 3 + k for b in row.bounds[1:] for k in (0, 1)]


def test_expansion_of_a_false_grid_is_refused(tiny):
    """`[3,413]` placeholders against `[3,347]` features: the row, the item, both counts and the grid are named."""
    kinds = (0, *[1] * 6)
    given = ExpandedIds((50, *[tiny.image_token_id] * 6), kinds, ((1, 4, 6),), (A,))
    with pytest.raises(
        ExpansionError, match=r"row 9: 16x16.png was expanded with grid \(1, 4, 6\), but .* \(1, 4, 4\)"
    ):
        encode(tiny, Prompt(8, 9, (), "answer", "test", given))


def test_truncation_sees_whole_samples(tiny, tmp_path):
    """A filter for overlong samples reads one whose pictures were taken out of it."""
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    source = MediaSource("image", "a.png", tmp_path / "a.png")
    long, short = user("x" * 50, source, row=1), user("x", source, row=2)
    before = copy.deepcopy([long, short])
    strict = Encoder(tiny, mrope_positions, 20)
    refused, accepted = strict.check([long, short])
    assert str(refused) == "row 1: 57 tokens, but max_prompt_tokens = 20" and isinstance(accepted, bytes)
    assert [long, short] == before, "a refused sample is whole"
    generous = Encoder(tiny, mrope_positions, 57)
    assert generous.encode(long).items[0].digest == strict.encode(short).items[0].digest
    assert len(generous.encode(long).ids) == 57, "nothing is cut off"


def test_padding_is_on_one_side_for_all(tiny):
    """Left-padded ids, right-padded media markers: pictures land on padding."""
    sequences = [TokenSequence(encode(tiny, user(*parts)), torch.tensor([60])) for parts in [("?", A), (WIDE, "abc")]]
    (row,) = pack(sequences, 64, 2, Alignment(32))
    n = sum(map(len, sequences))
    assert len(row.ids) == 32 > n and row.bounds[-2:] == (n, 32)
    pads = row.ids[:n] == tiny.image_token_id
    assert torch.equal(row.feature_rows[:n] >= 0, pads) and pads.sum() == 12
    assert (row.feature_rows[n:] == -1).all() and (row.ids[n:] == 0).all()
    assert row.positions.shape == (3, 32)


def test_padding_of_a_batch_does_not_exist(tiny):
    """A prompt is the same tokens whatever prompts it is encoded with."""
    prompts = [user("?"), user("much longer than the other", A), user(CLIP)]
    alone = [encode(tiny, prompt).ids.tolist() for prompt in prompts]
    again = [encode(tiny, prompt).ids.tolist() for prompt in reversed(prompts)]
    assert alone == again[::-1] and len({len(ids) for ids in alone}) == 3
    assert not any(tiny.tokenizer.pad_token_id in ids for ids in alone)


def test_positions_are_packed_with_their_tokens(tiny):
    """3-D positions or media markers are not packed, or padded, with their tokens."""
    prompts = [encode(tiny, user(*parts)) for parts in [("see", A, "?"), (CLIP, WIDE), ("text",), (B, B, "two")]]
    sequences = [TokenSequence(prompt, torch.arange(3) + 50) for prompt in prompts]
    for row in pack(sequences, 64, 2, Alignment(8)):
        for place, member in enumerate(row.members):
            part = slice(row.bounds[place], row.bounds[place + 1])
            prompt = prompts[member]
            after = prompt.next_position + torch.arange(3)
            assert torch.equal(row.positions[:, part], torch.cat([prompt.positions, after.expand(3, 3)], 1))
            assert torch.equal(row.feature_rows[part][: len(prompt.ids)] >= 0, prompt.media_mask)
    assert (prompts[0].positions[1] != prompts[0].positions[2]).any(), "three axes, not one"


def test_packing_keeps_samples_apart(tiny):
    """Of tokens: another sample beside it changes nothing of a sample but where it begins."""
    fixed = TokenSequence(encode(tiny, user("see", A, "?")), torch.tensor([60, 61]))

    def second_of(neighbour):
        (row,) = pack([TokenSequence(encode(tiny, user(*neighbour)), torch.tensor([70])), fixed], 1000, 2)
        start, end = row.bounds[1:3]
        assert end - start == len(fixed)
        features = torch.cat([item.pixels.view(-1, 4, 96) for item in row.items])
        rows = row.feature_rows[start:end]
        return (
            row.ids[start:end].tolist(),
            row.positions[:, start:end].tolist(),
            features[rows[rows >= 0]].tolist(),
            row.split(row.targets)[1].tolist(),
            (row.split(row.predictors)[1] - start).tolist(),
        )

    alone = second_of(["?"])
    assert all(second_of(neighbour) == alone for neighbour in ([B, "?"], [CLIP, WIDE], [A, A], ["long" * 9]))


@pytest.mark.parametrize("fps_of_file", [2, 10, 30])
def test_video_times_are_the_containers(tiny, tmp_path, fps_of_file):
    """Sampling by `num_frames` without a frame rate gives the time 16 instead of 10."""
    frames = np.zeros((10 * fps_of_file + 1, 16, 16, 3), dtype=np.uint8)
    path = write_clip(tmp_path / "ten seconds.mp4", frames, rate=fps_of_file)
    options = MediaOptions(video=VideoOptions(num_frames=5))
    prompt = Encoder(tiny, mrope_positions, 500, options).encode(user(MediaSource("video", "clip", path)))
    assert prompt.items[0].timestamps == (0.0, 2.5, 5.0, 7.5, 10.0)
    frame = "<|vision_start|><|vision_end|>"
    times = "".join(f"<{seconds} seconds>{frame}" for seconds in ("1.2", "6.2", "10.0"))
    text = tiny.tokenizer.decode(prompt.ids[~prompt.media_mask])
    assert text == f"<|im_start|><|vision_start|>{times}<|vision_end|>"


@pytest.mark.parametrize("family", ["tiny", "qwen"])
def test_mixed_batch_has_one_template(request, family):
    """A text-only row in a multimodal batch loses its chat template."""
    processor = request.getfixturevalue(family)
    start, end = (
        ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n") if family == "qwen" else ("<|im_start|>", "")
    )
    shown = {
        "text": ["one, ", "two"],
        "picture": ["one, ", A, "two"],
        "video": ["one, ", "two", CLIP],
    }
    for parts in shown.values():
        encoded = encode(processor, user(*parts))
        text = processor.tokenizer.decode(encoded.ids)
        assert text.startswith(f"{start}one, ") and text.endswith(end)
        expected = reference(processor, user(*parts))
        assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
    turns = [("system", "count:"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    text = conversation(*turns)
    with_media = conversation(*turns[:1], ("user", A, "one"), *turns[2:])
    bare = processor.tokenizer.decode(encode(processor, text).ids)
    encoded = encode(processor, with_media)
    marks = processor.tokenizer.decode(encoded.ids).replace("<|image_pad|>" * 4, "")
    assert marks.replace("<|vision_start|><|vision_end|>", "") == bare, "the picture's place is all that differs"
