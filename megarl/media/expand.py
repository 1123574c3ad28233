"""Where a prompt becomes tokens, and the only place where media is expanded."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2 import TemplateError

from megarl.data.prompt import Grid, Prompt
from megarl.errors import ExpansionError, PromptError, PromptTooLong, UserError
from megarl.media.item import EncodedPrompt, MediaItem


class PositionRule(Protocol):
    """A family's rotary positions, for example `megarl.models.qwen3_vl.positions.mrope_positions`."""

    def __call__(self, media_mask: torch.Tensor, grids: Sequence[Grid], merge_size: int) -> tuple[torch.Tensor, int]:
        """Positions int64 `[3, n]`, and the position of the next token.

        `media_mask` is bool `[n]`; `grids` has the grid of each run of media tokens, in order.
        """
        ...


def encode_prompt(
    prompt: Prompt,
    processor: Any,
    positions: PositionRule,
    max_prompt_tokens: int,
    load_item: Callable[[str, Path], MediaItem],
) -> EncodedPrompt:
    """Render the chat template, tokenise it, and expand each media item into one token a feature.

    Media and special tokens come from the template and from the structure of the messages alone.  A special
    token that is spelled out in the text of a message (`<|image_pad|>`, `<|im_end|>`) is tokenised as
    ordinary text.  No token is added that the template does not write, and none is cut off.

    Args:
        processor: a transformers processor: its chat template, tokenizer, `image_token` and
            `image_processor.merge_size` are used.
        positions: the family's rule.
        max_prompt_tokens: most tokens after expansion.
        load_item: gives the prepared item of a kind (`image`) and a path; see `megarl.media.cache`.

    Raises:
        PromptTooLong: too many tokens.
        ExpansionError: an item's media tokens and features differ, or the template lost or added an item.
        PromptError: a kind of media that is not supported, or messages that the chat template refuses.
        MediaError: a media file cannot be decoded or prepared.
        UserError: the tokenizer lacks the media token.
    """
    tokenizer = processor.tokenizer
    image_id = media_token(processor)
    merge_size = processor.image_processor.merge_size
    items = _load_items(prompt, load_item)
    pieces = _render(prompt, processor)
    placeholders = sum(how is _How.IMAGE for how, _ in pieces)
    if placeholders != len(items):
        reason = f"the chat template wrote {placeholders} image placeholders for {len(items)} images"
        raise ExpansionError(prompt.index, reason)

    row = _Row()
    remaining = iter(items)
    for how, text in pieces:
        if how is _How.IMAGE:
            row.add_media(image_id, next(remaining), merge_size)
        else:
            plain = how is _How.PLAIN
            row.add_text(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain))

    for item, tokens in zip(items, row.run_lengths, strict=True):
        _check_features(prompt.index, item, tokens, merge_size)
    if len(row.ids) > max_prompt_tokens:
        raise PromptTooLong(prompt.index, f"{len(row.ids)} tokens, but max_prompt_tokens = {max_prompt_tokens}")

    media_mask = torch.tensor(row.media_mask, dtype=torch.bool)
    row_positions, next_position = positions(media_mask, row.grids, merge_size)
    ids = torch.tensor(row.ids, dtype=torch.int64)
    return EncodedPrompt(prompt, ids, media_mask, row_positions, next_position, items)


def media_token(processor: Any) -> int:
    """Id of the token that holds the place of an image feature.

    Raises:
        UserError: the tokenizer does not know the processor's image token as a special token.
    """
    token = getattr(processor, "image_token", None)
    special = _special_tokens(processor.tokenizer)
    if token not in special:
        known = ", ".join(sorted(special)[:20]) or "none"
        raise UserError(f"the tokenizer has no special token {token!r} for images; its special tokens: {known}")
    return special[token]


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _load_items(prompt: Prompt, load_item: Callable[[str, Path], MediaItem]) -> tuple[MediaItem, ...]:
    items = []
    for message in prompt.messages:
        for part in message["content"]:
            if part["type"] == "image":
                items.append(load_item("image", part["image"]))
            elif part["type"] != "text":
                reason = f"a part of type {part['type']!r} is not supported; accepted: image, text"
                raise PromptError(prompt.index, reason)
    return tuple(items)


