"""Low-rank adapters of the language model (LoRA; Hu et al. 2021, arXiv:2106.09685), by Megatron Bridge's PEFT.

An adapted layer computes `W x + (alpha / rank) B A x`; W is not trained, and B is zero at first.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.lora_merge import LoRAMerge
from megatron.bridge.peft.recompute import PEFT_RECOMPUTE_PATCHED
from torch import Tensor

from megarl.models.host_copy import host_copy
from megarl.models.named_generator import named_generator


@dataclass(frozen=True)
class LoraOptions:
    rank: int
    """A multiple of the tensor-parallel size: the ranks share the rows of A."""
    alpha: float
    modules: tuple[str, ...]
    """Of `linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2`, in every layer."""
    seed: int = 0
    """Of A."""
    merge: bool = True
    """Rollouts see `W + (alpha / rank) B A` as one matrix; else both, as training does."""

    @property
    def peft(self) -> LoRA:
        """As Bridge takes it."""
        return LoRA(target_modules=list(self.modules), dim=self.rank, alpha=self.alpha)


class Adapters:
    """The adapters of a model.  The constructor freezes the language model and gives its layers theirs.

    A is uniform between -1/sqrt(inputs) and 1/sqrt(inputs), as peft draws it; each from a generator of its own, seeded
    by `LoraOptions.seed` and its name, so that every layout begins alike.
    """

    def __init__(self, model, options: LoraOptions):
        self.options = options
        training, config = model.training, model.language_model.config
        PEFT_RECOMPUTE_PATCHED.discard(id(model.language_model))  # of a model that is no more
        config.pg_collection = model.pg_collection  # else Bridge takes Megatron's own groups, of the trainer's layout
        try:
            with redirect_stdout(None):  # it announces that gradients will be there where layers are recomputed
                options.peft(model.language_model)
        finally:
            del config.pg_collection
        model.train(training)
        self._layers = {
            name: layer for name, layer in model.language_model.named_modules() if isinstance(layer, LoRALinear)
        }
        self._base: dict[str, tuple[int, Tensor]] = {}
        """Of each adapted weight how often it had been written, and a copy on the host."""
        for name, layer in self._layers.items():
            layer.register_load_state_dict_pre_hook(_with_wrapped_names)
            weight, b = layer.to_wrap.weight, layer.adapter.linear_out.weight
            if weight.partition_dim == b.partition_dim:
                b.partition_stride = weight.partition_stride  # resharding joins halves of a gated MLP by it
            _draw(layer.adapter.linear_in.weight, layer.adapter.tp_group, named_generator(options.seed, name))

    @torch.no_grad()
    def clear(self) -> None:
        """Makes B zero: the model computes what its own weights say."""
        for layer in self._layers.values():
            layer.adapter.linear_out.weight.zero_()

    def switch(self, on: bool) -> None:
        """Off, the model computes what its own weights say."""
        for layer in self._layers.values():
            (layer.enable_adapter_layers if on else layer.disable_adapter_layers)()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside, each adapted weight holds the sum of itself and its adapter's product, added in float32 and rounded
        once; afterwards, also after an exception, it is what it was, bit for bit, and at the same address.  Collective
        over the tensor-parallel ranks."""
        self._keep()
        try:
            self.switch(False)
            self._merge()
            yield
        finally:
            self.switch(True)
            self._restore()

    def _keep(self) -> None:
        """They are not trained, so a copy is made again only where a checkpoint was loaded."""
        for name, layer in self._layers.items():
            weight = layer.to_wrap.weight
            if name not in self._base or self._base[name][0] != weight._version:
                self._base[name] = weight._version, host_copy(weight)

    @torch.no_grad()
    def _merge(self) -> None:
        for layer in self._layers.values():
            adapter, weight = layer.adapter, layer.to_wrap.weight
            summed = LoRAMerge().merge(
                weight.float(),
                adapter.linear_out.weight.float(),
                adapter.linear_in.weight.float(),
                adapter.alpha,
                adapter.dim,
                tp_group=adapter.tp_group,
            )
            weight.copy_(summed)

    @torch.no_grad()
    def _restore(self) -> None:
        for name, layer in self._layers.items():
            weight, (_, kept) = layer.to_wrap.weight, self._base[name]
            weight.copy_(kept, non_blocking=True)
            self._base[name] = weight._version, kept


@torch.no_grad()
def _draw(weight: Tensor, group: torch.distributed.ProcessGroup, generator: torch.Generator) -> None:
    """Fills this rank's part of an A of `[rank, inputs]`, which is split over rows or over columns."""
    whole, dim = list(weight.shape), weight.partition_dim
    whole[dim] *= group.size()
    values = (2 * torch.rand(whole, generator=generator) - 1) / math.sqrt(whole[1])
    weight.copy_(values.chunk(group.size(), dim)[group.rank()])


def _with_wrapped_names(layer: LoRALinear, state: dict, prefix: str, *_) -> None:
    """Bridge's wrapper names the weights inside as if it were not there when it gives its state, but not when it is
    given one."""
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if not name.startswith(("adapter.", "to_wrap.")):
            state[f"{prefix}to_wrap.{name}"] = state.pop(key)
