"""Advantages: numbers by hand, and what must hold for any rewards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import ADVANTAGES, constant_groups, group_mean, group_std, spread


def test_by_hand():
    """Rewards 0, 0, 1, 3: mean 1, unbiased variance (1 + 1 + 0 + 4) / 3 = 2."""
    rewards = torch.tensor([[0.0, 0.0, 1.0, 3.0], [0.5, 0.5, 0.5, 0.5]])
    torch.testing.assert_close(group_mean(rewards), torch.tensor([[-1.0, -1.0, 0.0, 2.0], [0.0] * 4]))
    expected = torch.tensor([[-1.0, -1.0, 0.0, 2.0], [0.0] * 4]) / 2**0.5
    torch.testing.assert_close(group_std(rewards), expected, atol=1e-5, rtol=1e-5)
    assert constant_groups(rewards).tolist() == [False, True]


def test_names_of_recipes():
    assert ADVANTAGES == {"group_std": group_std, "group_mean": group_mean}


def test_spread():
    assert spread(torch.tensor([1.0, -2.0, 3.0]), (2, 1, 3)).tolist() == [1.0, 1.0, -2.0, 3.0, 3.0, 3.0]


groups = (
    st.integers(2, 6)
    .flatmap(
        lambda size: st.lists(
            st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=size, max_size=size), min_size=1, max_size=5
        )
    )
    .map(torch.tensor)
)


@given(groups)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_any_rewards(name, rewards):
    """Zero mean in each group, the order of the rewards, 0 where all are equal, and no word from one group to
    another."""
    advantages = ADVANTAGES[name](rewards)
    assert advantages.shape == rewards.shape and advantages.isfinite().all()
    torch.testing.assert_close(advantages.mean(1), torch.zeros(len(rewards)), atol=1e-5, rtol=0)
    for reward, advantage in zip(rewards, advantages, strict=True):
        higher = reward[:, None] > reward
        assert (advantage[:, None] > advantage)[higher].all()
        torch.testing.assert_close(ADVANTAGES[name](reward[None])[0], advantage)
    assert (advantages[constant_groups(rewards)] == 0).all()
    assert (advantages[~constant_groups(rewards)] != 0).any(1).all()


@given(groups, st.sampled_from([0.5, 2.0, 16.0]), st.integers(-3, 3))
def test_scale_and_shift(rewards, scale, shift):
    """A shift of all rewards changes nothing; a scale, only what is not divided by the deviation."""
    moved = rewards * scale + shift
    torch.testing.assert_close(group_mean(moved), group_mean(rewards) * scale, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(group_std(moved), group_std(rewards), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1.1, 1.2])
def test_equal_rewards_that_are_not_exact_in_binary_teach_nothing(name, reward):
    """The mean of 12 times 1.1 is not 1.1 in float32; divided by the deviation it became an advantage of 0.1."""
    for size in range(2, 41):
        assert (ADVANTAGES[name](torch.full((3, size), reward)) == 0).all()
