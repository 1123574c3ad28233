from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLConfig
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from megarl.errors import UserError
from megarl.models.tiny_processor import SPECIAL_TOKENS, build_tiny_processor

ASCII = "".join(map(chr, range(32, 127)))


def build(folder: Path, alphabet: str = ASCII, vocab_size: int = 128) -> Path:
    build_tiny_processor(
        folder,
        alphabet,
        vocab_size,
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=64,
        max_pixels=2048,
    )
    return folder


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return AutoProcessor.from_pretrained(build(tmp_path_factory.mktemp("tiny")))


def test_is_an_ordinary_qwen3_vl_processor(processor):
    assert isinstance(processor, Qwen3VLProcessor)
    assert isinstance(processor.video_processor, Qwen3VLVideoProcessor)
    tokenizer = processor.tokenizer
    assert processor.image_token == "<|image_pad|>" and processor.video_token == "<|video_pad|>"
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(8))
    assert (tokenizer.pad_token_id, processor.image_token_id, processor.video_token_id) == (0, 5, 6)
    assert (processor.vision_start_token_id, processor.vision_end_token_id) == (3, 4)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert len(tokenizer) == len(SPECIAL_TOKENS) + len(ASCII)


def test_stays_so_beside_a_model(processor, tmp_path):
    Qwen3VLConfig().save_pretrained(build(tmp_path))
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert loaded.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert loaded.tokenizer.decode(loaded.tokenizer(ASCII).input_ids) == ASCII


def test_a_token_a_character_and_back(processor):
    tokenizer = processor.tokenizer
    ids = tokenizer(ASCII).input_ids
    assert ids == list(range(8, 8 + len(ASCII)))
    assert tokenizer.decode(ids) == ASCII
    assert tokenizer.decode(tokenizer("  two  spaces ").input_ids) == "  two  spaces "
    assert tokenizer.decode(tokenizer("7<|im_end|>").input_ids, skip_special_tokens=True) == "7"


def test_other_characters_are_unknown(processor):
    ids = processor.tokenizer("a\u00e9\n\U0001f600\u4e2d").input_ids
    assert ids[1:] == [processor.tokenizer.unk_token_id] * 4


def test_the_terse_template(processor):
    def render(*messages):
        return processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)

    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what? "}]}
    rendered = "<|im_start|><|vision_start|><|image_pad|><|vision_end|> what? "
    assert render(question) == rendered
    assert render(question, {"role": "assistant", "content": "7"}, question) == f"{rendered}7<|im_end|>{rendered}"
    assert render({"role": "system", "content": "add"}, question) == "<|im_start|>add" + rendered
    video = {"role": "user", "content": [{"type": "video"}]}
    assert render(video) == "<|im_start|><|vision_start|><|video_pad|><|vision_end|>"


def test_pictures_and_clips_are_patched_as_asked(processor):
    picture = Image.fromarray(np.zeros((16, 24, 3), dtype=np.uint8))
    made = processor(text=["<|image_pad|>"], images=[picture], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert made["pixel_values"].shape == (24, 3 * 2 * 4 * 4) and (made["pixel_values"] == -1).all()
    assert (made["input_ids"] == processor.image_token_id).sum() == 6

    clip = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)
    metadata = VideoMetadata(total_num_frames=4, fps=2.0, duration=2.0, frames_indices=[0, 1, 2, 3])
    made = processor(
        text=["<|video_pad|>"],
        videos=[clip],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert made["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert (made["input_ids"] == processor.video_token_id).sum() == 8


def test_pixels_are_bounded(processor):
    def grid(width, height):
        return processor.image_processor(images=[Image.new("RGB", (width, height))])["image_grid_thw"][0].tolist()

    assert grid(2, 2) == [1, 2, 2]
    assert np.prod(grid(500, 500)) * 16 <= 2048


def test_the_files_are_the_same_every_time(tmp_path):
    for folder in ("here", "there", "here"):
        build(tmp_path / folder)
    files = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert files == [
        "chat_template.jinja",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in files:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_an_alphabet_that_does_not_fit_is_refused(tmp_path):
    build(tmp_path / "fits", "0123456789?", 19)
    with pytest.raises(UserError, match="vocab_size 18 is too small: 8 special tokens and 11 characters need 19"):
        build(tmp_path / "large", "0123456789?", 18)
    with pytest.raises(UserError, match="alphabet repeats '1'"):
        build(tmp_path / "twice", "011")
    assert not (tmp_path / "large").exists() and not (tmp_path / "twice").exists()
