"""Router replay: training sends each token to the experts that the engine sent it to.

Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers (arXiv:2510.11370).  Two
forward passes over equal weights round differently, and where two experts are almost equally good that is enough to
choose another one.  Only the choice is replayed: how much each chosen expert weighs comes from the present router, so
its gradient is what it would be had it chosen them itself.

Megatron's `RouterReplay` records and replays, one object a router.  It keeps those of all models of a process in one
list; here they belong to their model.
"""

from collections.abc import Callable
from contextlib import contextmanager

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megarl.packing.rows import NOT_RECORDED
from megarl.parallel import context


class LayerReplay(RouterReplay):
    """Of one layer.  Replays what was recorded, lets the router choose for the other tokens, and counts how often it
    would have chosen differently."""

    def __init__(self, device: torch.device):
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)
        self.compared = torch.zeros(2, dtype=torch.long, device=device)
        """int64: tokens that were replayed, and those of them for which the router would have chosen other experts."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of each token's experts, `[tokens, topk]` both."""
        if self.router_replay_action is not RouterReplayAction.REPLAY_FORWARD:
            return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        own = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)[1]
        recorded = self.target_topk_idx[:, :1] != NOT_RECORDED
        indices = torch.where(recorded, self.target_topk_idx, own)
        differ = (indices.sort(1).values != own.sort(1).values).any(1)
        self.compared += torch.stack([recorded.sum(), differ.sum()])
        return scores.gather(1, indices), indices


def install(model) -> None:
    """Gives each router of a model that was built with `moe_enable_routing_replay` a `LayerReplay`."""
    for router in _routers(model):
        router.router_replay = LayerReplay(router.weight.device)
        router.router_replay.layer_number = router.layer_number
    # Those that the routers were built with, and those of a decoder that Bridge builds and drops.
    RouterReplay.clear_global_router_replay_instances()


def layer_replays(model) -> list[LayerReplay]:
    """In the order of the layers; none where the model was built without router replay."""
    replays = [router.router_replay for router in _routers(model)]
    return [replay for replay in replays if replay is not None]


def _routers(model) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


@contextmanager
def recording(replays: list[LayerReplay]):
    """Inside, Megatron's engine records these: they are the list of the process."""
    listed = RouterReplay.global_router_replay_instances
    before, listed[:] = [*listed], replays
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    try:
        yield
    finally:
        RouterReplay.clear_global_router_replay_action()
        listed[:] = before


class RowReplay:
    """Replays packed rows, one at a time.

    Args:
        model: the policy.
    """

    def __init__(self, model):
        self._layers = layer_replays(model)
        self._sequence_parallel = model.config.sequence_parallel

    def begin(self, routing_indices: Tensor | None) -> None:
        """From here to the next call every forward pass is one over this row, also where a layer runs again in the
        backward pass: Megatron's list of what to replay then is for schedules in which other rows come in between.

        Args:
            routing_indices: integers `[tokens of the whole row, layers, top-k]`, `NOT_RECORDED` where the router
                chooses; None: it chooses everywhere.
        """
        for layer in self._layers:
            layer.clear_indices()
            layer.clear_router_replay_action()
        if routing_indices is None:
            return
        mine = context.shard(routing_indices, 0)
        if self._sequence_parallel:
            mine = scatter_to_sequence_parallel_region(mine)
        for layer, indices in zip(self._layers, mine.long().unbind(1), strict=True):
            layer.set_target_indices(indices)
            layer.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def begin_comparing(self) -> None:
        for layer in self._layers:
            layer.compared.zero_()

    def rerouted(self) -> float | None:
        """Since `begin_comparing`, over all ranks: the share of the replayed tokens, counted once a layer, that the
        layer's router would have sent to other experts; None where nothing was replayed.  Collective."""
        if not self._layers:
            return None
        counts = torch.stack([layer.compared for layer in self._layers]).sum(0)
        # Of tensor-parallel ranks too, which route tokens of their own under sequence parallelism.
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(counts, group=group)
        replayed, other = counts.tolist()
        return other / replayed if replayed else None
