"""The chat template's text, cut where the way of tokenising changes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import groupby
from typing import Any

from megarl.data.prompt import Kind, Prompt
from megarl.errors import PromptError, one_line


class How(Enum):
    """How a piece of the rendered prompt becomes tokens."""

    MARKUP = "special tokens are recognised"
    PLAIN = "special tokens are ordinary text"
    MEDIA = "the piece is a kind of media, the place of the next item of that kind"


def render(prompt: Prompt, processor: Any, media: Mapping[Kind, str]) -> list[tuple[How, str]]:
    """Render the messages and cut the text into pieces, in order.

    Special tokens that are spelled out in messages are hidden from the template behind sentinels, so that
    every special token in what it renders is its own.  The text between two media items or hidden tokens is
    one piece, so that BPE merges across the borders of messages and parts as it does in transformers.  To cut
    at the placeholders changes no id: a tokenizer splits the text at special tokens before its BPE runs.

    Args:
        media: the placeholder that the template writes for an item, by kind.

    Raises:
        PromptError: a kind of media that is not supported, text that is no Unicode, or messages that the chat
            template refuses.
    """
    _check_parts(prompt, media)
    messages, literals = _hide_literals(prompt.messages, processor.tokenizer)
    try:
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program, which fails in its own ways on messages it is not for
        reason = one_line(error) or type(error).__name__
        raise PromptError(prompt.row, f"refused by the chat template: {reason}") from error
    kind_of = {token: kind for kind, token in media.items()}
    cuts = "|".join(map(re.escape, [*kind_of, *literals]))
    pieces = []
    for piece in re.split(f"({cuts})", text):
        if piece in kind_of:
            pieces.append((How.MEDIA, kind_of[piece]))
        elif piece in literals:
            pieces.append((How.PLAIN, literals[piece]))
        elif piece:
            pieces.append((How.MARKUP, piece))
    return pieces


def render_reply(reply: Prompt, processor: Any, media: Mapping[Kind, str]) -> list[tuple[How, str]]:
    """What the template writes after the end of an assistant's message that these messages follow, in pieces as
    `render` gives them: from the token that ends that message to the one after which the next is generated.

    What came before is not rendered again: a template may write an earlier message otherwise than it was sampled.

    Args:
        reply: of its `messages` only what they add is rendered; no system message.

    Raises:
        PromptError: as `render`, or the template does not write an assistant's message as it is.
    """
    mark = "\ue001"
    while any(mark in part["text"] for m in reply.messages for part in m["content"] if part["type"] == "text"):
        mark += "\ue001"
    before = [{"role": "user", "content": [_text("?")]}, {"role": "assistant", "content": [_text(mark)]}]
    pieces = render(replace(reply, messages=(*before, *reply.messages)), processor, media)
    found = [place for place, (how, piece) in enumerate(pieces) if how is How.MARKUP and mark in piece]
    if len(found) != 1 or pieces[found[0]][1].count(mark) != 1:
        raise PromptError(reply.row, "the chat template does not write an assistant's message as it is")
    rest = pieces[found[0]][1].split(mark)[1]
    return [(How.MARKUP, rest)] * bool(rest) + pieces[found[0] + 1 :]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokenizer's special tokens and their ids."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _check_parts(prompt: Prompt, media: Mapping[Kind, str]) -> None:
    for message in prompt.messages:
        for part in message["content"]:
            if part["type"] not in ("text", *media):
                accepted = ", ".join(sorted(["text", *media]))
                raise PromptError(prompt.row, f"a part of type {part['type']!r} is not supported; accepted: {accepted}")
            if part["type"] == "text" and not _is_unicode(part["text"]):
                raise PromptError(prompt.row, "half of a surrogate pair in the text of a message")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may spell out "\ud800" alone
        return False
    return True


def _hide_literals(messages: Sequence[dict], tokenizer: Any) -> tuple[list[dict], dict[str, str]]:
    """Copies of the messages with sentinels in place of special tokens, and what each sentinel stands for.

    The copies hold no source of any media, so that no template can print one."""
    everything = "".join(part["text"] for m in messages for part in m["content"] if part["type"] == "text")
    mark = "\ue000"
    while mark in everything:
        mark += "\ue000"
    literals: dict[str, str] = {}

    def hide(text: str) -> str:
        sentinel = f"{mark}{len(literals)}{mark}"
        literals[sentinel] = text
        return sentinel

    longest_first = sorted(special_tokens(tokenizer), key=len, reverse=True)  # as the tokenizer matches
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
