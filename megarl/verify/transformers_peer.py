"""`python -m megarl.verify.transformers_peer FOLDER`: what transformers says about the sampled tokens.

A process of its own, in which nothing of torch is patched.  It gives
`Answers` in float32, and in bfloat16 where the job computes in it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.memory import PROJECTOR
from megarl.models.hf_config import family_of
from megarl.verify.cases import Case, loss
from megarl.verify.peers import CASES, Answers, Asked, answered

_KINDS = {"image": 1, "video": 2}
"""transformers' `mm_token_type_ids`; text is 0."""


class Transformers:
    """A checkpoint in transformers.

    Args:
        checkpoint: the folder.
        weights: the type that its weights are rounded to.
        dtype: what is computed in, of no fewer bits.
        temperature: divides the logits.
        freeze: of `vision`, `projector`, `language`: what gets no gradient.
    """

    def __init__(
        self,
        checkpoint: Path,
        weights: torch.dtype,
        dtype: torch.dtype,
        temperature: float = 1.0,
        freeze: Sequence[str] = (),
    ):
        self._dtype, self._temperature = dtype, temperature
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._family = family_of(checkpoint)
        # What stands for exact must be: cuDNN, which embeds the patches, rounds float32 to 10 bits by default.
        torch.backends.cudnn.allow_tf32 = False
        model = self._family.hf_class.from_pretrained(checkpoint, dtype=weights).to(self._device)
        # Upwards only: `to` would round the rotary frequencies too, which are float32 in every model.
        self.model = (model if dtype is weights else model.to(dtype)).eval()
        # transformers gives the padding token's embedding no gradient, even where it was sampled.
        self.model.get_input_embeddings().padding_idx = None
        self._freeze(freeze)

    def _freeze(self, freeze: Sequence[str]) -> None:
        language = {*self.model.get_decoder().parameters(), *self.model.get_output_embeddings().parameters()}
        for name, parameter in self.model.named_parameters():
            part = "language" if parameter in language else "projector" if PROJECTOR.search(name) else "vision"
            parameter.requires_grad_(part not in freeze)

    def differentiate(
        self, cases: Sequence[Case], loss: Callable[[Case, Tensor, Tensor], Tensor]
    ) -> tuple[list[Tensor], float]:
        """Forward and backward, one case at a time.

        Args:
            loss: `(case, log-probabilities [n], entropies [n]) -> loss`, summed over the completion.

        Returns:
            (log-probabilities float32 `[n]` per case on the CPU, the loss per completion token.)
        """
        tokens = sum(case.completion.numel() for case in cases)
        scored, total = [], 0.0
        for case in cases:
            log_probs, entropy = self.log_probs(case)
            summed = loss(case, log_probs, entropy)
            (summed / tokens).backward()
            scored.append(log_probs.detach().cpu())
            total += float(summed.detach())
        return scored, total / tokens

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """What `differentiate` has added up, of its loss per token: name in a checkpoint and gradient, of the type that
        was computed in and where the model is; zeros where there is none."""
        for name, parameter in self.model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield self._family.name_in_checkpoint(name), gradient

    def log_probs(self, case: Case) -> tuple[Tensor, Tensor]:
        """float32 `[n]` each: log-probabilities of the completion, entropies of the distributions."""
        logits = self.logits(case)[case.prompt.ids.numel() - 1 : -1].float() / self._temperature
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(1, case.completion.to(self._device)[:, None])[:, 0]
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def logits(self, case: Case) -> Tensor:
        """`[tokens, vocabulary]`.  A media token that was spelled out or sampled is text: transformers, which looks
        for media by id, is given another id there and the right embedding."""
        prompt = case.prompt
        config, embeddings = self.model.config, self.model.get_input_embeddings()
        ids = torch.cat([prompt.ids, case.completion])[None].to(self._device)
        if not self._family.media:
            return self.model(input_ids=ids, use_cache=False).logits[0]
        kinds = torch.zeros_like(ids)
        kinds[0, : prompt.ids.numel()][prompt.media_mask.to(self._device)] = torch.tensor(
            [
                _KINDS[item.kind]
                for item in prompt.items
                for _ in range(item.feature_count(config.vision_config.spatial_merge_size))
            ],
            dtype=torch.long,
            device=self._device,
        )
        media_ids = torch.tensor([config.image_token_id, config.video_token_id], device=self._device)
        literal = torch.isin(ids, media_ids) & (kinds == 0)

        def embed(module, arguments, output):
            return torch.where(literal[..., None], module.weight[ids], output)

        hook = embeddings.register_forward_hook(embed)
        try:
            return self.model(
                input_ids=ids.masked_fill(literal, 0),
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                use_cache=False,
                **self._media(case),
            ).logits[0]
        finally:
            hook.remove()

    def _media(self, case: Case) -> dict[str, Tensor]:
        arguments = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            items = [item for item in case.prompt.items if item.kind == kind]
            if items:
                arguments[pixels] = torch.cat([item.pixels for item in items]).to(self._device, self._dtype)
                arguments[grids] = torch.tensor([item.grid for item in items], device=self._device)
        if "second_per_grid_ts" in inspect.signature(self.model.forward).parameters:
            patch = self.model.config.vision_config.temporal_patch_size
            videos = [item for item in case.prompt.items if item.kind == "video"]
            arguments["second_per_grid_ts"] = [item.seconds_per_patch(patch) for item in videos]
        return arguments


def _answers(asked: Asked, dtype: torch.dtype) -> Answers:
    model = Transformers(asked.checkpoint, asked.dtype, dtype, asked.temperature, asked.freeze)

    def of_case(case: Case, log_probs: Tensor, entropy: Tensor) -> Tensor:
        return loss([case], log_probs, entropy, asked.objective)[0]

    scored, mean = model.differentiate(asked.cases, of_case)
    return Answers(scored, {name: gradient.float().cpu() for name, gradient in model.gradients()}, mean)


def answer(folder: Path) -> None:
    """Reads the question, writes the answers: `{"float32": Answers, "bfloat16": Answers or absent}`."""
    asked: Asked = torch.load(folder / CASES, weights_only=False)
    names = ["float32"] if asked.dtype is torch.float32 else ["float32", "bfloat16"]
    answers = {name: _answers(asked, getattr(torch, name)) for name in names}
    torch.save(answers, folder / answered("transformers"))


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
