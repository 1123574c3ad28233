"""Rollouts on disk, for people to read and for questions asked later."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.observe.files import replacing


@dataclass(frozen=True)
class RolloutRow:
    """One rollout as `rollouts/step_N.jsonl` shows it.  Raises ValueError unless `ids` and the
    log-probabilities have one length."""

    prompt_index: int
    """`Prompt.index`: rollouts with the same one are a group."""
    source: str
    """`Prompt.source`."""
    prompt: str
    """Text of the prompt as the chat template rendered it, media as placeholders; of a conversation, all before its
    last completion."""
    media: Sequence[str]
    """Names of the media items, in prompt order."""
    answer: str
    """Ground truth."""
    completion: str
    """Text that was sampled; of a conversation, last."""
    reward: float
    advantage: float
    finished: str
    """Why sampling ended, such as `stop` or `length`."""
    ids: Sequence[int]
    """The sampled tokens, `[n]`, of all turns."""
    engine_logprobs: Sequence[float]
    """`[n]`, nats: what the engine sampled with."""
    trainer_logprobs: Sequence[float] | None
    """`[n]`, nats: what the trainer computed for the same weights and tokens; None where it did not score."""
    turns: int = 1
    """Completions of a conversation."""

    def __post_init__(self):
        lengths = {"ids": len(self.ids), "engine_logprobs": len(self.engine_logprobs)}
        if self.trainer_logprobs is not None:
            lengths["trainer_logprobs"] = len(self.trainer_logprobs)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"rollout of prompt {self.prompt_index}: per-token lengths differ: {lengths}")


def write_rollouts(path: Path, rows: Iterable[RolloutRow]) -> None:
    """Write one JSON object a line, with the fields of `RolloutRow`, to `path`, whole or not at all.

    Floats are rounded to 6 decimals; those that are not finite become null.
    """
    with replacing(path) as file:
        for row in rows:
            fields = {
                **vars(row),
                "media": list(row.media),
                "reward": _rounded(row.reward),
                "advantage": _rounded(row.advantage),
                "ids": [int(token) for token in row.ids],
                "engine_logprobs": [_rounded(x) for x in row.engine_logprobs],
            }
            if row.trainer_logprobs is not None:
                fields["trainer_logprobs"] = [_rounded(x) for x in row.trainer_logprobs]
            file.write(_line(fields))


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds one JSON object a line to a file that grows."""
    with path.open("ab") as file:
        for row in rows:
            file.write(_line(row))


def _line(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"
    # A lone surrogate, which UTF-8 cannot hold, becomes \udXXX: JSON's own escape of it.
    return text.encode("utf-8", errors="backslashreplace")


def _rounded(number: float) -> float | None:
    return round(float(number), 6) + 0.0 if math.isfinite(number) else None  # + 0.0: no -0.0
