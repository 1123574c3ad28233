"""The optimizer around the policy: schedule, clipping, Adam, and what data parallelism must not change."""

import math

import pytest
import torch

from tests import tiny
from tests.distributed import TP1, Layout, lazy

policies = lazy("tests.policies")
parallel_state = lazy("megatron.core.parallel_state")

DP2 = Layout(2, 1)


def supervised(row, log_probs, entropy):
    return -log_probs.sum(), torch.stack([log_probs.sum(), entropy.sum()]).detach()


def _rates(checkpoint, sequences, updates, options):
    trainer = policies.trainer(policies.policy(checkpoint).model, **options)
    return [trainer.update(policies.rows(sequences), supervised)[0].learning_rate for _ in range(updates)]


def _by_hand(schedule, update, total, warmup, peak, ratio):
    """Rate of the `update`-th update, from 1."""
    if update <= warmup:
        return peak * update / warmup
    if schedule == "constant":
        return peak
    done = min(1.0, (update - warmup) / (total - warmup))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (ratio + (1 - ratio) * left)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedule(ranks, checkpoint, prompts, schedule, warmup):
    """The warm-up's last update is made at the peak, the last update of all at the minimum, and it stays
    there."""
    options = dict(learning_rate=2e-3, schedule=schedule, warmup_steps=warmup, min_learning_rate_ratio=0.1)
    sequences = tiny.make_sequences({"text": prompts["text"]})
    (rates,) = ranks.run(_rates, checkpoint, sequences, 12, options)
    expected = [_by_hand(schedule, update, 10, warmup, 2e-3, 0.1) for update in range(1, 13)]
    assert rates == pytest.approx(expected, rel=1e-6)
    if schedule != "constant":
        assert rates[9] == pytest.approx(2e-4)
    if warmup:
        assert rates[:3] == pytest.approx([2e-3 / 3, 4e-3 / 3, 2e-3])


@pytest.mark.ranks(1)
def test_update_against_adamw(checkpoint, prompts):
    """Two updates equal torch's AdamW on the gradient of the mean loss, clipped to a global norm; biases and
    norms are not decayed."""
    clip, rate = 0.05, 1e-3
    sequences = tiny.make_sequences(prompts)
    tokens = sum(s.completion.numel() for s in sequences)
    policy = policies.policy(checkpoint)
    trainer = policies.trainer(policy.model, learning_rate=rate, clip_grad=clip, weight_decay=0.1)
    copies = {name: torch.nn.Parameter(weight) for name, weight in policies.weights(policy).items()}
    groups = [
        {"params": [p for p in copies.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in copies.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(2):
        grads = policies.gradients(policy, trainer, policies.rows(sequences), lambda row, lp, e: -lp.sum())
        for name, copy in copies.items():
            copy.grad = grads[name] / tokens
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), clip)
        adam.step()
        result, sums = trainer.update(policies.rows(sequences), supervised)
        assert result.applied and result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert result.grad_norm > 2 * clip  # it was clipped
        weights = policies.weights(policy)
        # An entry whose gradient is all rounding may go either way by a whole step: no more than a few do.
        far = sum(int(((weights[n] - copy).abs() > 1e-6).sum()) for n, copy in copies.items())
        assert far <= 20, far


@pytest.mark.ranks(1)
def test_gradients_that_are_not_finite(checkpoint, prompts):
    """The update is skipped and said so, the weights stay, and the next one works."""
    policy = policies.policy(checkpoint)
    trainer = policies.trainer(policy.model)
    rows, before = policies.rows(tiny.make_sequences(prompts)), policies.weights(policy)
    result, _ = trainer.update(rows, lambda row, lp, e: (lp.sum() * math.nan, lp.sum().detach()))
    assert not result.applied and math.isnan(result.grad_norm)
    assert all(torch.equal(weight, before[name]) for name, weight in policies.weights(policy).items())
    result, _ = trainer.update(rows, supervised)
    assert result.applied and math.isfinite(result.grad_norm)
    after = policies.weights(policy)
    assert all(weight.isfinite().all() and not torch.equal(weight, before[name]) for name, weight in after.items())


def _uneven(checkpoint, sequences, shares):
    """Two updates on this rank's share of the sequences, one a row."""
    rank = parallel_state.get_data_parallel_rank()
    mine = [sequences[i] for i in shares[rank]]
    policy = policies.policy(checkpoint)
    trainer = policies.trainer(policy.model, learning_rate=1e-3)
    norms, sums = [], []
    for _ in range(2):
        result, added = trainer.update(policies.rows(mine, 180), supervised)
        norms.append(result.grad_norm)
        sums.append(added)
    return norms, sums, policies.weights(policy)


def test_data_parallel_gradient(ranks, checkpoint, prompts):
    """Two ranks with different numbers of rows and of tokens, one of them without pictures: gradient norms and
    weights of one rank with all of it.  A mean of the ranks' means would differ."""
    sequences = tiny.make_sequences(prompts)
    names = list(prompts)
    text = [names.index(name) for name in ("text", "long_text")]
    rest = [i for i in range(len(names)) if i not in text]
    ((norms, sums, weights),) = ranks.run(_uneven, checkpoint, sequences, [[*text, *rest]], **TP1.job)
    answers = ranks.run(_uneven, checkpoint, sequences, [text, rest], **DP2.job)
    for other_norms, _, other_weights in answers:
        assert other_norms == pytest.approx(norms, rel=1e-5)
        far = sum(int(((other_weights[n] - w).abs() > 1e-6).sum()) for n, w in weights.items())
        assert far <= 20, far
    for step in range(2):
        torch.testing.assert_close(answers[0][1][step] + answers[1][1][step], sums[step], atol=1e-3, rtol=1e-5)


@pytest.mark.ranks(1)
def test_scoring_leaves_no_trace(checkpoint, prompts):
    """Scores are repeatable, ungraded, and leave the module training; a new phase starts a fresh optimizer."""
    policy = policies.policy(checkpoint)
    trainer, sequences = policies.trainer(policy.model), tiny.make_sequences(prompts)
    rows = policies.rows(sequences)
    first, second = trainer.score(rows), trainer.score(rows)
    for row, a, b in zip(rows, first, second, strict=True):
        assert torch.equal(a, b) and not a.requires_grad and a.shape == row.targets.shape
    assert policy.model.training


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature(ranks, checkpoint, prompts, reference, temperature):
    """Scores are of the tempered distribution."""
    sequences = tiny.make_sequences(prompts)
    (scores,) = ranks.run(_tempered, checkpoint, sequences, temperature)
    for sequence, score in zip(sequences, scores, strict=True):
        expected = reference.log_probs(sequence.prompt, sequence.completion, temperature)[0].detach()
        torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


def _tempered(checkpoint, sequences, temperature):
    return policies.score(policies.trainer(policies.policy(checkpoint).model, temperature), sequences)
