"""What one rank knows and all must act on together."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megarl.platform.kernels import kernels


def any_rank(value: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether it holds on any rank of the group; of the job where none is given.  Collective."""
    if dist.get_world_size(group) == 1:
        return value
    flag = torch.tensor(float(value), device="cuda" if kernels().gpu else "cpu")
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of the group has, by rank; of the job where none is given.  Anything that can be pickled.
    Collective."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first[T](make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `make()` gives on the group's first rank, where alone it is called; on the job's where no group is given.
    Anything that can be pickled.  Collective."""
    values = [make() if dist.get_rank(group) == 0 else None]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]
