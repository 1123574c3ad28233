"""Processors and tokenizers for tiny models, made without a network: a token a character, a terse template."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from megarl.errors import UserError

_CLASSES = {
    "Qwen2_5_VLProcessor": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    "Qwen3VLProcessor": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
}
"""The processor's class, and that of its part for videos."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|unk|>",
)
"""In the order of their ids, from 0."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role != 'assistant' -%}<|im_start|>{%- endif -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
            {%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
            {%- else -%}{{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}<|im_end|>{%- endif -%}
{%- endfor -%}
"""
"""`<|im_start|>` opens a user's (or system) turn and `<|im_end|>` closes the assistant's: no role names, no
line breaks, nothing for the generation prompt, so that a tiny recipe spends its tokens on its task."""


def build_tiny_processor(
    folder: Path,
    alphabet: str,
    vocab_size: int,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    min_pixels: int,
    max_pixels: int,
    processor: str = "Qwen3VLProcessor",
) -> None:
    """Write a processor that `AutoProcessor.from_pretrained(folder)` loads.

    A processor's files that are already in `folder` are replaced; the bytes are the same every time.

    Args:
        alphabet: the characters that have a token; any other becomes `<|unk|>`.
        vocab_size: the model's; ids that the tokenizer leaves over stand for nothing.
        patch_size: side of a patch, in pixels.
        merge_size: side, in patches, of the square that makes one media token.
        temporal_patch_size: frames in a patch.
        min_pixels: fewest pixels of a prepared picture (or video: of all frames), to which smaller ones grow.
        max_pixels: most pixels, to which larger ones shrink.
        processor: the class in transformers.

    Raises:
        UserError: the alphabet repeats a character, or does not fit into `vocab_size`.
    """
    kind, video_kind = _CLASSES[processor]
    tokenizer = _character_tokenizer(alphabet, vocab_size)
    patching = {
        "patch_size": patch_size,
        "merge_size": merge_size,
        "temporal_patch_size": temporal_patch_size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}  # pixel counts, in spite of the names
    built = kind(
        image_processor=Qwen2VLImageProcessor(**patching, size=dict(size)),
        video_processor=video_kind(**patching, size=dict(size)),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    built.save_pretrained(folder)


def build_tiny_tokenizer(folder: Path, alphabet: str, vocab_size: int) -> None:
    """Write the same tokenizer and template for a model that reads text alone; see `build_tiny_processor`."""
    tokenizer = _character_tokenizer(alphabet, vocab_size)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _character_tokenizer(alphabet: str, vocab_size: int) -> PreTrainedTokenizerFast:
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated:
        raise UserError(f"alphabet repeats {repeated[0]!r}: each character once")
    tokens = [*SPECIAL_TOKENS, *alphabet]
    if len(tokens) > vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens and "
            f"{len(alphabet)} characters need {len(tokens)}"
        )
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<|unk|>"
    )
