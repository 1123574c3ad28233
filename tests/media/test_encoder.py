import copy
from pathlib import Path

import pytest
from PIL import Image

from megarl.data.prompt import Prompt
from megarl.errors import UserError
from megarl.media import cache
from megarl.media.encoder import Encoder
from megarl.models.qwen3_vl.positions import mrope_positions

ITEM_BYTES = 16 * 96 * 4  # a 16 x 16 picture with patches of 4 x 4, two frames, float32


def prompts(folder: Path, count: int) -> list[Prompt]:
    made = []
    for index in range(count):
        path = folder / f"{index}.png"
        Image.new("RGB", (16, 16), (index, 0, 0)).save(path)
        content = [{"type": "image", "image": path}, {"type": "text", "text": "?"}]
        made.append(Prompt(index, ({"role": "user", "content": content},), "", "test"))
    return made


@pytest.fixture
def decoded(monkeypatch):
    """Names of the files that were decoded, in order."""
    names = []
    load_image = cache.load_image
    monkeypatch.setattr(cache, "load_image", lambda path: names.append(path.stem) or load_image(path))
    return names


def test_small_data_sets_are_decoded_once(tiny, tmp_path, decoded):
    encoder = Encoder(tiny, mrope_positions, 100)
    for _ in range(3):
        for prompt in prompts(tmp_path, 4):
            assert len(encoder.encode(prompt).ids) == 8
    assert decoded == ["0", "1", "2", "3"]


def test_the_least_recently_used_item_goes_first(tiny, tmp_path, decoded):
    encoder = Encoder(tiny, mrope_positions, 100, cache_bytes=2 * ITEM_BYTES)
    made = prompts(tmp_path, 3)
    for number in (0, 1, 0, 2, 0, 1):
        encoder.encode(made[number])
    assert decoded == ["0", "1", "2", "1"]


def test_an_item_above_the_budget_is_not_kept_and_drops_nothing(tiny, tmp_path, decoded):
    encoder = Encoder(tiny, mrope_positions, 100, cache_bytes=ITEM_BYTES)
    small, _ = prompts(tmp_path, 2)
    path = tmp_path / "large.png"
    Image.new("RGB", (32, 32)).save(path)
    large = Prompt(2, ({"role": "user", "content": [{"type": "image", "image": path}]},), "", "test")
    for prompt in (small, large, large, small):
        encoder.encode(prompt)
    assert decoded == ["0", "large", "large"]


def test_an_unfit_tokenizer_is_refused_before_the_first_prompt(tiny):
    processor = copy.copy(tiny)
    processor.image_token = "<image>"
    with pytest.raises(UserError, match="<image>"):
        Encoder(processor, mrope_positions, 100)


def test_other_kinds_of_media_are_refused_by_name(tiny):
    with pytest.raises(ValueError, match="a.mp4: media of kind 'video' is not supported"):
        cache.load_item(tiny, "video", Path("a.mp4"))
