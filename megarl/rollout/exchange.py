"""Groups of rollouts change ranks, so that data-parallel ranks train on work of even cost.

A step's prompts are dealt out before anyone knows how long their completions become.  What moves is what was
sampled; the receiver expands the prompt itself, from the same file by the same function.
"""

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
    minibatches: int,
    cost: CostModel,
    encode: Callable[[int], EncodedPrompt],
    extend: Extend,
) -> tuple[list[list[Rollout]], float]:
    """This rank's groups after the exchange; of each minibatch as many as before.  Collective.

    Args:
        groups: minibatches one after another, with as many groups on every data-parallel rank.
        places: of their prompts in the data set.
        encode: gives the prompt at a place.
        extend: gives what is seen in the next turn of a conversation.

    Returns:
        The groups, and the largest cost of a rank over the ranks' mean, summed over the minibatches.
    """
    group = parallel_state.get_data_parallel_group()
    ranks, rank = group.size(), group.rank()
    if ranks == 1:
        return groups, 1.0
    mine = [cost.row(r.sequence for r in rollouts) for rollouts in groups]
    everyone = gathered((mine, list(places)), group)
    size = len(groups) // minibatches
    owners, largest, total = {}, 0.0, 0.0
    for start in range(0, len(groups), size):
        batch = [(r, j) for r in range(ranks) for j in range(start, start + size)]
        costs = [everyone[r][0][j] for r, j in batch]
        assigned = _assign(costs, [r for r, _ in batch], ranks)
        owners.update(zip(batch, assigned, strict=True))
        largest += max(_sums(costs, assigned, ranks))
        total += sum(costs)
    leaving = [(j, [r.sampled() for r in groups[j]]) for j in range(len(groups)) if owners[rank, j] != rank]
    sent = [None] * ranks
    if any(r != owner for (r, _), owner in owners.items()):
        sent = gathered(leaving, group)
    kept = {(rank, j): groups[j] for j in range(len(groups)) if owners[rank, j] == rank}
    for sender, parcels in enumerate(sent):
        for j, rollouts in parcels or ():
            if owners[sender, j] == rank:
                prompt = encode(everyone[sender][1][j])
                kept[sender, j] = [Rollout.restored(prompt, sampled, extend) for sampled in rollouts]
    in_order = sorted(kept, key=lambda key: (key[1] // size, key))
    return [kept[key] for key in in_order], largest * ranks / total


def _assign(costs: list[float], holders: list[int], ranks: int) -> list[int]:
    """The new owner of each group: even sums, and each part where most of it is already."""
    if max(_sums(costs, holders, ranks)) * ranks <= WORTH_IT * sum(costs):
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
