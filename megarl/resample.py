"""Dynamic sampling: groups that teach nothing make room for other prompts', before anything is trained on.

Yu et al. 2025, DAPO (arXiv 2503.14476, section 3.2), but bounded: after the recipe's number of rounds a group whose
rewards are equal stays.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.rollout.engine import Rollout
from megarl.training.reduce import over_data_parallel

Groups = list[list[Rollout]]


def resample(
    groups: Groups, rounds: int, constant: Callable[[Groups], Tensor], draw: Callable[[int, list[int]], Groups | None]
) -> tuple[Groups | None, float, list[tuple[int, list[Rollout]]]]:
    """Replaces groups of equal rewards, each at its position.

    Collective over all ranks, each with groups of its own: those that share experts sample together, also where one
    has nothing to replace.

    Args:
        groups: of this rank, equally many on every rank.
        constant: bool `[groups]`, of groups whose rewards are equal.
        draw: `(round, positions) -> groups`, of other prompts for these of this rank's positions; None on all ranks
            where the step is given up.

    Returns:
        The groups, or None where `draw` gave None; how many were drawn over how many there are, on all ranks; and the
        groups of this rank that were dropped, each with its position.
    """
    if not rounds:
        return groups, 0.0, []
    groups, drawn, dropped = list(groups), 0.0, []
    wanted = _positions(constant(groups))
    for number in range(rounds):
        everywhere = float(over_data_parallel(torch.tensor(float(len(wanted)))))
        if not everywhere:
            break
        drawn += everywhere
        fresh = draw(number, wanted)
        if fresh is None:
            return None, 0.0, []
        still = set(_positions(constant(fresh)))
        for place, (position, group) in enumerate(zip(wanted, fresh, strict=True)):
            if place not in still:
                groups[position], group = group, groups[position]
            dropped.append((position, group))
        wanted = [position for place, position in enumerate(wanted) if place in still]
    return groups, drawn / float(over_data_parallel(torch.tensor(float(len(groups))))), dropped


def _positions(chosen: Tensor) -> list[int]:
    return chosen.nonzero().flatten().tolist()
