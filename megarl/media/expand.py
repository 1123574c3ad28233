"""Where a prompt becomes tokens, and the only place where media is expanded."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.video_utils import VideoMetadata

from megarl.data.prompt import Grid, Kind, MediaSource, Prompt
from megarl.errors import ExpansionError, PromptTooLong, UserError
from megarl.media.expanded import find_spans
from megarl.media.item import EncodedPrompt, MediaItem
from megarl.media.render import How, render, render_reply, special_tokens

LoadItem = Callable[[MediaSource], MediaItem]


class PositionRule(Protocol):
    """A family's rotary positions, for example `megarl.models.qwen3_vl.positions.mrope_positions`."""

    def __call__(
        self, media_mask: torch.Tensor, grids: Sequence[Grid], merge_size: int, seconds: Sequence[float]
    ) -> tuple[torch.Tensor, int]:
        """Positions int64 `[3, n]`, and the position of the next token.

        `media_mask` is bool `[n]`; `grids` has the grid of each run of media tokens, in order, and `seconds` the
        time between its temporal patches, 0 where it has one.

        What follows a token depends on the next position alone: a row's positions are those of its first part, and
        then those of the rest, counted from there.
        """
        ...


def encode_prompt(
    prompt: Prompt,
    processor: Any,
    positions: PositionRule,
    max_prompt_tokens: int,
    load_item: LoadItem,
) -> EncodedPrompt:
    """Render the chat template, tokenise it, and expand each media item into one token a feature.

    The ids are those of transformers' processor on the same text, images and video frames.  The text of a
    video's frames comes from the times at which the frames are shown, whatever the frame rate.

    Media and special tokens come from the template and from the structure of the messages alone.  A special
    token that is spelled out in the text of a message (`<|image_pad|>`, `<|im_end|>`) is tokenised as
    ordinary text.  No token is added that the template does not write, and none is cut off.

    A prompt that comes with its tokens (`Prompt.expanded`) keeps them: see `megarl.media.expanded`.

    Args:
        processor: a transformers processor: its chat template, tokenizer, media tokens, `replace_image_token`,
            `replace_video_token` and the `merge_size` and `temporal_patch_size` of its parts are used.  One that has
            no `image_processor` takes text alone.
        positions: the family's rule.
        max_prompt_tokens: most tokens after expansion.
        load_item: gives the prepared item of a source; see `megarl.media.cache`.

    Raises:
        PromptTooLong: too many tokens.
        ExpansionError: an item's media tokens and features differ, or the template lost or added an item.
        PromptError: a kind of media that is not supported, messages that the chat template refuses, or
            expanded ids that do not fit together.
        MediaError: a media item cannot be decoded or prepared.
        UserError: the processor has no media tokens that can be used.
    """
    row = _Row.of(prompt, processor)
    if prompt.expanded is not None:
        _check_length(prompt, len(prompt.expanded.ids), max_prompt_tokens)
        _take_expanded(row, prompt, media_tokens(processor), load_item)
    else:
        _expand(row, prompt, render(prompt, processor, placeholders(processor)), processor, load_item)
        _check_length(prompt, len(row.ids), max_prompt_tokens)
    return row.encoded(prompt, positions)


def extend_prompt(
    before: EncodedPrompt,
    completion: torch.Tensor,
    reply: Prompt,
    processor: Any,
    positions: PositionRule,
    load_item: LoadItem,
) -> EncodedPrompt:
    """A conversation that goes on: what the policy saw and sampled, token for token, and then what it is told.

    Args:
        before: what the completion was sampled after.
        completion: int64 `[n]`, n >= 1, its stop token included.
        reply: whose messages, and their media, follow the completion.
        processor, positions, load_item: as `encode_prompt` takes them.

    Returns:
        Of the prompt that the conversation began with; `items` are those of `before` and the reply's after them.

    Raises:
        PromptError, ExpansionError, MediaError: the reply's messages or media cannot be used.
    """
    pieces = render_reply(reply, processor, placeholders(processor))
    stop = processor.tokenizer.decode(completion[-1:].tolist())
    how, first = pieces[0] if pieces else (How.PLAIN, "")
    if how is How.MARKUP and stop and first.startswith(stop):  # it was sampled
        pieces[0] = (how, first.removeprefix(stop))
    row = _Row.of(reply, processor)
    _expand(row, reply, pieces, processor, load_item)
    after = row.encoded(reply, positions)
    said = before.followed_by(completion)
    return EncodedPrompt(
        before.prompt,
        torch.cat([said.ids, after.ids]),
        torch.cat([said.media_mask, after.media_mask]),
        torch.cat([said.positions, said.next_position + after.positions], 1),
        said.next_position + after.next_position,
        (*said.items, *after.items),
    )


