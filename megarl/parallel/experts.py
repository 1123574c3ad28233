"""Expert parallelism: ranks that share the experts of a layer meet in every forward and backward pass.

Each of them has rows and requests of its own, and not equally many.  A rank that is done must go on taking part until
all are done, or the others wait for it for ever.
"""

import torch
import torch.distributed as dist

from megarl.platform.kernels import kernels


def most(value: int, group: dist.ProcessGroup) -> int:
    """The largest value of the ranks in `group`, which share experts of one module.  Collective."""
    if group.size() == 1:
        return value
    largest = torch.tensor(value, device="cuda" if kernels().gpu else "cpu")
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)
