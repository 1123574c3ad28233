"""Groups of rollouts change ranks, so that data-parallel ranks train on work of even cost.

A step's prompts are dealt out before anyone knows how long their completions become.  What moves is what was
sampled; the receiver expands the prompt itself, from the same file by the same function.
"""

import itertools
from collections.abc import Callable, Sequence

from megatron.core import parallel_state

from megarl.media.item import EncodedPrompt
from megarl.packing.balance import even_parts
from megarl.packing.cost import CostModel
from megarl.parallel.agreement import gathered
from megarl.rollout.engine import Extend, Rollout

WORTH_IT = 1.02
"""Largest cost over mean cost below which nothing moves."""


def balance(
    groups: list[list[Rollout]],
    places: Sequence[int],
    indices: Sequence[int],
    batch: int,
    minibatches: int,
    cost: CostModel,
    encode: Callable[[int], EncodedPrompt],
    extend: Extend,
) -> tuple[list[list[Rollout]], float]:
    """This rank's groups after the exchange: of each minibatch as many as every data-parallel rank has.  Collective.

    Args:
        groups: in any number on any rank.
        places: of each in the step's batch, which the minibatches are equal stretches of.
        indices: of their prompts in the data set.
        batch: groups of all ranks; a multiple of minibatches times data-parallel ranks.
        encode: gives the prompt at a place in the data set.
        extend: gives what is seen in the next turn of a conversation.

    Returns:
        The groups, minibatches one after another, and the largest cost of a rank over the ranks' mean, summed over the
        minibatches.
    """
    group = parallel_state.get_data_parallel_group()
    ranks, rank, size = group.size(), group.rank(), batch // minibatches
    mine = [
        (place, cost.row(r.sequence for r in rollouts), index)
        for place, index, rollouts in zip(places, indices, groups, strict=True)
    ]
    everyone = {
        place: (holder, price, index)
        for holder, found in enumerate(gathered(mine, group))
        for place, price, index in found
    }
    owners, largest, total = {}, 0.0, 0.0
    for start in range(0, batch, size):
        # By holder: of equal costs, who holds a group is the first to keep it.
        stretch = sorted(range(start, start + size), key=lambda place: (everyone[place][0], place))
        holders, costs = [everyone[place][0] for place in stretch], [everyone[place][1] for place in stretch]
        assigned = _assign(costs, holders, ranks)
        owners.update(zip(stretch, assigned, strict=True))
        largest += max(_sums(costs, assigned, ranks))
        total += sum(costs)
    here = dict(zip(places, groups, strict=True))
    kept = {place: rollouts for place, rollouts in here.items() if owners[place] == rank}
    if any(owners[place] != holder for place, (holder, *_) in everyone.items()):
        leaving = [(place, [r.sampled() for r in here[place]]) for place in here if owners[place] != rank]
        for place, rollouts in itertools.chain(*gathered(leaving, group)):
            if owners[place] == rank:
                prompt = encode(everyone[place][2])
                kept[place] = [Rollout.restored(prompt, sampled, extend) for sampled in rollouts]
    in_order = sorted(kept, key=lambda place: (place // size, everyone[place][0], place))
    return [kept[place] for place in in_order], largest * ranks / total


def _assign(costs: list[float], holders: list[int], ranks: int) -> list[int]:
    """The new owner of each group: even sums, and each part where most of it is already."""
    even = all(holders.count(rank) * ranks == len(holders) for rank in range(ranks))
    if even and max(_sums(costs, holders, ranks)) * ranks <= WORTH_IT * sum(costs):
        return holders
    parts, free, owners = even_parts(costs, ranks, equal_size=True), set(range(ranks)), list(holders)
    here = {(p, r): sum(holders[i] == r for i in part) for p, part in enumerate(parts) for r in range(ranks)}
    for p, r in sorted(here, key=lambda pair: (-here[pair], pair)):
        if parts[p] and r in free:
            free.remove(r)
            for i in parts[p]:
                owners[i] = r
            parts[p] = []
    return owners


def _sums(costs: list[float], owners: list[int], ranks: int) -> list[float]:
    return [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks)]
