"""Which ranks are one engine in rollouts, and which of the trainer's ranks an engine samples for.

An engine is the tensor-parallel ranks that step one module together.  Where trainer and engine share the module these
are the trainer's, and context-parallel ranks, which train on the same rows, are engines of their own.  Where the
engine has a module in a layout of its own, an engine may be a part of the ranks that train on the same rows, or span
several data-parallel ranks of the trainer, whose prompts it then samples together.
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.shards import build_inference_pg_collection
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True, eq=False)
class EngineGroups:
    model: ProcessGroupCollection
    """Of the module that the engine steps; `dp_cp` is one rank of each engine."""
    peers: dist.ProcessGroup
    """One rank of each engine that samples a part of the same prompts."""
    data_parallel_ranks: range
    """Of the trainer: whose prompts these are."""
    same_prompts: dist.ProcessGroup
    """All ranks that have these prompts, and all rollouts of them."""


def shared_groups() -> EngineGroups:
    """The engine steps the trainer's module."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    rank = parallel_state.get_data_parallel_rank()
    same_rows = parallel_state.get_tensor_and_context_parallel_group()
    return EngineGroups(groups, groups.cp, range(rank, rank + 1), same_rows)


def resharded_groups(
    tensor_model_parallel_size: int, expert_model_parallel_size: int, expert_tensor_parallel_size: int
) -> EngineGroups:
    """The engine steps a module of this layout over the same ranks.  Collective.

    Args:
        tensor_model_parallel_size: ranks of an engine; divides, or is a multiple of, the ranks that train on the same
            rows.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = build_inference_pg_collection(
        world,
        tp_size=tensor_model_parallel_size,
        pp_size=1,
        cp_size=1,
        ep_size=expert_model_parallel_size,
        expt_tp_size=expert_tensor_parallel_size,
    )
    engine = tensor_model_parallel_size
    same_rows = parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()
    # Ranks are counted through in both layouts alike, tensor-parallel ones first, so the smaller of both lies whole in
    # the larger: a block of ranks that have their prompts, and their engines, to themselves.
    block = max(engine, same_rows)
    lanes = [
        list(range(first + lane, first + block, engine)) for first in range(0, world, block) for lane in range(engine)
    ]
    peers, _ = dist.new_subgroups_by_enumeration(lanes)
    blocks = [list(range(first, first + block)) for first in range(0, world, block)]
    same_prompts, _ = dist.new_subgroups_by_enumeration(blocks)
    first = rank // block * block // same_rows
    return EngineGroups(groups, peers, range(first, first + block // same_rows), same_prompts)
