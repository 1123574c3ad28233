"""Losses and gradients against TRL's GRPOTrainer: the same weights, rollouts, rewards and coefficients.

TRL is given the rollouts in place of generating; everything from the rewards to the gradients is its own code.  `PAIRS`
says what TRL's options are in megarl's words, docs/objectives.md what was measured.
"""

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.packing.rows import TokenSequence
from tests import tiny
from tests.commands import ROOT
from tests.distributed import lazy
from tests.training.trl_peer import Answer, Case, Rollouts

policies = lazy("tests.policies")
build = lazy("megarl.models.build")
grpo = lazy("megarl.training.grpo")
credits = lazy("megarl.training.credit")
advantages = lazy("megarl.algorithms.advantages")
corrections = lazy("megarl.algorithms.corrections")
objective = lazy("megarl.algorithms.objective")
reference_policy = lazy("megarl.training.reference")
verify = lazy("megarl.verify.gradients")

PROMPTS = "text", "image", "images", "other_image"
GROUP, EPOCHS, LONGEST, TEMPERATURE, STOP = 3, 2, 12, 0.7, 2
RATE, ADAM_EPS = 0.02, 1.0
"""An epsilon that makes updates smooth in the gradients: Adam's own turn rounding into whole steps where a gradient is
almost 0, and what follows would differ."""
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5
"""Of all parameters together: the difference's norm over the gradient's."""


@dataclass(frozen=True)
class Pair:
    """An objective in the words of both."""

    trl: dict
    objective: dict = field(default_factory=dict)
    step: dict = field(default_factory=dict)
    """`token` normalization unless it says otherwise."""
    advantage: str = "group_std"
    correction: dict = field(default_factory=dict)
    reward_scale: float = 1.0
    minibatches: int = 1
    accumulated: int = 1
    """TRL's microbatches in an update; megarl packs rows."""
    components: int = 1
    """Of the reward."""
    filtered: bool = False
    """Answers that no stop token ended are left out."""
    clips: bool = False
    """The bounds have to be at work."""


def corrected(mode: str, **bounds) -> dict:
    return {"loss_type": "dapo", "vllm_importance_sampling_mode": mode} | {
        f"vllm_importance_sampling_clip_{end}": bounds.get(end) for end in ("min", "max")
    }


