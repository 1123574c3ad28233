"""Environments that answer back: what a conversation is for them, and how their replies become messages."""

import io
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from PIL import Image

from megarl.data.prompt import Kind, MediaSource, Prompt
from megarl.environments.score import Score
from megarl.errors import one_line

ROLES = ("user", "tool")


@dataclass(frozen=True)
class Media:
    """An item of a reply, as the bytes of a picture's or a video's file."""

    kind: Kind
    data: bytes


@dataclass(frozen=True)
class Reply:
    """A message to the policy, after which it speaks again."""

    content: tuple[str | Image.Image | Media, ...]
    role: str = "user"
    """One of `ROLES`; the chat template decides what becomes of it."""


@dataclass(frozen=True)
class Step:
    """What an environment makes of a completion."""

    state: Any
    """What it is given at the next step."""
    reply: Reply | None = None
    """None: the conversation is over."""
    score: Score | None = None
    """Of one that is over, with as many components as the environment has; None: the environment judges its last
    completion."""


class Dialogue(Protocol):
    """Called on one rank of those that share a prompt.  What it says should depend on its arguments alone, so that a
    run that is resumed goes the same way."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """The state at the beginning of one rollout.

        Args:
            seed: of this rollout; equal under any layout and after a resume.
        """
        ...

    def step(self, state: Any, completion: str, finished: bool) -> Step:
        """Goes on after a completion, given as its text without its stop token; may be a coroutine function.

        `finished` says that a stop token ended it.  Where it does not, or the conversation has no turn or no room
        left, a reply is not heard.
        """
        ...


def as_prompt(reply: Reply, prompt: Prompt, turn: int) -> Prompt:
    """The reply as messages, with media in the bytes of a file.

    Args:
        prompt: that the conversation began with.
        turn: number of the completion that it follows, from 1.

    Raises:
        TypeError, ValueError: it is no reply; one line, which names the row.
    """
    where = f"row {prompt.row}, reply to turn {turn}"
    if not isinstance(reply, Reply):
        raise TypeError(f"{where}: {_kind(reply)}, not a Reply")
    if reply.role not in ROLES:
        raise ValueError(f"{where}: role {one_line(reply.role)!r}; accepted: {', '.join(ROLES)}")
    content = [_part(part, f"{where}, part {place}") for place, part in enumerate(reply.content)]
    if not content:
        raise ValueError(f"{where}: has no content")
    return Prompt(prompt.index, prompt.row, ({"role": reply.role, "content": content},), "", prompt.source)


def _part(part: Any, name: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image.Image):
        stream = io.BytesIO()
        part.convert("RGB").save(stream, "PNG", compress_level=1)
        part = Media("image", stream.getvalue())
    if not isinstance(part, Media):
        raise TypeError(f"{name}: {_kind(part)}, not a text, a Pillow image or Media")
    if part.kind not in get_args(Kind) or not isinstance(part.data, bytes):
        raise TypeError(f"{name}: Media({part.kind!r:.20}, data {_kind(part.data)}): should be a kind and bytes")
    return {"type": part.kind, part.kind: MediaSource(part.kind, name, data=part.data)}


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
