"""Patches to megatron-core's mixture of experts."""

import functools

from megarl.platform.kernels import Kernels
from megarl.platform.patches import CORE, Patch


def _without_gpu(kernels: Kernels) -> bool:
    return not kernels.gpu


def _with_te(kernels: Kernels) -> bool:
    return kernels.te


def _without_te(kernels: Kernels) -> bool:
    return not kernels.te


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


def _expert_names() -> None:
    import re

    from megatron.core.resharding import utils

    local = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
    stock_index, stock_assign = utils._detect_expert_index_from_param_name, utils.assign_ep_resolved_name_inplace

    @functools.wraps(stock_index)
    def index(param_name):
        found = local.search(param_name)
        return stock_index(param_name) if found is None else int(found[0])

    @functools.wraps(stock_assign)
    def assign(meta, *, base_name=None):
        stock_assign(meta, base_name=base_name)
        if meta.global_expert_index is not None:
            meta.resolved_name = local.sub(str(meta.global_expert_index), meta.resolved_name)

    utils._detect_expert_index_from_param_name, utils.assign_ep_resolved_name_inplace = index, assign


def _gated_stride() -> None:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    stock = TEGroupedMLP.__init__

    @functools.wraps(stock)
    def construct(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        if self.config.gated_linear_unit:
            for parameter in self.linear_fc1.parameters():
                parameter.partition_stride = 2

    TEGroupedMLP.__init__ = construct


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
    Patch(
        "resharded-expert-names",
        "resharding takes the number of an expert, and which ranks share its weights, from the names of grouped "
        "experts only; those of experts that are modules of their own are not found, or another expert's are taken",
        CORE,
        "megatron/core/resharding/utils.py",
        '_EXPERT_PARAM_RE = re.compile(r"^(weight|bias)(\\d+)$")',
        _without_te,
        _expert_names,
    ),
    Patch(
        "resharded-gated-experts",
        "the first matrices of grouped experts, each of them two that are split over the ranks one by one, are marked "
        "as one: resharded into another expert tensor parallel size, their rows change places",
        CORE,
        "megatron/core/extensions/transformer_engine.py",
        "param.partition_stride = 1",
        _with_te,
        _gated_stride,
    ),
]
