"""Patches to megatron-core's mixture of experts."""

import functools

from megarl.platform.kernels import Kernels
from megarl.platform.patches import CORE, Patch


def _without_gpu(kernels: Kernels) -> bool:
    return not kernels.gpu


def _split_sizes() -> None:
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    stock = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(stock)
    def move(tensor, as_numpy=False, record_stream=False):
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return stock(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _uneven_parts() -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    stock_gather, stock_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(stock_gather)
    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return stock_gather(input_, group, output_split_sizes, use_global_buffer)
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    @functools.wraps(stock_scatter)
    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return stock_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


PATCHES = [
    Patch(
        "expert-split-sizes",
        "the all-to-all of tokens takes its sizes as numpy arrays, which a CPU tensor is never turned into",
        CORE,
        "megatron/core/transformer/moe/moe_utils.py",
        "if torch.is_tensor(tensor) and tensor.is_cuda:",
        _without_gpu,
        _split_sizes,
    ),
    Patch(
        "uneven-expert-parts",
        "tokens of experts that are split over tensor-parallel ranks are gathered and scattered in parts of different "
        "sizes, which gloo refuses",
        CORE,
        "megatron/core/tensor_parallel/mappings.py",
        "torch.distributed.all_gather(output_tensor_list, input_, group=group)",
        _without_gpu,
        _uneven_parts,
    ),
]
