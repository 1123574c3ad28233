"""From files to encoded prompts, each decoded once, ahead of time where it is asked for."""

import copy
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.data.prompt import ExpandedIds, MediaSource, Prompt
from megarl.errors import ExpansionError, MediaError, PromptError, PromptTooLong, UserError
from megarl.media import encoder as module
from megarl.media.encoder import Encoder
from megarl.media.options import ImageOptions, MediaOptions
from megarl.models.qwen3_vl.positions import mrope_positions
from tests.media.files import write_clip
from tests.media.prompts import user

ITEM_BYTES = 16 * 96 * 4  # a 16 x 16 picture with patches of 4 x 4, two frames, float32


def write_picture(path: Path, shade: int = 0, size: int = 16) -> MediaSource:
    Image.new("RGB", (size, size), (shade, 0, 0)).save(path)
    return MediaSource("image", path.name, path)


def prompts(folder: Path, count: int):
    return [user(write_picture(folder / f"{number}.png", number), "?", row=number + 1) for number in range(count)]


@pytest.fixture
def decoded():
    """Names of the items that were loaded."""
    return []


@pytest.fixture
def make(tiny, decoded):
    def load(processor, source, options):
        decoded.append(source.name)
        return module.load_item(processor, source, options)

    def build(max_prompt_tokens=100, **options):
        made.append(Encoder(tiny, mrope_positions, max_prompt_tokens, MediaOptions(**options), load))
        return made[-1]

    made = []
    yield build
    for encoder in made:
        encoder.close()


def test_small_data_sets_are_decoded_once(make, tmp_path, decoded):
    encoder = make()
    for _ in range(3):
        for prompt in prompts(tmp_path, 4):
            assert len(encoder.encode(prompt).ids) == 8
    assert decoded == ["0.png", "1.png", "2.png", "3.png"]


