"""Advantages: numbers by hand, brute force, and what must hold for any rewards."""

from itertools import combinations
from statistics import mean, pstdev, stdev
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageOptions,
    advantages,
    batch_std,
    component_std,
    constant_groups,
    group_mean,
    group_std,
    leave_one_out,
    max_at_k,
)
from megarl.recipe import AlgorithmSection

OWN_BASELINE = ("group_std", "group_mean", "leave_one_out")
"""Whose group is their baseline, and nothing else."""
BY_GROUP = {"group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out}


def test_by_hand():
    """Rewards 0, 0, 1, 3: mean 1, unbiased variance (1 + 1 + 0 + 4) / 3 = 2."""
    rewards = torch.tensor([[0.0, 0.0, 1.0, 3.0], [0.5, 0.5, 0.5, 0.5]])
    torch.testing.assert_close(group_mean(rewards), torch.tensor([[-1.0, -1.0, 0.0, 2.0], [0.0] * 4]))
    expected = torch.tensor([[-1.0, -1.0, 0.0, 2.0], [0.0] * 4]) / 2**0.5
    torch.testing.assert_close(group_std(rewards), expected, atol=1e-5, rtol=1e-5)
    # 0 - 4/3, 0 - 4/3, 1 - 1, 3 - 1/3
    torch.testing.assert_close(leave_one_out(rewards), torch.tensor([[-4 / 3, -4 / 3, 0.0, 8 / 3], [0.0] * 4]))
    assert constant_groups(rewards).tolist() == [False, True]


def test_batch_by_hand():
    """Rewards 0, 0, 1, 3, 1, 1: mean 1, unbiased variance (1 + 1 + 4) / 5 = 1.2; a group of equal rewards counts."""
    found = batch_std(torch.tensor([[0.0, 0.0, 1.0], [3.0, 1.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[-1.0, -1.0, 0.0], [2.0, 0.0, 0.0]]) / 1.2**0.5)
    assert batch_std(torch.full((3, 7), 0.1)).tolist() == [[0.0] * 7] * 3


def test_pass_at_2_by_hand():
    """Of 4 rollouts one is right: a pair with it is right and would not be without it.  Of two right ones, each is
    needed only beside a wrong one: 2 of 3 partners."""
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0], [1.0] * 4])
    expected = torch.tensor([[0.0, 2.0, 0.0, 0.0], [4 / 3, 0.0, 0.0, 4 / 3], [0.0] * 4])
    torch.testing.assert_close(max_at_k(rewards, 2), expected)


def test_components_by_hand():
    """A component counts as much whatever its spread: rewards (0, 0), (0, 0.1), (10, 0), (10, 0.1)."""
    rewards = torch.tensor([[[0.0, 0.0], [0.0, 0.1], [10.0, 0.0], [10.0, 0.1]]])
    found = component_std(rewards)
    torch.testing.assert_close(found[0, 1:3], torch.zeros(2), atol=1e-4, rtol=0)
    assert float(found[0, 3]) == pytest.approx(-float(found[0, 0])) and found[0, 3] > 1
    summed = advantages(rewards, AdvantageOptions("group_std"))
    assert summed[0, 1] < -0.8 < 0.8 < summed[0, 2]  # as a sum the small one hardly shows


def test_names_of_recipes():
    assert ADVANTAGES == get_args(AlgorithmSection.model_fields["advantage"].annotation)
    with pytest.raises(ValueError, match="gae"):
        advantages(torch.zeros(1, 2, 1), AdvantageOptions("gae"))


@st.composite
def groups_of(draw, components=1):
    shape = draw(st.integers(1, 5)), draw(st.integers(2, 6)), components
    count = shape[0] * shape[1] * components
    values = draw(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=count, max_size=count))
    return torch.tensor(values).view(shape)


groups = groups_of().map(lambda rewards: rewards[..., 0])


