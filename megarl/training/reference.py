"""The reference policy: a snapshot of the weights, swapped into the model in place."""

from contextlib import contextmanager

import torch


class ReferencePolicy:
    """Holds a copy of this rank's trainable parameters as they are now.

    Args:
        model: the policy.
        device: where the copy lies; the CPU for models that fill the GPU.
    """

    def __init__(self, model, device: torch.device | None = None):
        self._model = model
        self.weights = {
            name: parameter.detach().clone().to(device or parameter.device)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

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
                present = parameter.to(kept.device, copy=True)
                parameter.copy_(kept)
                kept.copy_(present)
