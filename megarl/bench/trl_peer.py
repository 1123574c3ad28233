"""TRL's GRPOTrainer over the checkpoint of a run, generating with transformers.  Imports TRL."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from PIL import Image
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from megarl.environments.score import Attempt
from megarl.errors import UserError
from megarl.media.item import EncodedPrompt
from megarl.models.hf_config import family_of
from megarl.platform.kernels import kernels
from megarl.run import Run


class TrlPeer:
    """
    Args:
        checkpoint: the Hugging Face folder that the run begins with.
        run: whose recipe is followed and whose judges give the rewards.
        prompts: of every step.
    """

    def __init__(self, checkpoint: Path, run: Run, prompts: Sequence[EncodedPrompt]):
        self._checkpoint, self._run, self._prompts = checkpoint, run, prompts

    def steps(self, rounds: int, before_each: Callable[[], None]) -> list[tuple[float, float, float]]:
        """`rounds + 1` steps, of which the first warms up: seconds of rollout, scoring and training of each.

        Args:
            before_each: called before each of them, and not counted.
        """
        recipe, policy = self._run.recipe, self._run.policy
        updates = recipe.algorithm.updates_per_step
        dtype = policy.model.language_model.config.params_dtype
        model = family_of(self._checkpoint).hf_class.from_pretrained(self._checkpoint, dtype=dtype)
        with TemporaryDirectory() as folder, _single_process():
            trainer = _Timed(
                model,
                self._rewards,
                GRPOConfig(folder, max_steps=(rounds + 1) * updates, **self._settings(dtype)),
                self._dataset(),
            )
            trainer.remove_callback(PrinterCallback)  # the bench's own output may be JSON
            trainer.before_each = before_each
            trainer.train()
            trainer.end_step()
        expected = {tuple(prompt.ids.tolist()) for prompt in self._prompts}, {recipe.rollout.max_new_tokens}
        if (trainer.prompts, trainer.lengths) != expected:
            raise RuntimeError("TRL's prompts or lengths are others than megarl's: the sides did different work")
        return trainer.seconds

    def _settings(self, dtype: torch.dtype) -> dict:
        """megarl's words in TRL's.  A microbatch has as many tokens as megarl's rows have at most."""
        recipe = self._run.recipe
        a, o, r = recipe.algorithm, recipe.optimizer, recipe.rollout
        longest = max(prompt.ids.numel() for prompt in self._prompts) + r.max_new_tokens
        rollouts = a.rollouts_per_step // a.minibatches
        fitting = max(1, recipe.training.tokens_per_row // longest)
        microbatch = max(n for n in range(1, min(rollouts, fitting) + 1) if rollouts % n == 0)
        return dict(
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=rollouts // microbatch,
            steps_per_generation=a.rollouts_per_step // microbatch,
            num_generations=a.group_size,
            num_iterations=a.epochs,
            max_completion_length=r.max_new_tokens,
            generation_kwargs={"min_new_tokens": r.max_new_tokens},
            temperature=recipe.rollout.scoring_temperature,
            beta=a.kl_coefficient,
            epsilon=a.clip_low,
            epsilon_high=a.clip_high,
            loss_type="dapo",
            learning_rate=o.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=o.adam_beta1,
            adam_beta2=o.adam_beta2,
            adam_epsilon=o.adam_eps,
            weight_decay=o.weight_decay,
            max_grad_norm=o.clip_grad,
            gradient_checkpointing=recipe.training.recompute == "full",
            bf16=dtype is torch.bfloat16,
            use_cpu=not kernels().gpu,
            seed=recipe.seed % 2**31,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )

    def _dataset(self) -> Dataset:
        prompts, pictures = [], []
        for encoded in self._prompts:
            messages, shown = [], []
            for message in encoded.prompt.messages:
                parts = []
                for part in message["content"]:
                    if part["type"] == "video":
                        raise UserError("--only grpo: the prompts have videos, which TRL's trainer does not take")
                    if part["type"] == "image":
                        with Image.open(part["image"].path) as image:
                            shown.append(image.convert("RGB"))
                    parts.append({"type": "image"} if part["type"] == "image" else dict(part))
                # Of text alone a plain string: the table would give each part a null of the other kind.
                alone = [part["text"] for part in parts if part["type"] == "text"]
                content = parts if shown else "".join(alone)
                messages.append({"role": message["role"], "content": content})
            prompts.append(messages)
            pictures.append(shown)
        columns = {"prompt": prompts, "index": list(range(len(prompts)))}
        return Dataset.from_dict(columns | ({"images": pictures} if any(pictures) else {}))

    def _rewards(self, index: list[int], completion_ids: list[list[int]], **_) -> list[float]:
        prompts = [self._prompts[place].prompt for place in index]
        texts = [self._run.text(torch.tensor(ids)) for ids in completion_ids]
        attempts = [Attempt(t, True, p.answer, p.source, p.row) for p, t in zip(prompts, texts, strict=True)]
        return [score.reward for score in self._run.judges.score(attempts)]


class _Timed(GRPOTrainer):
    before_each: Callable[[], None]

    def __init__(self, *args):
        super().__init__(*args)
        self.seconds: list[tuple[float, float, float]] = []
        self._began: float | None = None
        self.prompts: set[tuple[int, ...]] = set()
        """Token ids of all that it was asked."""
        self.lengths: set[int] = set()
        """Tokens of completions."""

    def end_step(self) -> None:
        """Whatever a step does after its rollouts and their scores is training."""
        if self._began is not None:
            self.seconds.append((self._rollout, self._scored - self._rollout, _now() - self._began - self._scored))

    def _generate_and_score_completions(self, inputs):
        self.end_step()
        self.before_each()
        self._began = _now()
        outputs = super()._generate_and_score_completions(inputs)
        self._scored = _now() - self._began
        return outputs

    def _generate(self, prompts):
        began = _now()
        outputs = super()._generate(prompts)
        self._rollout = _now() - began
        prompt_ids, completion_ids, *_ = outputs
        self.prompts |= set(map(tuple, prompt_ids))
        self.lengths |= set(map(len, completion_ids))
        return outputs


def _now() -> float:
    torch.cuda.synchronize() if kernels().gpu else None
    return time.perf_counter()


@contextmanager
def _single_process() -> Iterator[None]:
    """Without the environment of a job, by which accelerate would wrap the model for several ranks."""
    hidden = {name: os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in hidden.items() if value is not None})
