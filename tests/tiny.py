"""A tiny Qwen3-VL, prompts with real pictures for it, and what transformers says about them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from megarl.data.prompt import MediaSource, Prompt
from megarl.media.encoder import Encoder
from megarl.media.item import EncodedPrompt
from megarl.media.options import MediaOptions, VideoOptions
from megarl.models.families import FAMILIES, Family
from megarl.models.hf_config import family_of, hf_config
from megarl.models.text.processor import TextProcessor
from megarl.models.tiny_processor import build_tiny_processor, build_tiny_tokenizer
from megarl.packing.rows import TokenSequence
from tests.media.files import write_clip

ALPHABET = "".join(map(chr, range(32, 127)))
VOCABULARY = 128
MERGE = 2
LONGEST = 256
"""Tokens of a prompt with its completion, at most."""


def write_checkpoint(folder: Path, tied: bool) -> Path:
    """A checkpoint with weights at which an error shows: logits with a spread of several nats, norms off 1 and
    biases off 0."""
    return write_family_checkpoint(folder, "qwen3_vl", tied)


def write_mixture_checkpoint(folder: Path) -> Path:
    """The like of a Qwen3-VL mixture of experts: 4 experts, of which each token visits 2."""
    return write_family_checkpoint(folder, "qwen3_vl_moe")


def write_family_checkpoint(folder: Path, model_type: str, tied: bool = False, **changes) -> Path:
    """The like of any registered family; `changes` are to its language model's config."""
    family = FAMILIES[model_type]
    if family.media:
        build_tiny_processor(folder, ALPHABET, VOCABULARY, 4, MERGE, 2, 64, 1024, family.processor)
    else:
        build_tiny_tokenizer(folder, ALPHABET, VOCABULARY)
    config = family_config(load_processor(folder, family), model_type, tied)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    return _write_weights(folder, family.hf_class._from_config(config).float())


def load_processor(folder: Path, family: Family):
    if family.media:
        return AutoProcessor.from_pretrained(folder)
    return TextProcessor(AutoTokenizer.from_pretrained(folder))


def family_config(processor, model_type: str, tied: bool = False):
    """The config of a tiny model of a registered family."""
    if model_type == "qwen3_vl":
        return _config(processor, tied)
    if model_type == "qwen3_vl_moe":
        return mixture_config(processor)
    if model_type == "qwen2_5_vl":
        return _windowed(processor, tied)
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[model_type](**_text(processor, tied))
    config.architectures = [FAMILIES[model_type].architecture]
    return config


def _windowed(processor, tied: bool) -> Qwen2_5_VLConfig:
    """Windows of 2 x 2 media tokens, so that pictures have several; one layer of three sees the whole picture."""
    text = _text(processor, tied)
    del text["head_dim"], text["tie_word_embeddings"]
    text["rope_parameters"]["mrope_section"] = [4, 2, 2]
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=dict(
            depth=3,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            patch_size=4,
            spatial_merge_size=MERGE,
            temporal_patch_size=2,
            out_hidden_size=64,
            window_size=16,
            fullatt_block_indexes=[1],
            tokens_per_second=3,
        ),
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=processor.tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=processor.tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=tied,
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def _text(processor, tied: bool) -> dict:
    return dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )


def _write_weights(folder: Path, model) -> Path:
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.1, generator=generator)
    model.save_pretrained(folder)
    return folder


def _config(processor, tied: bool) -> Qwen3VLConfig:
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2], mrope_interleaved=True
            ),
            max_position_embeddings=1024,
            tie_word_embeddings=tied,
            eos_token_id=processor.tokenizer.eos_token_id,
            pad_token_id=processor.tokenizer.pad_token_id,
        ),
        vision_config=dict(
            depth=3,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            patch_size=4,
            spatial_merge_size=MERGE,
            temporal_patch_size=2,
            out_hidden_size=64,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 2],
        ),
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=processor.vision_start_token_id,
        vision_end_token_id=processor.vision_end_token_id,
        tie_word_embeddings=tied,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def mixture_config(processor) -> Qwen3VLMoeConfig:
    dense = _config(processor, tied=False).to_dict()
    text, vision = dense["text_config"], dense["vision_config"]
    for values in (text, vision):
        values.pop("model_type")
    text.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    tokens = {name: value for name, value in dense.items() if name.endswith("token_id")}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    return config


