"""The same checkpoint as users run it without Megatron: transformers' `generate`, and a plain PyTorch step."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.hf_config import family_of


class Peer:
    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device):
        self.model = family_of(folder).hf_class.from_pretrained(folder, dtype=dtype).to(device)
        self._device = device
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def generate(self, ids: Tensor, new_tokens: int, temperature: float) -> Tensor:
        """`new_tokens` after each of the prompts `[prompts, tokens]`."""
        return self.model.eval().generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )

    def encode(self, pixels: Tensor, grids: Tensor) -> None:
        """Features of pictures; arguments as `megarl.models.policy_model.PolicyModel.encode` takes them."""
        self.model.eval().get_image_features(pixels.to(self._device), grids.to(self._device))

    def update(self, ids: Tensor, prompt_tokens: int) -> None:
        """A supervised step of AdamW on whole sequences `[sequences, tokens]`, of which prompts are not learned."""
        logits = self.model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        loss = F.cross_entropy(
            logits[:, prompt_tokens - 1 : -1].flatten(0, 1).float(), ids[:, prompt_tokens:].flatten()
        )
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
