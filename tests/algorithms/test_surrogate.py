"""The policy-gradient term: numbers by hand and gradients."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.surrogate import RatioLevel, Surrogate, beyond, cispo, clipped, log_ratio, unclipped
from megarl.recipe import AlgorithmSection

RATIO = torch.tensor([1.0, 2.0, 2.0, 0.5, 0.5, 1.2, 9.0])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, 2.0, -2.0])


def test_clipped_by_hand():
    """Bounds 0.8 and 1.3; the pessimistic one of the two products counts."""
    expected = [-1.0, -1.3, 2.0, -0.5, 0.8, -2.4, 18.0]
    torch.testing.assert_close(clipped(RATIO, ADVANTAGES, 0.2, 0.3), torch.tensor(expected))
    low, high = beyond(RATIO, ADVANTAGES, 0.2, 0.3)
    assert low.tolist() == [False, False, False, False, True, False, False]
    assert high.tolist() == [False, True, False, False, False, False, False]


def test_dual_clip_by_hand():
    """A negative advantage costs 3 times its size at most, a positive one is as before."""
    expected = [-1.0, -1.3, 2.0, -0.5, 0.8, -2.4, 6.0]
    torch.testing.assert_close(clipped(RATIO, ADVANTAGES, 0.2, 0.3, dual=3.0), torch.tensor(expected))


def test_cispo_by_hand():
    """Weights 1, 1.3, 1.3, 0.8, 0.8, 1.2, 1.3 times -A log p."""
    log_probs = torch.tensor([-0.5, -1.0, -1.0, -2.0, -2.0, -0.1, -3.0])
    expected = [0.5, 1.3, -1.3, 1.6, -1.6, 0.24, -7.8]
    torch.testing.assert_close(cispo(log_probs, RATIO, ADVANTAGES, 0.2, 0.3), torch.tensor(expected))
    open_below = cispo(log_probs, RATIO, ADVANTAGES, 1.0, 0.3)
    torch.testing.assert_close(open_below[3:5], torch.tensor([1.0, -1.0]))  # the weight is the ratio, 0.5


def test_sequence_ratio_by_hand():
    """GSPO: (2 x 0.5)^(1/2) = 1, and (4 x 2 x 1)^(1/3) = 2 at each token."""
    old = torch.log(torch.tensor([0.1, 0.4, 0.1, 0.2, 0.3]))
    new = torch.log(torch.tensor([0.2, 0.2, 0.4, 0.4, 0.3]))
    torch.testing.assert_close(log_ratio(new, old, "sequence", (2, 3)).exp(), torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0]))
    torch.testing.assert_close(log_ratio(new, old, "token", (2, 3)).exp(), torch.tensor([2.0, 0.5, 4.0, 2.0, 1.0]))


def test_names_of_recipes():
    for key, names in (("ratio", RatioLevel), ("surrogate", Surrogate)):
        assert get_args(AlgorithmSection.model_fields[key].annotation) == get_args(names)


tokens = st.lists(st.floats(-1.5, 1.5, width=32), min_size=7, max_size=7).map(lambda x: torch.tensor(x).double())


@given(tokens, tokens)
def test_gradients(shift, advantages):
    """With respect to log p: all three are -ratio A inside the bounds; beyond them PPO's is 0 (only where it would go
    further), CISPO's is of bounded weight, and the dual bound's is 0."""
    old = torch.full((7,), -2.0, dtype=torch.double)
    log_probs = (old + shift).requires_grad_()
    ratio = (log_probs - old).exp()
    low, high = beyond(ratio, advantages, 0.2, 0.3)
    capped = (advantages < 0) & (ratio > 3)
    plain = (-ratio * advantages).detach()
    bounded = -ratio.detach().clamp(0.8, 1.3) * advantages
    edge = ((ratio - 1.3).abs() < 1e-6) | ((ratio - 0.8).abs() < 1e-6) | ((ratio - 3).abs() < 1e-6)
    for loss, expected in (
        (clipped(ratio, advantages, 0.2, 0.3), plain.masked_fill(low | high, 0)),
        (clipped(ratio, advantages, 0.2, 0.3, 3.0), plain.masked_fill(low | high | capped, 0)),
        (cispo(log_probs, ratio, advantages, 0.2, 0.3), bounded),
        (unclipped(ratio, advantages), plain),
    ):
        (found,) = torch.autograd.grad(loss.sum(), log_probs, retain_graph=True)
        torch.testing.assert_close(found[~edge], expected[~edge])


@pytest.mark.parametrize("lengths", [(7,), (3, 4), (1, 5, 1)])
def test_gradient_of_a_sequence_ratio(lengths):
    """Through the mean: each token of a sequence gets s A / |y| times the |y| tokens that share it."""
    generator = torch.Generator().manual_seed(3)
    old, new = torch.randn(2, 7, generator=generator, dtype=torch.double)
    new = (old + new / 10).requires_grad_()
    advantages = torch.cat([torch.full((n,), 0.5 + i).double() for i, n in enumerate(lengths)])
    ratio = log_ratio(new, old, "sequence", lengths).exp()
    (found,) = torch.autograd.grad(unclipped(ratio, advantages).sum(), new)
    torch.testing.assert_close(found, (-ratio * advantages).detach())
