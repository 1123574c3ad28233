"""The objective: numbers by hand, the same token by token in plain Python, and what must hold for any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.objective import METRICS, ObjectiveInputs, ObjectiveOptions, cross_entropy, objective


def test_objective_by_hand():
    """Two tokens.  Ratios 2 (clipped at 1.2, A = 1) and 1/2 (A = 2, not clipped: the product is smaller)."""
    inputs = ObjectiveInputs(
        log_probs=torch.log(torch.tensor([0.5, 0.2])),
        entropy=torch.tensor([1.0, 3.0]),
        old_log_probs=torch.log(torch.tensor([0.25, 0.4])),
        advantages=torch.tensor([1.0, 2.0]),
        lengths=(2,),
        reference_log_probs=torch.log(torch.tensor([0.25, 0.2])),
    )
    kl = 0.5 + math.log(2) - 1
    loss, sums = objective(inputs, ObjectiveOptions(0.2, 0.2, kl_coefficient=0.5, entropy_coefficient=0.1))
    expected = (-1.2 - 1.0) + 0.5 * kl - 0.1 * 4.0
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert dict(zip(METRICS, sums.tolist(), strict=True)) == pytest.approx(
        {
            "policy/loss": expected,
            "policy/ratio": 2.5,
            "policy/ratio_deviation": 1.25,
            "policy/clip_fraction": 1,
            "policy/clip_fraction_low": 0,
            "policy/clip_fraction_high": 1,
            "policy/entropy": 4,
            "policy/kl": kl,
            "policy/update_kl": (2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)),
            "policy/perception_kl": 0,
        }
    )


def test_corrections_are_of_the_policy_gradient_and_weights_of_all():
    inputs = ObjectiveInputs(
        log_probs=torch.zeros(2),
        entropy=torch.ones(2),
        old_log_probs=torch.zeros(2),
        advantages=torch.tensor([1.0, 2.0]),
        lengths=(1, 1),
        corrections=torch.tensor([0.5, 0.0]),
        weights=torch.tensor([3.0, 7.0]),
    )
    loss, _ = objective(inputs, ObjectiveOptions(entropy_coefficient=0.1))
    assert float(loss) == pytest.approx(3 * (-0.5 - 0.1) + 7 * (0 - 0.1))


def test_cross_entropy():
    assert float(cross_entropy(torch.log(torch.tensor([0.5, 0.25])))) == pytest.approx(math.log(8))


def tokens(low, high):
    return st.lists(st.floats(low, high, width=32), min_size=12, max_size=12).map(torch.tensor)


log_probs = tokens(-4, -0.015625)
LENGTHS = (3, 1, 6, 2)
VARIANTS = [
    ObjectiveOptions(0.2, 0.3, 0.4, 0.1),
    ObjectiveOptions(0.2, 0.3, 0.4, 0.1, dual_clip=1.5, kl_estimator="k1"),
    ObjectiveOptions(0.2, 0.3, 0.0, 0.1, ratio="sequence"),
    ObjectiveOptions(1.0, 0.3, 0.2, 0.0, surrogate="cispo", kl_estimator="k2"),
    ObjectiveOptions(0.1, 0.1, ratio="sequence", surrogate="cispo"),
    ObjectiveOptions(0.2, 0.3, surrogate="unclipped"),
]


def _plain(policy, entropy, old, advantages, kept, corrections, weights, o: ObjectiveOptions) -> float:
    """The loss, token by token."""
    total, start = 0.0, 0
    for n in LENGTHS:
        here = range(start, start + n)
        start += n
        mean = sum(policy[t] - old[t] for t in here) / n
        for t in here:
            ratio = math.exp(mean if o.ratio == "sequence" else policy[t] - old[t])
            held = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
            if o.surrogate == "clipped":
                gain = min(ratio * advantages[t], held * advantages[t])
                if o.dual_clip and advantages[t] < 0:
                    gain = max(gain, o.dual_clip * advantages[t])
            else:
                gain = held * advantages[t] * policy[t] if o.surrogate == "cispo" else ratio * advantages[t]
            d = policy[t] - kept[t]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[o.kl_estimator]
            loss = -gain * corrections[t] + o.kl_coefficient * kl - o.entropy_coefficient * entropy[t]
            total += weights[t] * loss
    return total


@given(log_probs, tokens(0, 3), log_probs, tokens(-2, 2), log_probs, tokens(0, 2), tokens(0, 2))
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_against_plain_python(options, policy, entropy, old, advantages, kept, corrections, weights):
    inputs = ObjectiveInputs(policy, entropy, old, advantages, LENGTHS, kept, corrections, weights)
    found, _ = objective(inputs, options)
    plain = _plain(*(x.tolist() for x in (policy, entropy, old, advantages, kept, corrections, weights)), options)
    assert float(found) == pytest.approx(plain, rel=1e-4, abs=1e-3)


@given(log_probs, tokens(-2, 2), st.integers(1, 3))
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_sums_add_up(options, policy, advantages, cut):
    """A batch cut between any sequences gives the same sums, so that rows and ranks do not matter."""

    def part(sequences):
        start, end = sum(LENGTHS[: sequences.start]), sum(LENGTHS[: sequences.stop])
        mine = policy[start:end]
        lengths = LENGTHS[sequences.start : sequences.stop]
        old = torch.full_like(mine, -1.0)
        return objective(ObjectiveInputs(mine, -mine, old, advantages[start:end], lengths, mine * 0.5), options)

    whole, first, second = part(range(4)), part(range(cut)), part(range(cut, 4))
    torch.testing.assert_close(first[0] + second[0], whole[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(first[1] + second[1], whole[1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("options", [v for v in VARIANTS if v.surrogate != "cispo"], ids=str)
def test_gradient_in_double(options):
    """CISPO's weight has no gradient on purpose: its own test is in test_surrogate.py."""
    generator = torch.Generator().manual_seed(2)
    policy, old, kept, entropy, advantages = torch.randn(5, 12, generator=generator, dtype=torch.double)

    def function(p, e):
        return objective(ObjectiveInputs(p, e, old, advantages, LENGTHS, kept), options)[0]

    assert torch.autograd.gradcheck(function, (policy.requires_grad_(), entropy.requires_grad_()))
