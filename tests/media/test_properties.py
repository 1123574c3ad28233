"""What holds for every mix of text, pictures and videos, from expansion to packed rows and back."""

from itertools import combinations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from megarl.data.prompt import ExpandedIds, MediaSource, Prompt
from megarl.media.image import prepare_image
from megarl.media.options import VideoOptions
from megarl.media.video import prepare_video
from megarl.models.qwen3_vl.positions import mrope_positions
from megarl.packing.alignment import Alignment
from megarl.packing.rows import TokenSequence, pack
from tests.media.prompts import encode, user

few = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SPELLED_OUT = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]

# Line breaks have no token in the tiny alphabet; lone `<` and `|>` make halves of special tokens likely.
texts = st.lists(
    st.one_of(
        st.sampled_from([*SPELLED_OUT, "<|", "|>", "image_pad", "im_end", "<|im_", " ", "<0.5 seconds>"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8),
    ),
    max_size=5,
).map("".join)


def named(kind, width, height, frames, shade):
    return MediaSource(kind, f"{kind} {width} {height} {frames} {shade}")


# Plain colours, so that different sources often have equal pixels.
shades = st.integers(0, 2)
pictures = st.builds(named, st.just("image"), st.integers(1, 40), st.integers(1, 40), st.just(1), shades)
videos = st.builds(named, st.just("video"), st.integers(8, 32), st.integers(8, 32), st.integers(1, 7), shades)
prompts = st.lists(st.one_of(texts, pictures, videos), min_size=1, max_size=6).map(lambda values: user(*values))


def loader(processor):
    def load(source):
        kind, *numbers = source.name.split()
        width, height, frames, shade = map(int, numbers)
        if kind == "image":
            return prepare_image(
                Image.new("RGB", (width, height), (shade,) * 3), processor.image_processor, source.name
            )
        pixels = torch.full((frames, 3, height, width), shade, dtype=torch.uint8)
        times = [place * (shade + 1) / 7 for place in range(frames)]
        return prepare_video(pixels, times, processor.video_processor, VideoOptions(), source.name)

    return load


@few
@given(prompts)
def test_tokens_features_and_all_that_is_per_token_agree(tiny, prompt):
    encoded = encode(tiny, prompt, load_item=loader(tiny))
    assert len(encoded.ids) == len(encoded.media_mask) == encoded.positions.shape[1]

    assert [item.name for item in encoded.items] == [source.name for source in prompt.media]
    assert encoded.media_mask.sum() == sum(item.feature_count(2) for item in encoded.items)
    assert encoded.media_mask.sum() * 4 == sum(len(item.pixels) for item in encoded.items)
    pads = [tiny.image_token_id if i.kind == "image" else tiny.video_token_id for i in encoded.items]
    counts = [item.feature_count(2) for item in encoded.items]
    assert encoded.ids[encoded.media_mask].tolist() == [p for p, n in zip(pads, counts, strict=True) for _ in range(n)]

    for token in (tiny.image_token_id, tiny.video_token_id):
        assert not (encoded.ids[~encoded.media_mask] == token).any(), "prose stays prose"
    starts = encoded.ids == tiny.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    frames = sum(item.grid[0] for item in encoded.items if item.kind == "video")
    assert starts.sum() == len(encoded.items) + frames

    runs = [g for i in encoded.items for g in ([(1, *i.grid[1:])] * i.grid[0] if i.kind == "video" else [i.grid])]
    positions, next_position = mrope_positions(encoded.media_mask, runs, 2)
    assert torch.equal(encoded.positions, positions) and encoded.next_position == next_position


@few
@given(prompts)
def test_the_text_is_the_prompts(tiny, prompt):
    """Without the media, what is left is the template with every word of the messages."""
    encoded = encode(tiny, prompt, load_item=loader(tiny))
    items = iter(encoded.items)

    def shown(part):
        if part["type"] == "text":
            return part["text"]
        times = next(items).timestamps
        times = [(a + b) / 2 for a, b in zip(times[::2], [*times[1::2], *times[len(times) // 2 * 2 :]], strict=True)]
        frames = "".join(f"<{time:.1f} seconds><|vision_start|><|vision_end|>" for time in times)
        return f"<|vision_start|>{frames}<|vision_end|>"

    rendered = "".join(shown(part) for part in prompt.messages[0]["content"])
    assert tiny.tokenizer.decode(encoded.ids[~encoded.media_mask]) == "<|im_start|>" + rendered


@few
@given(prompts)
def test_expanding_is_done_once(tiny, prompt):
    """The expanded ids as a prompt of their own are the same prompt."""
    once = encode(tiny, prompt, load_item=loader(tiny))
    numbers = {"image": 1, "video": 2}
    kinds = torch.zeros_like(once.ids)
    kinds[once.media_mask] = torch.tensor(
        [numbers[item.kind] for item in once.items for _ in range(item.feature_count(2))], dtype=torch.int64
    )
    columns = sorted(zip(prompt.media, once.items, strict=True), key=lambda pair: numbers[pair[0].kind])
    given_ids = ExpandedIds(
        tuple(once.ids.tolist()),
        tuple(kinds.tolist()),
        tuple(item.grid for _, item in columns),
        tuple(source for source, _ in columns),
    )
    twice = encode(tiny, Prompt(0, 1, (), "answer", "test", given_ids), load_item=loader(tiny))
    assert torch.equal(once.ids, twice.ids) and torch.equal(once.media_mask, twice.media_mask)
    assert torch.equal(once.positions, twice.positions) and once.next_position == twice.next_position
    assert [item.digest for item in once.items] == [item.digest for item in twice.items]


@few
@given(st.lists(st.one_of(pictures, videos), min_size=2, max_size=6))
def test_digests_tell_pixels_apart(tiny, sources):
    """Equal ones give equal pixels, and the same file gives the same one; two files may be prepared alike and have
    digests of their own, since what was decoded is hashed."""
    items = [loader(tiny)(source) for source in sources]
    for item, again in zip(items, [loader(tiny)(source) for source in sources], strict=True):
        assert item.digest == again.digest
    for one, other in combinations(items, 2):
        if one.digest == other.digest:
            assert one.kind == other.kind and one.grid == other.grid and torch.equal(one.pixels, other.pixels)


@few
@given(
    st.lists(st.tuples(prompts, st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 100),
)
def test_packing_and_unpacking_is_the_identity(tiny, samples, multiple, more):
    """Each prompt with a group of completions; media tokens may be sampled."""
    load = loader(tiny)
    sequences = []
    for prompt, length, group in samples:
        encoded = encode(tiny, prompt, load_item=load)
        sequences += [TokenSequence(encoded, torch.arange(length) + 4 + place) for place in range(group)]
    bound = -(-(max(map(len, sequences)) + more) // multiple) * multiple
    rows = pack(sequences, bound, 2, Alignment(multiple))

    assert sorted(member for row in rows for member in row.members) == list(range(len(sequences)))
    for row in rows:
        n = len(row.ids)
        assert row.positions.shape == (3, n) and row.feature_rows.shape == (n,)
        assert n == row.bounds[-1] <= bound and n % multiple == 0
        features = torch.cat([torch.empty(0, 4, 96), *(i.pixels.view(-1, 4, 96) for i in row.items)])
        targets = row.split(row.targets)
        for place, member in enumerate(row.members):
            prompt, completion = sequences[member].prompt, sequences[member].completion
            part = slice(row.bounds[place], row.bounds[place + 1])
            assert torch.equal(row.ids[part], torch.cat([prompt.ids, completion]))
            assert torch.equal(row.positions[:, part][:, : len(prompt.ids)], prompt.positions)
            assert torch.equal(targets[place], completion)
            media = row.feature_rows[part] >= 0
            assert torch.equal(media, torch.cat([prompt.media_mask, torch.zeros(len(completion), dtype=torch.bool)]))
            pixels = [torch.empty(0, 4, 96), *(item.pixels.view(-1, 4, 96) for item in prompt.items)]
            assert torch.equal(features[row.feature_rows[part][media]], torch.cat(pixels))
        assert (row.feature_rows[row.bounds[len(row.members)] :] == -1).all()