def _independent(rewards: list[list[list[float]]], name: str, k: int) -> list[list[float]]:
    """The same in plain Python, from the definitions."""
    summed = [[sum(one) for one in group] for group in rewards]

    def normalised(values, epsilon=1e-6):
        centre = mean(values)
        return [(v - centre) / (stdev(values) + epsilon) for v in values]

    def over_batch(values, epsilon=1e-6):
        flat = iter(normalised([v for group in values for v in group], epsilon))
        return [[next(flat) for _ in group] for group in values]

    match name:
        case "group_std":
            return [normalised(group) for group in summed]
        case "group_mean":
            return [[r - mean(group) for r in group] for group in summed]
        case "leave_one_out":
            return [[r - mean(g[:i] + g[i + 1 :]) for i, r in enumerate(g)] for g in summed]
        case "batch_std":
            return over_batch(summed)
        case "group_mean_batch_std":
            return over_batch([[r - mean(group) for r in group] for group in summed])
        case "component_std":
            apart = [[normalised(list(part)) for part in zip(*group, strict=True)] for group in rewards]
            return over_batch([[sum(parts) for parts in zip(*group, strict=True)] for group in apart], 1e-4)
        case "max_at_k":
            return [
                [
                    k * mean(max(0, r - max(some)) for some in combinations(group[:i] + group[i + 1 :], k - 1))
                    for i, r in enumerate(group)
                ]
                for group in summed
            ]