def write_picture(path: Path, seed: int, width: int, height: int) -> Path:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_video(path: Path, seed: int, frames: int, width: int, height: int, rate: int = 10) -> Path:
    pixels = np.random.RandomState(seed).randint(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return write_clip(path, pixels, rate=rate)


def make_prompts(folder: Path, processor_folder: Path) -> dict[str, EncodedPrompt]:
    """By name:

    - `text`: no picture;  `image`: one;  `repeat`: the same once more;
    - `other_image`: the ids of `image` over another picture, after a prefix of two KV blocks of 16;
    - `images`: three of different sizes, two of which touch;
    - `long_text`, `long_image`: several chunks of 64 tokens; a chunk ends inside the picture;
    - `same_prefix`: begins as `long_text` does;
    - `video`: an odd number of frames;  `other_video`: the same ids over other frames;
    - `both`: a picture before and after a video;
    - `prose`: the media tokens spelled out in the text beside a picture.

    Of a family that reads text alone, those without media.
    """
    config = hf_config(str(processor_folder), None)
    family = FAMILIES[config.model_type]
    options = MediaOptions(video=VideoOptions(num_frames=5))
    processor = load_processor(processor_folder, family)
    encoder = Encoder(processor, family.load("positions")(config), max_prompt_tokens=LONGEST, options=options)
    a = write_picture(folder / "a.png", 1, 24, 16)
    b = write_picture(folder / "b.png", 2, 24, 16)
    c = write_picture(folder / "c.png", 3, 8, 32)
    d = write_picture(folder / "d.png", 4, 32, 32)
    v = write_video(folder / "v.mp4", 5, frames=9, width=24, height=16)
    w = write_video(folder / "w.mp4", 6, frames=9, width=24, height=16)
    head = words(1, 36)
    long_head = words(2, 130)
    contents = {
        "text": [words(3, 37)],
        "image": [head, a, words(4, 20)],
        "other_image": [head, b, words(4, 20)],
        "repeat": [head, a, words(4, 20)],
        "images": [a, c, words(5, 9), d, words(6, 3)],
        "long_text": [long_head, words(7, 25)],
        "long_image": [words(8, 50), d, words(9, 60), b, words(10, 30)],
        "same_prefix": [long_head, words(11, 12)],
        "video": [words(12, 20), v, words(13, 8)],
        "other_video": [words(12, 20), w, words(13, 8)],
        "both": [b, words(14, 5), v, words(15, 7), a],
        "prose": ["<|image_pad|>", a, "<|vision_start|><|video_pad|><|vision_end|> <image>"],
    }
    return {
        name: encoder.encode(Prompt(index, index + 1, message(parts), "7", "tiny"))
        for index, (name, parts) in enumerate(contents.items())
        if family.media or all(isinstance(part, str) for part in parts)
    }


def words(seed: int, length: int) -> str:
    return "".join(np.random.RandomState(seed).choice(list(ALPHABET), length))


def message(parts: Sequence[str | Path]) -> tuple[dict]:
    def part(value):
        if isinstance(value, str):
            return {"type": "text", "text": value}
        kind = "video" if value.suffix == ".mp4" else "image"
        return {"type": kind, kind: MediaSource(kind, value.name, value)}

    return ({"role": "user", "content": [part(value) for value in parts]},)


def make_sequences(prompts: dict[str, EncodedPrompt], group: int = 1) -> list[TokenSequence]:
    """Each prompt with `group` different completions of 3 to 9 tokens, media tokens among them."""
    generator = torch.Generator().manual_seed(5)
    return [
        TokenSequence(prompt, torch.randint(0, VOCABULARY, (3 + (place + index) % 7,), generator=generator))
        for place, prompt in enumerate(prompts.values())
        for index in range(group)
    ]


class Reference:
    """transformers, one sequence at a time; in the test's own process, where nothing of torch is patched."""

    def __init__(self, folder: Path):
        self._family = family_of(folder)
        self.model = self._family.hf_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        # transformers gives the padding token's embedding no gradient, even where it was sampled.
        self.model.get_input_embeddings().padding_idx = None

    def log_probs(self, prompt: EncodedPrompt, completion: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """float32 `[n]` each: log-probabilities of the completion, entropies of the tempered distributions."""
        logits = self.logits(prompt, completion)[prompt.ids.numel() - 1 : -1] / temperature
        log_probs = logits.log_softmax(-1)
        return log_probs.gather(1, completion[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)

    def logits(self, prompt: EncodedPrompt, completion: Tensor) -> Tensor:
        """float32 `[tokens, vocabulary]`.  A media token among the sampled ones is text: transformers, which
        looks for media by id, is given another id there and the right embedding."""
        ids = torch.cat([prompt.ids, completion])[None]
        if not self._family.media:
            return self.model(input_ids=ids, use_cache=False).logits[0]
        kinds = torch.zeros_like(ids)
        kinds[:, : prompt.ids.numel()] = media_kinds(prompt)
        config = self.model.config
        literal = torch.isin(ids, torch.tensor([config.image_token_id, config.video_token_id])) & (kinds == 0)

        def embed(module, arguments, output):
            return torch.where(literal[..., None], module.weight[ids], output)

        hook = self.model.get_input_embeddings().register_forward_hook(embed)
        try:
            return self.model(
                input_ids=ids.masked_fill(literal, 0),
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                use_cache=False,
                **self._media(prompt),
            ).logits[0]
        finally:
            hook.remove()

    def _media(self, prompt: EncodedPrompt) -> dict:
        """The times between frames too, where the model asks for them."""
        arguments = media(prompt)
        if self._family.model_type == "qwen2_5_vl" and "video_grid_thw" in arguments:
            videos = [item for item in prompt.items if item.kind == "video"]
            arguments["second_per_grid_ts"] = [item.seconds_per_patch(2) for item in videos]
        return arguments

    @torch.no_grad()
    def greedy(self, prompt: EncodedPrompt, tokens: int) -> Tensor:
        """int64 `[n]`: `generate(do_sample=False)` without the prompt."""
        ids = prompt.ids[None]
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            **({"mm_token_type_ids": media_kinds(prompt), **self._media(prompt)} if self._family.media else {}),
        )
        return out[0, ids.shape[1] :]


def media_kinds(prompt: EncodedPrompt) -> Tensor:
    """transformers' `mm_token_type_ids` `[1, n]`: 0 text, 1 image, 2 video."""
    kinds = torch.zeros(1, prompt.ids.numel(), dtype=torch.long)
    codes = {"image": 1, "video": 2}
    kinds[0, prompt.media_mask] = torch.tensor(
        [codes[item.kind] for item in prompt.items for _ in range(item.feature_count(MERGE))], dtype=torch.long
    )
    return kinds


def media(prompt: EncodedPrompt) -> dict[str, Tensor]:
    """The media arguments of transformers' model."""
    arguments = {}
    for kind, pixels, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in prompt.items if item.kind == kind]
        if items:
            arguments[pixels] = torch.cat([item.pixels for item in items])
            arguments[grids] = torch.tensor([item.grid for item in items])
    return arguments