class _How(Enum):
    """How a piece of the rendered prompt becomes tokens."""

    MARKUP = "special tokens are recognised"
    PLAIN = "special tokens are ordinary text"
    IMAGE = "the image token, once a feature"


def _render(prompt: Prompt, processor: Any) -> list[tuple[_How, str]]:
    """The chat template's text, cut where the way of tokenising changes.

    Special tokens that are spelled out in messages are hidden from the template behind sentinels, so that
    every special token in what it renders is its own.  The text between two media items or hidden tokens is
    one piece, so that BPE merges across the borders of messages and parts as it does in transformers.  To cut
    at the placeholders changes no id: a tokenizer splits the text at special tokens before its BPE runs.
    """
    messages, literals = _hide_literals(prompt.messages, processor.tokenizer)
    try:
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise PromptError(prompt.index, f"refused by the chat template: {error}") from error
    cuts = "|".join(map(re.escape, [processor.image_token, *literals]))
    pieces = []
    for piece in re.split(f"({cuts})", text):
        if piece == processor.image_token:
            pieces.append((_How.IMAGE, piece))
        elif piece in literals:
            pieces.append((_How.PLAIN, literals[piece]))
        elif piece:
            pieces.append((_How.MARKUP, piece))
    return pieces


def _hide_literals(messages: Sequence[dict], tokenizer: Any) -> tuple[list[dict], dict[str, str]]:
    """Copies of the messages with sentinels in place of special tokens, and what each sentinel stands for."""
    everything = "".join(part["text"] for m in messages for part in m["content"] if part["type"] == "text")
    mark = "\ue000"
    while mark in everything:
        mark += "\ue000"
    literals: dict[str, str] = {}

    def hide(text: str) -> str:
        sentinel = f"{mark}{len(literals)}{mark}"
        literals[sentinel] = text
        return sentinel

    longest_first = sorted(_special_tokens(tokenizer), key=len, reverse=True)  # as the tokenizer matches
    special = re.compile("|".join(map(re.escape, longest_first)))
    hidden = []
    for message in messages:
        content = []
        for kind, parts in groupby(message["content"], key=lambda part: part["type"]):
            if kind == "text":
                texts = _replace_across([part["text"] for part in parts], special, hide)
                content += [{"type": "text", "text": text} for text in texts]
            else:
                content += [{"type": kind, kind: kind} for _ in parts]
        hidden.append({"role": message["role"], "content": content})
    return hidden, literals


def _replace_across(texts: Sequence[str], pattern: re.Pattern, replace: Callable[[str], str]) -> list[str]:
    """Replace each match in the concatenated texts; one that crosses a border is replaced on either side."""
    spans = [match.span() for match in pattern.finditer("".join(texts))]
    replaced = []
    begin = 0
    for text in texts:
        pieces = []
        done = 0
        for start, end in spans:
            start, end = max(start - begin, 0), min(end - begin, len(text))
            if start < end:
                pieces += [text[done:start], replace(text[start:end])]
                done = end
        replaced.append("".join([*pieces, text[done:]]))
        begin += len(text)
    return replaced


@dataclass
class _Row:
    ids: list[int] = field(default_factory=list)
    media_mask: list[bool] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    """Of each run of media tokens."""
    run_lengths: list[int] = field(default_factory=list)

    def add_text(self, ids: list[int]) -> None:
        self.ids += ids
        self.media_mask += [False] * len(ids)

    def add_media(self, token: int, item: MediaItem, merge_size: int) -> None:
        length = item.feature_count(merge_size)
        self.ids += [token] * length
        self.media_mask += [True] * length
        self.grids.append(item.grid)
        self.run_lengths.append(length)


def _check_features(row: int, item: MediaItem, tokens: int, merge_size: int) -> None:
    patches = len(item.pixels)
    _, h, w = item.grid
    if patches != tokens * merge_size**2 or h % merge_size or w % merge_size:
        raise ExpansionError(
            row,
            f"{item.path} fills {tokens} media tokens but has {patches / merge_size**2:g} features "
            f"({patches} patches, grid {item.grid}, merge {merge_size} x {merge_size})",
        )