PAIRS = {
    "GRPO": Pair(
        {"loss_type": "grpo", "beta": 0.3}, {"kl_coefficient": 0.3}, {"normalization": "sequence"}, minibatches=2
    ),
    "GRPO, accumulated": Pair({"loss_type": "grpo"}, {}, {"normalization": "sequence"}, accumulated=3, clips=True),
    # No standard deviation in its advantages, so rewards between 0 and 1.
    "Dr. GRPO": Pair(
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {},
        {"normalization": "constant", "max_new_tokens": LONGEST},
        "group_mean",
        reward_scale=1e-3,
        minibatches=2,
    ),
    # TRL divides by the tokens of all minibatches over their number, so one minibatch; likewise CISPO.
    "DAPO": Pair({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}, accumulated=2, clips=True),
    # Each of TRL's microbatches is divided by its own tokens, so one in an update.
    "BNPO": Pair({"loss_type": "bnpo", "beta": 0.1}, {"kl_coefficient": 0.1}, minibatches=2),
    # epsilon_high is the bound itself here, and there is none below.
    "CISPO": Pair(
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
        accumulated=2,
        clips=True,
    ),
    "GSPO": Pair(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
        {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.2},
        {"normalization": "sequence"},
        minibatches=2,
        clips=True,
    ),
    # A mean over tokens in TRL, whatever the loss: under `token` normalization alone is it megarl's.
    "entropy": Pair({"loss_type": "bnpo", "entropy_coef": 0.1}, {"entropy_coefficient": 0.1}, minibatches=2),
    # In the mean over tokens; TRL's mean over completions counts those that it leaves out.
    "truncated are left out": Pair({"loss_type": "dapo", "mask_truncated_completions": True}, filtered=True),
    "GDPO": Pair(
        {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
        advantage="component_std",
        components=2,
    ),
    "TIS": Pair(corrected("token_truncate", max=1.2), correction={"level": "token", "high": 1.2}),
    "IcePop": Pair(
        corrected("token_mask", min=0.8, max=1.2),
        correction={"level": "token", "bound": "mask", "low": 0.8, "high": 1.2},
    ),
    "TIS, sequence": Pair(corrected("sequence_truncate", max=1.2), correction={"level": "sequence", "high": 1.2}),
    "MIS": Pair(
        corrected("sequence_mask", min=0.5, max=1.5) | {"beta": 0.1},
        {"kl_coefficient": 0.1},
        correction={"level": "sequence", "bound": "mask", "low": 0.5, "high": 1.5},
    ),
}


@dataclass(frozen=True)
class Batch:
    sequences: list
    """Groups one after another, of different lengths and without media or padding tokens."""
    log_probs: list[torch.Tensor]
    """The engine's: near the trainer's, and different enough for either bound of a correction."""
    rewards: torch.Tensor
    """`[2, samples]`, thousands: beside their standard deviation TRL's 1e-4 and megarl's 1e-6 are both nothing.  The
    rewards of the last group are equal."""


@pytest.fixture(scope="module")
def reference_checkpoint(checkpoint, tmp_path_factory):
    """Other weights than the policy's, so that the divergence is at work from the first update."""
    folder = tmp_path_factory.mktemp("trl") / "reference"
    shutil.copytree(checkpoint, folder)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    for name in sorted(weights):
        weights[name] = weights[name] * (1 + 0.05 * torch.randn(weights[name].shape, generator=generator))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def batch(ranks, checkpoint, prompts):
    generator = torch.Generator().manual_seed(8)
    sequences = []
    for place, name in enumerate(PROMPTS):
        for index in range(GROUP):
            words = torch.randint(8, 100, (2 + (5 * place + 2 * index) % (LONGEST - 2),), generator=generator)
            end = torch.tensor([STOP] if (place + index) % 3 else [], dtype=torch.int64)
            sequences.append(TokenSequence(prompts[name], torch.cat([words, end])))
    (scores,) = ranks.run(_scores, checkpoint, sequences)
    noise = [0.25 * torch.randn(len(score), generator=generator) for score in scores]
    rewards = 1000 * torch.rand(2, len(sequences), generator=generator)
    rewards[:, -GROUP:] = 512
    return Batch(sequences, [score + away for score, away in zip(scores, noise, strict=True)], rewards)


def _scores(checkpoint, sequences):
    return policies.score(policies.trainer(policies.policy(checkpoint).model, TEMPERATURE), sequences)


@pytest.fixture(scope="module")
def answers(checkpoint, reference_checkpoint, batch, tmp_path_factory) -> dict[str, Answer]:
    """TRL's, by name."""
    folder = tmp_path_factory.mktemp("trl")
    cases = {
        name: Case(_rollouts(batch, pair), _trl_options(pair), bool(pair.correction)) for name, pair in PAIRS.items()
    }
    (folder / "in").write_bytes(pickle.dumps((checkpoint, reference_checkpoint, cases)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    call = f"from tests.training import trl_peer; trl_peer.main({str(folder / 'in')!r}, {str(folder / 'out')!r})"
    command = [sys.executable, "-c", call]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "out").read_bytes())


def _rollouts(batch: Batch, pair: Pair) -> Rollouts:
    prompts = []
    for sequence in batch.sequences[::GROUP]:
        (message,) = sequence.prompt.prompt.messages
        content = [part if part["type"] == "text" else {"type": "image"} for part in message["content"]]
        files = [part["image"].path for part in message["content"] if part["type"] == "image"]
        prompts.append(([{"role": "user", "content": content}], files))
    return Rollouts(
        prompts,
        [sequence.completion.tolist() for sequence in batch.sequences],
        (pair.reward_scale * batch.rewards[: pair.components]).tolist(),
        [values.tolist() for values in batch.log_probs],
    )


def _trl_options(pair: Pair) -> dict:
    updates = EPOCHS * pair.minibatches
    return dict(
        num_generations=GROUP,
        per_device_train_batch_size=len(PROMPTS) * GROUP // (pair.minibatches * pair.accumulated),
        gradient_accumulation_steps=pair.accumulated,
        steps_per_generation=pair.minibatches * pair.accumulated,
        num_iterations=EPOCHS,
        max_steps=updates,
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=ADAM_EPS,
        weight_decay=0.0,
        max_grad_norm=0.0,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_bias_correction_kl=False,  # by default TRL's divergence is weighted by the ratio
        **pair.trl,
    )


def _updates(checkpoint, reference_checkpoint, batch, pair, order):
    """Advantages by sample, (loss, gradients by name) of each update, and the metrics of all.

    `order` are the samples as TRL dealt them out to its minibatches, which are not of whole groups."""
    policy = policies.policy(checkpoint)
    trainer = policies.trainer(
        policy.model, TEMPERATURE, learning_rate=RATE, weight_decay=0.0, clip_grad=0.0, adam_eps=ADAM_EPS
    )
    kept = None
    if "kl_coefficient" in pair.objective:
        fill = partial(build.fill, policy, reference_checkpoint)
        kept = reference_policy.ReferencePolicy.filled(policy.model, fill)
    update, made = trainer.update, []

    def recorded(rows, loss, twin=None):
        found = {name: tensor.clone() for name, tensor in verify.named_gradients(policy, trainer, rows, loss)}
        result, sums = update(rows, loss, twin)
        made.append((float(sums[0]) / sum(row.targets.numel() for row in rows), found))
        return result, sums

    trainer.update = recorded
    credit_options = credits.CreditOptions(
        GROUP, advantages.AdvantageOptions(pair.advantage), corrections.CorrectionOptions(**pair.correction)
    )
    settings = dict(tokens_per_row=200, old_log_probs="trainer", epochs=EPOCHS, minibatches=pair.minibatches)
    step = grpo.PolicyStep(
        trainer,
        kept,
        grpo.StepOptions(objective.ObjectiveOptions(**pair.objective), credit_options, **settings, **pair.step),
        tiny.MERGE,
    )
    samples = [
        credits.Sample(
            sequence,
            log_probs,
            tuple((pair.reward_scale * rewards[: pair.components]).tolist()),
            trainable=not pair.filtered or int(sequence.completion[-1]) == STOP,
        )
        for sequence, log_probs, rewards in zip(batch.sequences, batch.log_probs, batch.rewards.T, strict=True)
    ]
    scored = step.score(samples)
    credit = step.credit(samples, scored)
    given = credit.advantages.tolist()

    def dealt(values):
        return None if values is None else [values[index] for index in order]

    scored = replace(scored, trainer=dealt(scored.trainer), reference=dealt(scored.reference))
    credit = replace(
        credit,
        advantages=credit.advantages[order],
        corrections=dealt(credit.corrections),
        kept=credit.kept[order],
    )
    return given, made, step.update(dealt(samples), scored, credit)


@pytest.mark.parametrize("name", PAIRS)
def test_same_updates(ranks, checkpoint, reference_checkpoint, batch, answers, name):
    """Two epochs, so that the later updates have a ratio, and begin where the earlier ones of both have led."""
    pair, theirs = PAIRS[name], answers[name].updates
    order = [member for update in theirs[: pair.minibatches] for member in update.members]
    assert sorted(order) == list(range(len(batch.sequences)))
    ((given, ours, metrics),) = ranks.run(_updates, checkpoint, reference_checkpoint, batch, pair, order)
    assert len(ours) == len(theirs) == EPOCHS * pair.minibatches
    losses, gradients = [], []
    for (loss, found), update in zip(ours, theirs, strict=True):
        for member, advantage in update.advantages.items():
            assert given[member] == pytest.approx(advantage, rel=1e-6, abs=1e-6)
        losses.append(abs(loss - update.loss))
        gradients.append(_difference(found, update.gradients))
    print(f"{name}: loss {max(losses):.1e}, gradient {max(gradients):.1e}")  # pytest -s, for docs/objectives.md
    assert max(losses) < LOSS_TOLERANCE, losses
    assert max(gradients) < GRADIENT_TOLERANCE, gradients
    if pair.clips:
        assert metrics["policy/clip_fraction"] > 0.02
    if pair.correction:
        assert 0.1 < metrics["mismatch/bounded"] < 0.9
    assert (metrics["policy/left_out"] > 0) == pair.filtered
    assert (metrics["policy/kl"] > 0.01) == ("kl_coefficient" in pair.objective)


def _difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all parameters together."""
    assert found.keys() == expected.keys()
    away = torch.stack([(found[name] - grad).norm() for name, grad in expected.items()]).norm()
    return float(away / torch.stack([grad.norm() for grad in expected.values()]).norm())


def test_prompts_are_tokenised_alike(batch, answers):
    for answer in answers.values():
        assert answer.prompt_ids == [sequence.prompt.ids.tolist() for sequence in batch.sequences]
