"""How the trainer's weights become the engine's, after each change of them.

`SharedWeights`: trainer and engine have one module, and no byte moves.  `ReshardedWeights`: the engine has a module of
its own, in another layout or quantised, which `megatron.core.resharding` fills in place, by a plan that is made once:
CUDA graphs find the weights where they were.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from megatron.core.resharding import build_local_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.resharding.utils import named_refit_tensors

from megarl.errors import CheckFailed
from megarl.parallel.agreement import gathered
from megarl.platform.kernels import kernels
from megarl.rollout.checksums import first_difference
from megarl.rollout.engine import RolloutEngine


class WeightSync(ABC):
    """Called when the trainer's weights have changed: brings them to the engine and says so to it.

    Args:
        engine: is told that its weights have changed.
        trained: the trainer's module.
        verify: compare every tensor after each sync.
        as_sampled: entered for a transfer: inside, the trainer's module has the weights to sample with.
        arrived: called after each, for what the engine's module makes of the weights.
    """

    bytes: int
    """That a sync writes into the engines' modules, over all ranks."""

    def __init__(
        self,
        engine: RolloutEngine,
        trained: torch.nn.Module,
        verify: bool,
        as_sampled: Callable[[], AbstractContextManager[None]] = nullcontext,
        arrived: Callable[[], None] = lambda: None,
    ):
        self._engine, self._trained, self._verify = engine, trained, verify
        self._as_sampled, self._arrived = as_sampled, arrived

    def __call__(self) -> None:
        """Collective, after every change of the trainer's weights that the engine is to sample with.

        Raises:
            CheckFailed: the engine's weights differ, on all ranks.
        """
        with self._as_sampled():
            self._transfer()
            if self._verify and (difference := self._difference()):
                raise CheckFailed(f"rollout.verify_sync: the engine has other weights than the trainer: {difference}")
        self._arrived()
        self._engine.weights_changed()

    @abstractmethod
    def _transfer(self) -> None: ...

    @abstractmethod
    def _difference(self) -> str | None:
        """The first tensor that differs and the ranks that hold it; the same on all ranks."""


class SharedWeights(WeightSync):
    """Trainer and engine have one module: the trainer wrote where the engine reads."""

    bytes = 0

    def _transfer(self) -> None:
        pass

    def _difference(self) -> str | None:
        places = {name: tensor.data_ptr() for name, tensor in self._trained.named_parameters()}
        mine = next(
            (
                f"{name} on rank {dist.get_rank()}"
                for name, tensor in self._engine.model.named_parameters()
                if places.get(name) != tensor.data_ptr()
            ),
            None,
        )
        return next(filter(None, gathered(mine)), None)


class ReshardedWeights(WeightSync):
    """Two modules in two layouts.  The constructor is collective, and leaves the engine with the trainer's weights."""

    def __init__(self, engine: RolloutEngine, trained: torch.nn.Module, *arguments, **options):
        super().__init__(engine, trained, *arguments, **options)
        self._plan = build_local_reshard_plan(trained, engine.model, trained.config.num_moe_experts)
        self._service = NCCLCopyService() if kernels().gpu else GlooCopyService()
        received = dict(named_refit_tensors(engine.model))
        mine = sum(received[op.param_name][op.my_slice].nbytes for op in self._plan.recv_ops)
        self.bytes = sum(gathered(mine))
        self()

    def _transfer(self) -> None:
        execute_reshard_plan(self._plan, self._trained, self._engine.model, self._service)

    def _difference(self) -> str | None:
        return first_difference(self._trained, self._engine.model)
