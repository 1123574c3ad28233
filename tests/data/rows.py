"""Makers of rows and data files for tests."""

import json
from pathlib import Path

from megarl.data.prompts import load_prompts


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
