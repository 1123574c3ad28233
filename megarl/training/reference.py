"""The reference policy: a snapshot of the weights, swapped into the model in place."""

from collections.abc import Callable
from contextlib import contextmanager

import torch

from megarl.models.host_copy import host_copy


class ReferencePolicy:
    """Holds a copy of this rank's trainable parameters as they are now, in the host's memory: a GPU has better use for
    its own while nothing is scored.

    Args:
        model: the policy.
        whole: hold what is not trained too, for a reference whose weights come from elsewhere.
        changed: called when the model has become the reference, and when it is the policy again.
    """

    def __init__(self, model, whole: bool = False, changed: Callable[[], None] = lambda: None):
        self._model, self._changed = model, changed
        self.weights = {
            name: host_copy(parameter)
            for name, parameter in model.named_parameters()
            if whole or parameter.requires_grad
        }

    @classmethod
    def filled(cls, model, fill: Callable[[], None]) -> "ReferencePolicy":
        """The weights that `fill` writes into the model, which has its own again afterwards."""
        reference = cls(model, whole=True)
        with reference.swapped_in():
            fill()
        return reference

    @torch.no_grad()
    def take(self) -> None:
        """The present weights become the reference."""
        for name, parameter in self._model.named_parameters():
            if name in self.weights:
                self.weights[name].copy_(parameter)

    @contextmanager
    def swapped_in(self):
        """Inside, the model is the reference policy; afterwards, also after an exception, the policy again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self.weights:
                kept = self.weights[name]
                present = parameter.clone()
                parameter.copy_(kept)
                kept.copy_(present)
        self._changed()
