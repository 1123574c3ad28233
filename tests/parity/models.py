"""The models that are compared, with random weights, and what they are asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from megarl.data.prompt import Prompt
from megarl.media.encoder import Encoder
from megarl.media.options import MediaOptions, VideoOptions
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.models.tiny_processor import build_tiny_processor, build_tiny_tokenizer
from megarl.models.weight_files import parameter_shapes
from megarl.verify.cases import Case
from tests import tiny
from tests.parity.exchange import ASKED, Asked

_TEXT = dict(vocab_size=151936, rms_norm_eps=1e-6, hidden_size=2048, head_dim=128)
_INTERLEAVED = dict(rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True)
_TOWER = dict(patch_size=16, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=2048, num_heads=16)
_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


@dataclass(frozen=True)
class Tokens:
    """Of completions."""

    fixed: int
    sampled: int
    """By the engine, at most."""
    rollouts: int
    """That it samples of each prompt."""


TINY_TOKENS = Tokens(fixed=16, sampled=16, rollouts=2)
REAL_TOKENS = Tokens(fixed=192, sampled=96, rollouts=8)


@dataclass(frozen=True)
class Shape:
    """The published sizes of a model; its language model cut to the first layers where it would not fit."""

    name: str
    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True

    @property
    def side(self) -> int:
        """As `fixed_cases` takes it: a picture then has 9 x 6 media tokens, more than a window of Qwen2.5-VL."""
        return 3 * self.vision["patch_size"] * self.vision["spatial_merge_size"] if self.vision else 8

    def rehearsed(self) -> "Shape":
        """Two layers of each stack, 16 experts and 1,024 tokens, so that the command can be tried on a CPU."""
        vision = dict(self.vision)
        if vision:
            vision["depth"] = 2
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = [0, 1]
        if "fullatt_block_indexes" in vision:
            vision["fullatt_block_indexes"] = [1]
        text = {**self.text, "num_hidden_layers": 2, "vocab_size": 1024}
        if "num_experts" in text:
            text["num_experts"] = 16
        return replace(self, text=text, vision=vision)


REAL = (
    Shape(
        "Qwen3-VL-2B",
        "qwen3_vl",
        _TEXT
        | dict(
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            intermediate_size=6144,
            rope_parameters=_INTERLEAVED,
            max_position_embeddings=262144,
        ),
        _TOWER
        | dict(
            depth=24,
            hidden_size=1024,
            intermediate_size=4096,
            num_position_embeddings=2304,
            deepstack_visual_indexes=[5, 11, 17],
        ),
    ),
    Shape(
        "Qwen3-VL-30B-A3B, 6 of 48 layers",
        "qwen3_vl_moe",
        _TEXT
        | dict(
            num_hidden_layers=6,
            num_attention_heads=32,
            num_key_value_heads=4,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            rope_parameters=_INTERLEAVED,
            max_position_embeddings=262144,
        ),
        _TOWER
        | dict(
            depth=27,
            hidden_size=1152,
            intermediate_size=4304,
            num_position_embeddings=2304,
            deepstack_visual_indexes=[8, 16, 24],
        ),
        tied=False,
    ),
    Shape(
        "Qwen3-1.7B",
        "qwen3",
        _TEXT
        | dict(
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            intermediate_size=6144,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            max_position_embeddings=40960,
        ),
    ),
    Shape(
        "Llama-3.2-1B",
        "llama",
        _TEXT
        | dict(
            vocab_size=128256,
            rms_norm_eps=1e-5,
            head_dim=64,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=8192,
            rope_parameters=dict(rope_type="llama3", rope_theta=5e5, factor=32.0, **_LLAMA3),
            max_position_embeddings=131072,
        ),
    ),
    Shape(
        "Qwen2.5-VL-3B",
        "qwen2_5_vl",
        {name: value for name, value in _TEXT.items() if name != "head_dim"}
        | dict(
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=2,
            intermediate_size=11008,
            rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]),
            max_position_embeddings=128000,
        ),
        _TOWER
        | dict(
            patch_size=14,
            depth=32,
            hidden_size=1280,
            intermediate_size=3420,
            window_size=112,
            fullatt_block_indexes=[7, 15, 23, 31],
            tokens_per_second=2,
        ),
    ),
)
"""One of each family, those with much to write to a disk not next to each other."""


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """A checkpoint in bfloat16 with random weights, drawn on the GPU where there is one.

    Matrices are normal with standard deviation 0.02, but for the output layer, which gives logits a standard deviation
    of about 3; norm weights are about 1 and biases about 0, so that one in another's place would show.
    """
    family = FAMILIES[shape.model_type]
    vocabulary = shape.text["vocab_size"]
    if family.media:
        tower = (shape.vision[name] for name in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
        build_tiny_processor(folder, tiny.ALPHABET, vocabulary, *tower, 64, 1 << 20, family.processor)
    else:
        build_tiny_tokenizer(folder, tiny.ALPHABET, vocabulary)
    config = _config(shape, tiny.load_processor(folder, family))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(7)
    output = "embed_tokens.weight" if shape.tied else "lm_head.weight"
    weights = {}
    for name, size in parameter_shapes(config).items():
        std = 0.1 if len(size) == 1 else 3 / sqrt(size[-1]) if name.endswith(output) else 0.02
        values = torch.randn(size, generator=generator, device=device).mul_(std)
        if len(size) == 1 and not name.endswith("bias"):
            values += 1
        weights[name] = values.bfloat16().cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


def _config(shape: Shape, processor):
    """The special tokens are those of the tiny processor, wherever a config of the family names them."""
    family = FAMILIES[shape.model_type]
    like = tiny.family_config(processor, shape.model_type).to_dict()
    tokens = {name: value for name, value in like.items() if name.endswith("_token_id")}
    inner = like.get("text_config", {})
    text = {**shape.text, **{name: value for name, value in inner.items() if name.endswith("_token_id")}}
    text["tie_word_embeddings"] = tokens["tie_word_embeddings"] = shape.tied
    parts = {"text_config": text, "vision_config": dict(shape.vision)} if family.media else text
    config = AutoConfig.for_model(shape.model_type, **parts, **{k: v for k, v in tokens.items() if k not in parts})
    config.architectures = [family.architecture]
    return config


def tiny_question(folder: Path, model_type: str) -> None:
    """A tiny checkpoint of the family in float32, and `ASKED`."""
    tiny.write_family_checkpoint(folder / "checkpoint", model_type)
    _ask(folder, torch.float32, 8, TINY_TOKENS)


def real_question(folder: Path, shape: Shape, tokens: Tokens) -> None:
    """A checkpoint in bfloat16, and `ASKED`."""
    write_checkpoint(folder / "checkpoint", shape)
    _ask(folder, torch.bfloat16, shape.side, tokens)


def _ask(folder: Path, dtype: torch.dtype, side: int, tokens: Tokens) -> None:
    checkpoint = folder / "checkpoint"
    cases = fixed_cases(folder, checkpoint, side, tokens.fixed)
    torch.save(Asked(checkpoint, dtype, cases, tokens.sampled, tokens.rollouts), folder / ASKED)


def fixed_cases(folder: Path, checkpoint: Path, side: int, completion_tokens: int) -> list[Case]:
    """Prompts of text, of two pictures, and of a video between pictures, each with a completion of tokens drawn evenly
    from the vocabulary; of a family that reads text alone, texts.

    Args:
        folder: takes the pictures.
        side: in pixels, of a third of a picture's width.
    """
    config = hf_config(str(checkpoint), None)
    family = FAMILIES[config.model_type]
    width, height = 3 * side, 2 * side
    first = tiny.write_picture(folder / "a.png", 1, width, height)
    second = tiny.write_picture(folder / "b.png", 2, height, height)
    video = tiny.write_video(folder / "v.mp4", 3, frames=9, width=width, height=height)
    contents = [
        [tiny.words(1, 120)],
        [tiny.words(2, 30), first, second, tiny.words(3, 20)],
        [second, tiny.words(4, 10), video, tiny.words(5, 10), first],
    ]
    options = MediaOptions(video=VideoOptions(num_frames=5))
    generator = torch.Generator().manual_seed(5)
    cases = []
    with Encoder(
        tiny.load_processor(checkpoint, family), family.load("positions")(config), 4096, options=options
    ) as encoder:
        for index, parts in enumerate(contents):
            parts = parts if family.media else [part for part in parts if isinstance(part, str)]
            prompt = encoder.encode(Prompt(index, index + 1, tiny.message(parts), "", "parity"))
            vocabulary = config.get_text_config().vocab_size
            completion = torch.randint(0, vocabulary, (completion_tokens,), generator=generator)
            cases.append(Case(prompt, completion, torch.zeros(completion_tokens), 1.0))
    return cases
