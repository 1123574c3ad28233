"""TRL's GRPOTrainer over rollouts that are given; for a process of its own, since TRL's imports take long."""

import pickle
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Rollouts:
    prompts: list[tuple[list[dict], list[Path]]]
    """Chat messages with `{"type": "image"}` in place of each picture, and the pictures' files."""
    completions: list[list[int]]
    """Groups one after another."""
    rewards: list[list[float]]
    """By reward function, then by completion."""
    log_probs: list[list[float]]
    """That the completions were sampled with."""


@dataclass(frozen=True)
class Case:
    rollouts: Rollouts
    options: dict
    """Of TRL's GRPOConfig."""
    corrected: bool = False
    """The correction for vLLM's probabilities: its own code, without vLLM."""


@dataclass
class Update:
    members: list[int] = field(default_factory=list)
    """Which completions it was made from."""
    loss: float = 0.0
    advantages: dict[int, float] = field(default_factory=dict)
    """By member."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    prompt_ids: list[list[int]]
    """As TRL tokenised them."""
    updates: list[Update]


def run(folder: Path, reference: Path, case: Case) -> Answer:
    """The updates that TRL makes of the rollouts, from the weights in `folder`, in float32."""
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForImageTextToText, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rollouts, updates, prompt_ids = case.rollouts, [Update()], []
    place = {tuple(ids): index for index, ids in enumerate(rollouts.completions)}
    assert len(place) == len(rollouts.completions)

    class Recording(GRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            update = updates[-1]
            for ids, advantage in zip(inputs["completion_ids"].tolist(), inputs["advantages"].tolist(), strict=True):
                member = place[tuple(token for token in ids if token != self._tokenizer.pad_token_id)]
                update.members.append(member)
                update.advantages[member] = advantage
            update.loss += float(loss.detach())
            return loss

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            updates[-1].gradients = {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }
            updates.append(Update())

    def replay(prompts, trainer):
        prompt_ids.extend(trainer._tokenize_prompts(prompts)[0])
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": rollouts.completions,
            "logprobs": rollouts.log_probs if case.corrected else None,
        }

    def reward(values):
        return lambda completion_ids, **_: [values[place[tuple(ids)]] for ids in completion_ids]

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.config._name_or_path = str(reference)  # where TRL takes the reference policy and the processor from
    images = [[Image.open(file).convert("RGB") for file in files] for _, files in rollouts.prompts]
    with tempfile.TemporaryDirectory() as output:
        trainer = Recording(
            model,
            [reward(values) for values in rollouts.rewards],
            GRPOConfig(output, **case.options),
            Dataset.from_dict({"prompt": [messages for messages, _ in rollouts.prompts], "images": images}),
            callbacks=[Gradients()],
            rollout_func=replay,
        )
        if case.corrected:
            trainer.use_vllm, trainer._last_loaded_step = True, 0  # as if it had the weights: nothing is generated
        trainer.train()
    return Answer(prompt_ids, updates[:-1])


def main(given: str, answers: str) -> None:
    torch.set_num_threads(1)
    folder, reference, cases = pickle.loads(Path(given).read_bytes())
    Path(answers).write_bytes(pickle.dumps({name: run(folder, reference, case) for name, case in cases.items()}))
