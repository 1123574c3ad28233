"""Gradients under the names that a Hugging Face checkpoint gives its weights, whatever the layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import megarl.platform.prepare  # noqa: F401

import torch
from torch import Tensor

from megarl.models.build import Policy
from megarl.packing.rows import PackedRow
from megarl.training.trainer import Trainer


def named_gradients(policy: Policy, trainer: Trainer, rows: Sequence[PackedRow], loss) -> Iterator[tuple[str, Tensor]]:
    """Of the loss per token over all ranks: name and float32 gradient on the CPU, one weight at a time.

    Weights are gathered over the ranks, split and renamed by Bridge's export; it is shown gradients in their place.
    Parameters without a gradient are zero.  Collective: every rank has to go through all of them.

    Args:
        rows, loss: as for `Trainer.update`.
    """
    found = trainer.gradients(rows, loss)
    with _shown_instead(policy.model, found):
        yield from policy.base_weights()
        yield from policy.adapter_weights()


@contextmanager
def _shown_instead(model: torch.nn.Module, tensors: dict[str, Tensor]):
    """Inside, the model's parameters are `tensors` by name, and zeros where there are none.

    The parameters themselves stay as they are: DDP's buffers and hooks know them, and they may be of a type that
    would round gradients.
    """
    kept = {name: parameter for name, parameter in model.named_parameters()}
    stand_ins = {}
    for name, parameter in kept.items():
        values = tensors[name] if name in tensors else torch.zeros_like(parameter, dtype=torch.float32)
        stand_in = torch.nn.Parameter(values, requires_grad=False)
        stand_in.__dict__.update(parameter.__dict__)  # how it is split over the ranks
        stand_ins[id(parameter)] = stand_in
    places = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]
    for owner, key, parameter in places:
        owner[key] = stand_ins[id(parameter)]
    try:
        yield
    finally:
        for owner, key, parameter in places:
            owner[key] = parameter
