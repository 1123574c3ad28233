"""Sums of metrics over the data-parallel ranks, each of which has its own samples."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.platform.kernels import kernels


def over_data_parallel(values: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """float64 of the same shape, on the CPU: `values` reduced over the data-parallel group."""
    device = "cuda" if kernels().gpu else "cpu"
    reduced = values.detach().to(device, torch.float64, copy=True)
    dist.all_reduce(reduced, op, group=parallel_state.get_data_parallel_group())
    return reduced.cpu()