def placeholders(processor: Any) -> dict[Kind, str]:
    """What the chat template writes for an item, by its kind.  Raises as `media_tokens` does."""
    return {kind: getattr(processor, f"{kind}_token") for kind in media_tokens(processor)}


def media_tokens(processor: Any) -> dict[Kind, int]:
    """Ids of the tokens that hold the place of a feature, by the kinds of media that the processor prepares.

    Raises:
        UserError: the tokenizer does not know the processor's media token as a special token, or images and
            videos are merged differently.
    """
    if processor.image_processor is None:
        return {}
    special = special_tokens(processor.tokenizer)
    kinds: list[Kind] = ["image"]
    if getattr(processor, "video_processor", None) is not None:
        kinds.append("video")
        sides = processor.image_processor.merge_size, processor.video_processor.merge_size
        if sides[0] != sides[1]:
            raise UserError(f"the processor's merge_size is {sides[0]} for images and {sides[1]} for videos")
    tokens = {}
    for kind in kinds:
        token = getattr(processor, f"{kind}_token", None)
        if token not in special:
            known = ", ".join(sorted(special)[:20]) or "none"
            raise UserError(f"the tokenizer has no special token {token!r} for {kind}s; its special tokens: {known}")
        tokens[kind] = special[token]
    return tokens


def _check_length(prompt: Prompt, length: int, max_prompt_tokens: int) -> None:
    if length > max_prompt_tokens:
        raise PromptTooLong(prompt.row, f"{length} tokens, but max_prompt_tokens = {max_prompt_tokens}")


@dataclass
class _Row:
    number: int
    tokenizer: Any
    merge_size: int
    temporal_patch_size: int
    ids: list[int] = field(default_factory=list)
    media_mask: list[bool] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    """Of each run of media tokens."""
    seconds: list[float] = field(default_factory=list)
    """Likewise: between its temporal patches."""
    items: list[MediaItem] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Prompt, processor: Any) -> "_Row":
        """Nothing yet.  Raises as `media_tokens` does."""
        tokens = media_tokens(processor)
        return cls(
            prompt.row,
            processor.tokenizer,
            processor.image_processor.merge_size if tokens else 1,
            processor.video_processor.temporal_patch_size if "video" in tokens else 1,
        )

    def encoded(self, prompt: Prompt, rule: PositionRule) -> EncodedPrompt:
        media_mask = torch.tensor(self.media_mask, dtype=torch.bool)
        positions, following = rule(media_mask, self.grids, self.merge_size, self.seconds)
        ids = torch.tensor(self.ids, dtype=torch.int64)
        return EncodedPrompt(prompt, ids, media_mask, positions, following, tuple(self.items))

    def add_text(self, text: str, plain: bool) -> None:
        if text:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)
            self.ids += ids
            self.media_mask += [False] * len(ids)

    def add_run(self, token: int, length: int) -> None:
        self.ids += [token] * length
        self.media_mask += [True] * length

    def add_item(self, name: str, item: MediaItem, runs: Sequence[int]) -> None:
        """Note an item and the grids of its runs of media tokens.

        Raises:
            ExpansionError: it has not exactly one feature for each of those tokens.
        """
        t, h, w = item.grid
        m = self.merge_size
        tokens, patches = sum(runs), len(item.pixels)
        if patches != tokens * m**2 or patches != t * h * w or min(item.grid) < 1 or h % m or w % m:
            raise ExpansionError(
                self.number,
                f"{name} fills {tokens} media tokens but has {patches / m**2:g} features "
                f"({patches} patches, grid {item.grid}, merge {m} x {m})",
            )
        if len(runs) not in (1, t) or len(set(runs)) > 1:
            reason = f"{name} fills runs of {list(runs)} media tokens; its grid {item.grid} has {t} temporal patches"
            raise ExpansionError(self.number, reason)
        if len(runs) == 1 and t > 1:
            self.grids.append(item.grid)
            self.seconds.append(item.seconds_per_patch(self.temporal_patch_size))
        else:
            self.grids += [(1, h, w)] * t
            self.seconds += [0.0] * t
        self.items.append(item)


