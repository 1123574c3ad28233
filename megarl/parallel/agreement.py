"""What one rank knows and all must act on together."""

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
