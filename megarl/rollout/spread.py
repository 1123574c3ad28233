"""Rollouts of ranks that share prompts and are engines of their own, as context-parallel ranks are.

Each samples a part of the prompts, and all of them get all the rollouts.
"""

from collections.abc import Callable, Sequence

from megarl.media.item import EncodedPrompt
from megarl.parallel.agreement import any_rank, gathered
from megarl.rollout.engine import Rollout, RolloutEngine
from megarl.rollout.sampling import SamplingOptions


def generate_spread(
    engine: RolloutEngine,
    prompts: Sequence[EncodedPrompt],
    options: SamplingOptions,
    group_size: int,
    keys: Sequence[int],
    interrupted: Callable[[], bool] | None = None,
) -> list[list[Rollout]] | None:
    """`RolloutEngine.generate` for prompts that all its peers were given; collective over them.

    Where it can be `interrupted` it is collective over all ranks of the job, and None on all of them if one was: they
    throw away what they have, and may draw it again, alike, with the same keys."""
    group = engine.peers
    if group.size() == 1:
        groups = engine.generate(list(prompts), options, group_size, list(keys), interrupted)
        return None if interrupted and any_rank(groups is None) else groups
    owners = spread([prompt.ids.numel() for prompt in prompts], group.size())
    mine = [place for place, owner in enumerate(owners) if owner == group.rank()]
    groups = engine.generate([prompts[i] for i in mine], options, group_size, [keys[i] for i in mine], interrupted)
    if interrupted and any_rank(groups is None):
        return None
    sampled = [[r.sampled() for r in rollouts] for rollouts in groups]
    following = [iter(part) for part in gathered(sampled, group)]
    return [
        [Rollout(prompt, **one) for one in next(following[owner])]
        for prompt, owner in zip(prompts, owners, strict=True)
    ]


def spread(lengths: Sequence[int], ranks: int) -> list[int]:
    """The rank of each prompt: as many for each as possible, and long ones shared out evenly.

    Completions are as long as each other as far as anyone knows before they are sampled, so the numbers of prompts
    come first; the prompts' own tokens are balanced by dealing them out in the order of their lengths, there and back.
    """
    owners = [0] * len(lengths)
    for turn, place in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        lap, step = divmod(turn, ranks)
        owners[place] = step if lap % 2 == 0 else ranks - 1 - step
    return owners
