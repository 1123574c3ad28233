"""Sums of metrics over the data-parallel ranks, each of which has its own samples."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.platform.kernels import kernels


def over_data_parallel(values: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """`over` the data-parallel group.  Context-parallel ranks train on the same samples, so they count once."""
    return over(parallel_state.get_data_parallel_group(), values, op)


def over(group: dist.ProcessGroup, values: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """float64 of the same shape, on the CPU: `values` reduced over the ranks of a group."""
    device = "cuda" if kernels().gpu else "cpu"
    reduced = values.detach().to(device, torch.float64, copy=True)
    dist.all_reduce(reduced, op, group=group)
    return reduced.cpu()