def test_prefetching_decodes_what_will_be_encoded(make, tmp_path, decoded):
    encoder = make()
    made = prompts(tmp_path, 8)
    plain = [encoder.encode(prompt) for prompt in made]
    encoder = make()
    decoded.clear()
    encoder.prefetch([*made, *made])
    ahead = [encoder.encode(prompt) for prompt in (*made, *made)]
    assert sorted(decoded) == [f"{number}.png" for number in range(8)]
    for one, other in zip([*plain, *plain], ahead, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.items[0].digest == other.items[0].digest
    metrics = encoder.metrics()
    assert metrics["media/decoded"] == 8 and metrics["media/cache_bytes_peak"] == 8 * ITEM_BYTES
    assert metrics["media/decode_seconds"] > 0 and encoder.metrics()["media/decoded"] == 0


def test_videos_and_pictures_from_files_and_bytes(make, tmp_path, decoded):
    frames = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    path = write_clip(tmp_path / "clip.mkv", frames, rate=2)
    video = MediaSource("video", "clip.mkv", path)
    picture = write_picture(tmp_path / "a.png")
    prompt = user(
        "in ", video, " and ", picture, MediaSource("image", "row 1 images[1]", data=picture.path.read_bytes())
    )
    encoder = make(max_prompt_tokens=200)
    encoder.prefetch([prompt])
    encoded = encoder.encode(prompt)
    text = encoder._processor.tokenizer.decode(encoded.ids[~encoded.media_mask])
    frames = "".join(f"<{seconds} seconds><|vision_start|><|vision_end|>" for seconds in ("0.2", "1.2", "2.0"))
    picture = "<|vision_start|><|vision_end|>"
    assert text == f"<|im_start|>in <|vision_start|>{frames}<|vision_end|> and {picture}{picture}"
    assert [item.kind for item in encoded.items] == ["video", "image", "image"]
    assert encoded.items[0].timestamps == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert encoded.items[1].digest == encoded.items[2].digest
    assert sorted(decoded) == ["a.png", "clip.mkv", "row 1 images[1]"]


def test_the_options_reach_the_processor(make, tmp_path):
    prompt = user(write_picture(tmp_path / "a.png", size=32))
    assert make().encode(prompt).items[0].grid == (1, 8, 8)
    options = ImageOptions(min_pixels=64, max_pixels=256)
    assert make(image=options).encode(prompt).items[0].grid == (1, 4, 4)


def test_an_unfit_processor_is_refused_before_the_first_prompt(tiny):
    processor = copy.copy(tiny)
    processor.image_token = "<image>"
    with pytest.raises(UserError, match="<image>"):
        Encoder(processor, mrope_positions, 100)


def test_the_check_gives_a_digest_or_the_reason(make, tmp_path):
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    damaged = MediaSource("image", "damaged.png", tmp_path / "damaged.png")
    good, good_too = prompts(tmp_path, 2)
    given = [good, user(damaged, row=7), user("x" * 200, row=8), good_too, user("\ud800", row=9), good]
    results = make().check(given)
    assert [type(result) for result in results] == [bytes, MediaError, PromptTooLong, bytes, PromptError, bytes]
    assert results[0] == results[5] != results[3] and len(results[0]) == 32
    assert results[1].name == "damaged.png" and "\n" not in str(results[1])
    assert str(results[2]) == "row 8: 201 tokens, but max_prompt_tokens = 100"
    assert all(r.__traceback__ is None for r in results if isinstance(r, Exception)), "they hold no pixels"


def test_the_checks_digest_is_of_ids_mask_and_pixels(make, tmp_path):
    a, b = write_picture(tmp_path / "a.png", 1), write_picture(tmp_path / "b.png", 2)
    same = write_picture(tmp_path / "same.png", 1)
    given = [user(a, "?"), user(same, "?"), user(b, "?"), user(a, "!"), user("?", a), user(a, b), user(b, a)]
    results = make().check(given)
    assert results[0] == results[1] and len(set(results)) == 6
    assert results == make(threads=1, cache_bytes=ITEM_BYTES).check(given), "whatever the budget"


def test_the_mask_is_part_of_the_digest(make, tmp_path, tiny):
    a = write_picture(tmp_path / "a.png")
    pad = tiny.image_token_id
    ids = (pad,) * 8
    rows = [
        Prompt(0, 1, (), "", "t", ExpandedIds(ids, kinds, ((1, 4, 4),), (a,)))
        for kinds in [(1,) * 4 + (0,) * 4, (0,) * 4 + (1,) * 4, (1,) * 5 + (0,) * 3]
    ]
    first, second, third = make().check(rows)
    assert isinstance(first, bytes) and isinstance(second, bytes) and first != second
    assert isinstance(third, ExpansionError)


def test_the_check_keeps_within_the_budget_and_decodes_each_item_once(make, tmp_path, decoded):
    made = prompts(tmp_path, 12)
    encoder = make(cache_bytes=3 * ITEM_BYTES, threads=2)
    results = encoder.check([prompt for prompt in made for _ in range(2)])
    assert len(set(results)) == 12 and all(isinstance(result, bytes) for result in results)
    assert sorted(decoded) == sorted(f"{number}.png" for number in range(12))
    assert encoder.metrics()["media/cache_bytes_peak"] <= 3 * ITEM_BYTES


def test_a_thread_that_fails_names_the_item_that_is_asked_for(make, tmp_path):
    encoder = make()
    missing = user(MediaSource("image", "images/a.png", tmp_path / "a.png"))
    encoder.prefetch([missing])
    with pytest.raises(MediaError, match="^images/a.png: no such file$"):
        encoder.encode(missing)
    write_picture(tmp_path / "a.png")
    assert encoder.encode(missing).items, "an error is not remembered"


def test_a_budget_below_a_step_costs_time_and_not_the_run(make, tmp_path, decoded):
    made = prompts(tmp_path, 20)
    encoder = make(cache_bytes=ITEM_BYTES * 3 // 2, threads=3)
    for _ in range(2):
        encoder.prefetch(made)
        assert len([encoder.encode(prompt) for prompt in made]) == 20
    assert encoder.metrics()["media/cache_bytes_peak"] == ITEM_BYTES


def test_threads_decode_while_nobody_waits(tiny, tmp_path):
    """What a step prefetches is there after the time that the step takes anyway."""

    def slow(processor, source, options):
        time.sleep(0.05)
        return module.load_item(processor, source, options)

    made = prompts(tmp_path, 8)
    with Encoder(tiny, mrope_positions, 100, MediaOptions(threads=4), slow) as encoder:
        encoder.encode(made[0])
        encoder.metrics()
        encoder.prefetch(made)
        time.sleep(1.0)  # generate and train
        for prompt in made:
            encoder.encode(prompt)
        metrics = encoder.metrics()
    assert metrics["media/decoded"] == 7 and metrics["media/decode_seconds"] >= 0.35
    assert metrics["media/cache_hits"] == 8 and metrics["media/wait_seconds"] < 0.05


def test_threads_change_no_bit(tiny, tmp_path):
    """The processor may run in several threads at once."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(24):
        path = tmp_path / f"{number}.png"
        height, width = rng.integers(8, 90, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        made.append(user(MediaSource("image", path.name, path), "?", row=number + 1))
    one = Encoder(tiny, mrope_positions, 1000, MediaOptions(threads=0))
    expected = [one.encode(prompt) for prompt in made]
    with Encoder(tiny, mrope_positions, 1000, MediaOptions(threads=6)) as many:
        many.prefetch(made)
        for prompt, other in zip(made, expected, strict=True):
            item = many.encode(prompt).items[0]
            assert torch.equal(item.pixels, other.items[0].pixels) and item.digest == other.items[0].digest
