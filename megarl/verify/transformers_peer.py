"""`python -m megarl.verify.transformers_peer FOLDER`: what transformers says about the sampled tokens.

A process of its own, in which nothing of torch is patched.  It gives
`Answers` in float32, and in bfloat16 where the job computes in it.
"""

import inspect
import sys
from pathlib import Path

import torch
from torch import Tensor

from megarl.check import PROJECTOR
from megarl.models.hf_config import family_of
from megarl.verify.cases import Case, loss
from megarl.verify.peers import CASES, Answers, Asked, answered

_KINDS = {"image": 1, "video": 2}
"""transformers' `mm_token_type_ids`; text is 0."""


class Transformers:
    """The checkpoint, its weights rounded to the job's type, computing in `dtype`."""

    def __init__(self, asked: Asked, dtype: torch.dtype):
        self._asked, self._dtype = asked, dtype
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._family = family_of(asked.checkpoint)
        model = self._family.hf_class.from_pretrained(asked.checkpoint, dtype=asked.dtype)
        # Upwards only: `to` would round the rotary frequencies too, which are float32 in every model.
        self._model = (model if dtype is asked.dtype else model.to(dtype)).to(self._device).eval()
        # transformers gives the padding token's embedding no gradient, even where it was sampled.
        self._model.get_input_embeddings().padding_idx = None
        self._freeze()

    def _freeze(self) -> None:
        language = {*self._model.get_decoder().parameters(), *self._model.get_output_embeddings().parameters()}
        for name, parameter in self._model.named_parameters():
            part = "language" if parameter in language else "projector" if PROJECTOR.search(name) else "vision"
            parameter.requires_grad_(part not in self._asked.freeze)

    def answers(self) -> Answers:
        """Forward and backward, one case at a time."""
        cases = self._asked.cases
        tokens = sum(case.completion.numel() for case in cases)
        scored, total = [], 0.0
        for case in cases:
            log_probs, entropy = self._log_probs(case)
            summed, _ = loss([case], log_probs, entropy, self._asked.objective)
            (summed / tokens).backward()
            scored.append(log_probs.detach().cpu())
            total += float(summed)
        gradients = {}
        for name, parameter in self._model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[self._family.name_in_checkpoint(name)] = gradient.float().cpu()
        return Answers(scored, gradients, total / tokens)

    def _log_probs(self, case: Case) -> tuple[Tensor, Tensor]:
        """float32 `[n]` each: log-probabilities of the completion, entropies of the distributions."""
        logits = self._logits(case)[case.prompt.ids.numel() - 1 : -1].float() / self._asked.temperature
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(1, case.completion.to(self._device)[:, None])[:, 0]
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def _logits(self, case: Case) -> Tensor:
        """`[tokens, vocabulary]`.  A media token that was spelled out or sampled is text: transformers, which looks
        for media by id, is given another id there and the right embedding."""
        prompt = case.prompt
        config, embeddings = self._model.config, self._model.get_input_embeddings()
        ids = torch.cat([prompt.ids, case.completion])[None].to(self._device)
        if not self._family.media:
            return self._model(input_ids=ids, use_cache=False).logits[0]
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
            return self._model(
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
        if "second_per_grid_ts" in inspect.signature(self._model.forward).parameters:
            patch = self._model.config.vision_config.temporal_patch_size
            videos = [item for item in case.prompt.items if item.kind == "video"]
            arguments["second_per_grid_ts"] = [item.seconds_per_patch(patch) for item in videos]
        return arguments


def answer(folder: Path) -> None:
    """Reads the question, writes the answers: `{"float32": Answers, "bfloat16": Answers or absent}`."""
    asked = torch.load(folder / CASES, weights_only=False)
    names = ["float32"] if asked.dtype is torch.float32 else ["float32", "bfloat16"]
    answers = {}
    for name in names:
        answers[name] = Transformers(asked, getattr(torch, name)).answers()
    torch.save(answers, folder / answered("transformers"))


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