def _expand(row: _Row, prompt: Prompt, pieces: Sequence[tuple[How, str]], processor: Any, load_item: LoadItem) -> None:
    """Template and tokenizer see each item's expansion where its placeholder was.

    The placeholder alone is replaced, as in the pinned transformers, which so keeps the template's
    `<|vision_start|>` and `<|vision_end|>` round all frames of a video, each of which has its own pair
    (earlier transformers, and vLLM, take the outer pair away)."""
    tokens = media_tokens(processor)
    sources = {kind: [s for s in prompt.media if s.kind == kind] for kind in tokens}
    for kind, wanted in sources.items():
        written = sum(piece == (How.MEDIA, kind) for piece in pieces)
        if written != len(wanted):
            reason = f"the chat template wrote {written} {kind} placeholders for {len(wanted)} {kind}s"
            raise ExpansionError(prompt.row, reason)
    remaining = {kind: iter(wanted) for kind, wanted in sources.items()}

    markup = ""  # not tokenised before it ends: what the template and an expansion write may merge
    for how, piece in pieces:
        if how is How.MARKUP:
            markup += piece
        elif how is How.PLAIN:
            row.add_text(markup, plain=False)
            row.add_text(piece, plain=True)
            markup = ""
        else:
            source = next(remaining[piece])
            item = load_item(source)
            runs = []
            for part in _expansion(row.number, source.name, item, processor):
                if isinstance(part, str):
                    markup += part
                else:
                    row.add_text(markup, plain=False)
                    row.add_run(tokens[piece], part)
                    runs.append(part)
                    markup = ""
            row.add_item(source.name, item, runs)
    row.add_text(markup, plain=False)


def _expansion(number: int, name: str, item: MediaItem, processor: Any) -> list[str | int]:
    """What the processor writes for an item: markup, and the lengths of runs of media tokens."""
    grid = torch.tensor([item.grid])
    if item.kind == "image":
        token = processor.image_token
        text = processor.replace_image_token({"image_grid_thw": grid}, 0)
    else:
        token = processor.video_token
        frames, patch = len(item.timestamps), processor.video_processor.temporal_patch_size
        if -(-frames // patch) != item.grid[0]:
            reason = f"{name} has the times of {frames} frames; its grid {item.grid} holds {patch} a temporal patch"
            raise ExpansionError(number, reason)
        # The processor divides frame numbers by the frame rate and averages over each temporal patch, after it
        # has repeated the last frame of an odd number.  At one frame a second a frame's number is its time.
        # A new list, since it is extended in place.
        metadata = VideoMetadata(total_num_frames=frames, fps=1.0, frames_indices=list(item.timestamps))
        text = processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    pieces = re.split(f"((?:{re.escape(token)})+)", text)
    return [len(piece) // len(token) if place % 2 else piece for place, piece in enumerate(pieces)]


def _take_expanded(row: _Row, prompt: Prompt, tokens: Mapping[Kind, int], load_item: LoadItem) -> None:
    expanded = prompt.expanded
    added = max(row.tokenizer.added_tokens_decoder, default=-1) + 1
    spans = find_spans(prompt.row, expanded, tokens, max(len(row.tokenizer), added), row.merge_size)
    row.ids, row.media_mask = list(expanded.ids), [kind > 0 for kind in expanded.kinds]
    for span in spans:
        source, grid = expanded.media[span.place], tuple(expanded.grids[span.place])
        item = load_item(source)
        if item.grid != grid:
            reason = f"{source.name} was expanded with grid {grid}, but is prepared with grid {item.grid}"
            raise ExpansionError(prompt.row, reason)
        row.add_item(source.name, item, span.runs)
