"""Makers of rows and data files for tests."""

import hashlib
import json
from pathlib import Path

from megarl.data.prompts import load_prompts
from megarl.errors import MediaError, PromptTooLong


def image(name="images/a.png"):
    return {"type": "image", "image": name}


def text(value="?"):
    return {"type": "text", "text": value}


def row(*content, **changes):
    messages = [{"role": "user", "content": list(content) or [image(), text()]}]
    return {"messages": messages, "answer": "7", "source": "digits", **changes}


def write(folder: Path, *rows, name="train.jsonl") -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return folder / name


def load(folder, *rows, **options):
    return load_prompts(write(folder, *rows), **options)


def content(prompt):
    """The parts of all messages, media as kind and name."""
    parts = [part for message in prompt.messages for part in message["content"]]
    return [p["text"] if p["type"] == "text" else (p["type"], p[p["type"]].name) for p in parts]


class Checker:
    """Hashes what a prompt names; refuses answers `long`, and the pictures called broken."""

    def __init__(self):
        self.windows: list[list[int]] = []

    def __call__(self, prompts):
        self.windows.append([prompt.row for prompt in prompts])
        return [self._one(prompt) for prompt in prompts]

    def _one(self, prompt):
        if prompt.answer == "long":
            return PromptTooLong(prompt.row, "9 tokens, but\nmax_prompt_tokens = 8")
        for source in prompt.media:
            if "broken" in source.name:
                return MediaError(source.name, "not a picture")
        return hashlib.sha256(prompt.answer.encode()).digest()

    @property
    def rows(self):
        return sorted(row for window in self.windows for row in window)
