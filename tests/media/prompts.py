"""Prompts over media that is made up from its name, and what transformers makes of them."""

from collections.abc import Mapping

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.video_utils import VideoMetadata

from megarl.data.prompt import MediaSource, Prompt
from megarl.media.expand import encode_prompt
from megarl.media.image import prepare_image
from megarl.media.item import EncodedPrompt, MediaItem
from megarl.media.options import VideoOptions
from megarl.media.video import prepare_video
from megarl.models.qwen3_vl.positions import mrope_positions


def media(name: str) -> MediaSource:
    """`24x16.png` is a picture; `24x16x5.mp4` a video of 5 frames at 10 frames a second, `24x16x5@30.mp4` at 30."""
    return MediaSource("video" if name.endswith(".mp4") else "image", name)


def picture(source: MediaSource) -> Image.Image:
    width, height = map(int, source.name.removesuffix(".png").split("x"))
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def clip(source: MediaSource) -> tuple[torch.Tensor, float]:
    """Frames uint8 `[n, 3, h, w]` and their rate."""
    size, _, rate = source.name.removesuffix(".mp4").partition("@")
    width, height, frames = map(int, size.split("x"))
    noise = np.random.default_rng([width, height, frames]).integers(0, 256, (frames, 3, height, width), dtype=np.uint8)
    return torch.from_numpy(noise), float(rate or 10)


def load(processor, source: MediaSource, times: Mapping[str, tuple[float, ...]] = {}) -> MediaItem:  # noqa: B006
    """`times` are the presentation times of a video's frames by its name, where its rate is not constant."""
    if source.kind == "image":
        return prepare_image(picture(source), processor.image_processor, source.name)
    frames, rate = clip(source)
    stamps = times.get(source.name) or tuple(place / rate for place in range(len(frames)))
    return prepare_video(frames, stamps, processor.video_processor, VideoOptions(), source.name)


def encode(processor, prompt, max_prompt_tokens=10_000, load_item=None, positions=mrope_positions) -> EncodedPrompt:
    return encode_prompt(prompt, processor, positions, max_prompt_tokens, load_item or (lambda s: load(processor, s)))


def part(value: str | MediaSource) -> dict:
    return {"type": "text", "text": value} if isinstance(value, str) else {"type": value.kind, value.kind: value}


def conversation(*turns, row=1) -> Prompt:
    """Turns are a role and its parts."""
    messages = tuple({"role": role, "content": [part(v) for v in values]} for role, *values in turns)
    return Prompt(0, row, messages, "answer", "test")


def user(*values, row=1) -> Prompt:
    return conversation(("user", *values), row=row)


def reference(processor, prompt: Prompt) -> dict:
    """What transformers' processor makes of it, with true frame numbers and frame rates."""
    messages = [
        {
            "role": m["role"],
            "content": [{**p, p["type"]: "" if p["type"] != "text" else p["text"]} for p in m["content"]],
        }
        for m in prompt.messages
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    clips = [clip(source) for source in prompt.media if source.kind == "video"]
    metadata = [
        VideoMetadata(total_num_frames=len(frames), fps=rate, frames_indices=list(range(len(frames))))
        for frames, rate in clips
    ]
    return processor(
        text=[text],
        images=[picture(source) for source in prompt.media if source.kind == "image"] or None,
        videos=[frames for frames, _ in clips] or None,
        video_metadata=metadata or None,
        do_sample_frames=False,
        return_tensors="pt",
    )


def reference_positions(expected: dict) -> tuple[torch.Tensor, int]:
    """Positions int64 `[3, n]` and the next position, by transformers' model."""
    config = Qwen3VLConfig(
        text_config={"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 16},
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 1, "spatial_merge_size": 2},
    )
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    ids, grids = expected["input_ids"], [expected.get("image_grid_thw"), expected.get("video_grid_thw")]
    positions, delta = model.get_rope_index(ids, expected["mm_token_type_ids"], *grids)
    return positions[:, 0], ids.shape[1] + delta.item()
