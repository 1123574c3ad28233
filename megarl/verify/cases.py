"""What is compared: the first training prompts of each modality, completions of them, and one loss.

Imports no Megatron, since the transformers process reads these too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megarl.algorithms.objective import ObjectiveInputs, ObjectiveOptions, objective
from megarl.data.checked import read_row
from megarl.data.download import Downloads
from megarl.data.files import dataset_hash, files_name, find_split, split_name
from megarl.data.media_values import MediaReader
from megarl.data.parse import COLUMNS, RowParser
from megarl.data.prompt import Prompt
from megarl.data.rejection import BadRow
from megarl.data.rows import open_rows
from megarl.errors import MediaError, PromptError, UserError
from megarl.media.encoder import Encoder
from megarl.media.item import EncodedPrompt, modality

LOOKED_AT = 4096
"""Rows at the head of the training split among which prompts of each modality are looked for."""
_REFERENCE_OFF = 0.25
"""Nats between the behaviour policy and the stand-in for the reference policy, so that the KL term has a gradient."""


@dataclass(frozen=True, eq=False)
class Case:
    """One sampled completion, and what the loss needs of it."""

    prompt: EncodedPrompt
    completion: Tensor
    """int64 `[n]`."""
    sampled: Tensor
    """float32 `[n]`: log-probabilities that the engine sampled with."""
    advantage: float
    """Made up, in [-1, 1]: rewards of an untrained policy may all be equal, and then nothing has a gradient."""
    routing_indices: Tensor | None = None
    """As in `megarl.rollout.engine.Rollout`."""

    @property
    def modality(self) -> str:
        return self.prompt.modality


def first_prompts(data, encoder: Encoder, downloads: Path, count: int) -> list[EncodedPrompt]:
    """The first `count` usable training prompts of each modality, in the order of the files.

    Rows that a run would reject are passed over.  The rows behind are not read, so that a large data set costs
    nothing.

    Args:
        data: the recipe's data section.
        downloads: where media is kept that rows name by URL.

    Raises:
        UserError: the files cannot be read, or no row is usable.
    """
    found: dict[str, list[EncodedPrompt]] = {"text": [], "image": [], "video": []}
    for prompt in _prompts(data, downloads):
        chosen = found.setdefault(modality(source.kind for source in prompt.media), [])
        if len(chosen) == count:
            continue
        try:
            chosen.append(encoder.encode(prompt))
        except (MediaError, PromptError):
            continue
        if all(len(prompts) == count for prompts in found.values()):
            break
    prompts = [prompt for chosen in found.values() for prompt in chosen]
    if not prompts:
        raise UserError(f"data.path = {data.path!r}: none of the first {LOOKED_AT} training rows can be used")
    return prompts


def _prompts(data, downloads: Path) -> Iterator[Prompt]:
    folder = Path(data.path)
    files = find_split(folder, "train")
    reader = MediaReader(
        folder, [Path(other) for other in data.media_folders], Downloads(downloads) if data.allow_remote else None
    )
    parser = RowParser(reader, Path(files_name(files)).name, split_name(files))
    rows = open_rows(files, COLUMNS, dataset_hash(files))
    for place in range(min(len(rows), LOOKED_AT)):
        try:
            row = read_row(rows, parser, place)
        except BadRow:
            continue
        if row is not None:
            yield replace(row.prompt, index=place)


def advantages(count: int) -> list[float]:
    """`count` values in [-1, 1] of both signs, the same everywhere."""
    return (2 * torch.rand(count, generator=torch.Generator().manual_seed(1)) - 1).tolist()


def loss(cases: Sequence[Case], log_probs: Tensor, entropy: Tensor, options: ObjectiveOptions) -> tuple[Tensor, Tensor]:
    """The recipe's objective, summed over the completion tokens of `cases`, and its sums for reporting.

    Args:
        log_probs, entropy: float32 `[tokens]`, the cases' tokens one after another, with gradient.
    """
    device = log_probs.device
    sampled = torch.cat([case.sampled for case in cases]).to(device)
    advantage = torch.cat([torch.full_like(case.sampled, case.advantage) for case in cases]).to(device)
    lengths = [case.sampled.numel() for case in cases]
    return objective(
        ObjectiveInputs(log_probs, entropy, sampled, advantage, lengths, sampled + _REFERENCE_OFF),
        options,
    )
