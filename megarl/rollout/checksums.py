"""Whether two modules in different layouts hold the same weights, bit for bit, without moving the weights.

Megatron's checkpoints know of each rank's tensors which part of which whole tensor they are.  From the bits of a part
and their places in the whole comes a number; the numbers of the parts add up to that of the whole, however it was cut.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

from megarl.parallel.agreement import gathered

_ELEMENTS_AT_ONCE = 1 << 24
"""Bounds the scratch memory: some 32 bytes for each."""


class Part(NamedTuple):
    """One rank's part of a whole tensor."""

    whole: tuple
    """Which tensor: its key in a checkpoint, and layer and expert."""
    offset: tuple[int, ...]
    """Of its first element in the whole."""
    name: str
    """Of the parameter on this rank."""
    checksum: int


def first_difference(trained: torch.nn.Module, copy: torch.nn.Module) -> str | None:
    """The first tensor of `copy` that is not, bit for bit, the one of `trained`, and the ranks that hold it; None where
    there is none.  The same on all ranks.  Collective."""
    everyone = gathered((list(_parts(trained)), list(_parts(copy))))
    expected: dict[tuple, dict[tuple, int]] = {}
    found: dict[tuple, dict[tuple, list[tuple[int, Part]]]] = {}
    for rank, (theirs, ours) in enumerate(everyone):
        for part in theirs:
            expected.setdefault(part.whole, {}).setdefault(part.offset, part.checksum)
        for part in ours:
            found.setdefault(part.whole, {}).setdefault(part.offset, []).append((rank, part))
    for whole in [*expected, *(found.keys() - expected.keys())]:
        if whole not in found or whole not in expected:
            return f"{whole[0]} is in one of the two only"
        if wrong := _wrong_holders(expected[whole], found[whole]):
            ranks = sorted({rank for rank, _ in wrong})
            return f"{wrong[0][1].name} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return None


def _wrong_holders(expected: dict[tuple, int], found: dict[tuple, list[tuple[int, Part]]]) -> list[tuple[int, Part]]:
    """Those whose parts do not add up to the whole, each with its rank."""
    total = _wrapped(sum(expected.values()))
    # Every part is held equally often: the first holders make one whole, the second holders the next.
    copies = list(zip(*found.values(), strict=True))
    right = [copy for copy in copies if _wrapped(sum(part.checksum for _, part in copy)) == total]
    good = {(part.offset, part.checksum) for copy in right for _, part in copy}
    wrong = [holder for copy in copies if copy not in right for holder in copy]
    return sorted(h for h in wrong if (h[1].offset, h[1].checksum) not in good)


def _wrapped(value: int) -> int:
    return value % (1 << 64)


@torch.no_grad()
def _parts(model: torch.nn.Module) -> Iterator[Part]:
    state = model.sharded_state_dict(metadata={})
    apply_factories(state)  # matrices that are several in one, as the two of a gated MLP, come apart
    for name, value in state.items():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, ShardedTensor):
                stacked = tensor.prepend_axis_num  # layers and experts
                whole = tensor.key, *tensor.global_offset[:stacked]
                offset = tensor.global_offset[stacked:]
                yield Part(whole, offset, name, checksum(tensor.data, tensor.global_shape[stacked:], offset))


def checksum(values: Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> int:
    """A number from the bits of a part of a tensor and from where they are in it; those of disjoint parts add up,
    modulo 2^64, to that of their union.

    Args:
        values: the part, of any floating type.
        shape: of the whole tensor.
        offset: of the part's first element in it.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, values[:1].numel()))
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows]
        places = torch.zeros((), dtype=torch.int64, device=values.device)
        for dim, size in enumerate(part.shape):
            begin = offset[dim] + (first if dim == 0 else 0)
            along = torch.arange(begin, begin + size, device=values.device)
            places = places * shape[dim] + along.view(-1, *[1] * (part.dim() - dim - 1))
        # Odd, so that no difference of one element is lost, and mixed, so that exchanged elements do not cancel out.
        total += (part.contiguous().view(integers).long() * (_mix(places) | 1)).sum()
    return int(total)


def _mix(z: Tensor) -> Tensor:
    """int64: SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
    with torch's arithmetic shifts."""
    z = z + (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ (z >> 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ (z >> 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ (z >> 31)
