"""What all generators share: how a row is written, and how distinct examples are drawn and held out."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np


def row(parts: Sequence[str | tuple[str, str]], answer: str, source: str) -> str:
    """One line of a JSONL file: a user's message, its answer, and the name of its task.

    Args:
        parts: text, or `(kind, path)` of a media item, with the path relative to the data folder.
    """
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0], part[0]: part[1]}
        for part in parts
    ]
    return json.dumps({"messages": [{"role": "user", "content": content}], "answer": answer, "source": source}) + "\n"


def write_rows(folder: Path, train: Sequence[str], test: Sequence[str]) -> None:
    """`train.jsonl` and `test.jsonl`."""
    (folder / "train.jsonl").write_text("".join(train))
    (folder / "test.jsonl").write_text("".join(test))


def draw_distinct[T](seed: int, count: int, draw: Callable[[np.random.RandomState, int], T]) -> list[T]:
    """`count` different examples, so that no split of them has one on both sides.

    `draw(generator, number)` is asked again for an example that was drawn before.  RandomState and not
    Generator: numpy promises that its stream never changes between versions.

    Raises:
        ValueError: 1,000 draws in a row gave nothing new; there are not so many different examples.
    """
    generator = np.random.RandomState(seed)
    examples: dict[T, None] = {}
    for number in range(count):
        for _ in range(1000):
            example = draw(generator, number)
            if example not in examples:
                examples[example] = None
                break
        else:
            raise ValueError(f"only {len(examples)} of {count} different examples were found")
    return list(examples)