@given(groups_of(components=2), st.data())
@pytest.mark.parametrize("name", ADVANTAGES)
def test_against_plain_python(name, rewards, data):
    k = data.draw(st.integers(2, rewards.shape[1])) if name == "max_at_k" else None
    found = advantages(rewards, AdvantageOptions(name, k))
    expected = torch.tensor(_independent(rewards.tolist(), name, k), dtype=torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_max_at_k_is_the_gradient_of_the_expected_maximum():
    """Of a policy over four answers, by enumeration: E[max of k] differentiated, against the estimator's mean over all
    draws of n, each log-probability's gradient weighed by its advantage / n."""
    answers, n, k = torch.tensor([0.0, 0.3, 0.3, 1.0], dtype=torch.double), 4, 2
    logits = torch.tensor([0.4, -0.2, 0.1, -0.5], dtype=torch.double, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    expected_maximum = (log_probs[pairs].sum(1).exp() * answers[pairs].max(1).values).sum()
    (expected,) = torch.autograd.grad(expected_maximum, logits, retain_graph=True)
    draws = torch.cartesian_prod(*[torch.arange(4)] * n)
    weights = max_at_k(answers[draws], k) / n
    surrogate = (log_probs[draws].sum(1).exp().detach() * (weights * log_probs[draws]).sum(1)).sum()
    (found,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(found, expected)


@given(groups)
@pytest.mark.parametrize("name", OWN_BASELINE)
def test_any_rewards(name, rewards):
    """Zero mean in each group, the order of the rewards, 0 where all are equal, and no word from one group to
    another."""
    found = BY_GROUP[name](rewards)
    assert found.shape == rewards.shape and found.isfinite().all()
    torch.testing.assert_close(found.mean(1), torch.zeros(len(rewards)), atol=1e-5, rtol=0)
    for reward, advantage in zip(rewards, found, strict=True):
        higher = reward[:, None] > reward
        assert (advantage[:, None] > advantage)[higher].all()
        torch.testing.assert_close(BY_GROUP[name](reward[None])[0], advantage)
    assert (found[constant_groups(rewards)] == 0).all()
    assert (found[~constant_groups(rewards)] != 0).any(1).all()


@given(groups_of(components=2), st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_samples_does_not_matter(name, rewards, random):
    options = AdvantageOptions(name, 2 if name == "max_at_k" else None)
    inside, between = list(range(rewards.shape[1])), list(range(rewards.shape[0]))
    random.shuffle(inside)
    random.shuffle(between)
    found = advantages(rewards[between][:, inside], options)
    torch.testing.assert_close(found, advantages(rewards, options)[between][:, inside], atol=1e-4, rtol=1e-4)


@given(groups, st.sampled_from([0.5, 2.0, 16.0]), st.integers(-3, 3))
def test_scale_and_shift(rewards, scale, shift):
    """A shift of all rewards changes nothing; a scale, only what is not divided by the deviation."""
    moved = rewards * scale + shift
    torch.testing.assert_close(group_mean(moved), group_mean(rewards) * scale, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(group_std(moved), group_std(rewards), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch_std(moved), batch_std(rewards), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1.1, 1.2])
def test_equal_rewards_that_are_not_exact_in_binary_teach_nothing(name, reward):
    """The mean of 12 times 1.1 is not 1.1 in float32; divided by the deviation it became an advantage of 0.1."""
    options = AdvantageOptions(name, 2 if name == "max_at_k" else None)
    for size in range(2, 41):
        assert (advantages(torch.full((3, size, 1), reward), options) == 0).all()


@given(groups_of(components=2))
@pytest.mark.parametrize("name", ["batch_std", "group_mean_batch_std", "component_std"])
def test_batch_statistics_are_of_all_ranks(name, rewards):
    """Half of the batch, beside a rank that has the same half again: the statistics of both."""
    options = AdvantageOptions(name)
    twice = advantages(torch.cat([rewards, rewards]), options)[: len(rewards)]
    found = advantages(rewards, options, lambda values: values.double() * 2)
    torch.testing.assert_close(found, twice, atol=1e-5, rtol=1e-5)
    assert pstdev(twice.flatten().tolist()) < 1.01


# Rollouts of which no reward is known


def _options(name: str) -> AdvantageOptions:
    return AdvantageOptions(name, 2 if name == "max_at_k" else None)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_is_those_that_were_judged(name):
    """As if the others had not been sampled, whatever their reward would be."""
    rewards = torch.tensor(
        [[[0.0, 0.1], [9.0, 9.0], [1.0, 0.0], [3.0, 0.2]], [[1.0, 0.0], [0.5, 0.1], [-9.0, 9.0], [2.0, 0.0]]]
    )
    judged = torch.tensor([[True, False, True, True], [True, True, False, True]])
    found = advantages(rewards, _options(name), judged=judged)
    assert torch.equal(found[judged].view(2, 3), advantages(rewards[judged].view(2, 3, 2), _options(name)))
    assert found[~judged].tolist() == [0, 0]
    assert found.abs().sum() > 0


@pytest.mark.parametrize("name", ["group_std", "group_mean", "leave_one_out", "max_at_k"])
def test_groups_of_several_sizes(name):
    """Each is its own baseline; one that is left alone, and one that is empty, teach nothing."""
    rewards = torch.tensor([[0.0, 1.0, 3.0], [1.0, 0.0, 5.0], [7.0, 1.0, 1.0], [1.0, 2.0, 3.0]])[..., None]
    judged = torch.tensor([[True] * 3, [True, True, False], [True, False, False], [False] * 3])
    found = advantages(rewards, _options(name), judged=judged)
    assert torch.equal(found[:1], advantages(rewards[:1], _options(name)))
    assert torch.equal(found[1:2, :2], advantages(rewards[1:2, :2], _options(name)))
    assert found[1, 2] == 0 and found[2:].abs().sum() == 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_none_that_was_judged(name):
    found = advantages(torch.ones(2, 3, 2), _options(name), judged=torch.zeros(2, 3, dtype=torch.bool))
    assert found.dtype == torch.float32
    assert found.tolist() == [[0] * 3] * 2


def test_fewer_than_the_best_are_chosen_among():
    rewards, judged = torch.tensor([[1.0, 0.0, 0.0, 0.0]])[..., None], torch.tensor([[True, True, False, False]])
    assert advantages(rewards, AdvantageOptions("max_at_k", 3), judged=judged).abs().sum() == 0


def test_constant_among_those_that_were_judged():
    rewards = torch.tensor([[5.0, 1.0, 1.0], [5.0, 1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    judged = torch.tensor([[False, True, True], [False, True, True], [False, True, False], [False] * 3])
    assert constant_groups(rewards, judged).tolist() == [True, False, True, True]
