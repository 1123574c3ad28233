"""Estimates of the KL divergence: by hand, and against the divergence and its gradient on small vocabularies."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.kl import ESTIMATORS, k1, k2, k3
from megarl.recipe import AlgorithmSection

log_probs = st.lists(st.floats(-4, -0.015625, width=32), min_size=12, max_size=12).map(torch.tensor)


def test_by_hand():
    """d = log policy - log reference = -ln 2, ln 2, 0."""
    policy, reference = torch.log(torch.tensor([0.25, 0.5, 0.3])), torch.log(torch.tensor([0.5, 0.25, 0.3]))
    ln2 = math.log(2)
    for estimator, expected in ((k1, [-ln2, ln2, 0]), (k2, [ln2**2 / 2] * 2 + [0]), (k3, [1 - ln2, ln2 - 0.5, 0])):
        torch.testing.assert_close(estimator(policy, reference), torch.tensor(expected), atol=1e-6, rtol=0)


def test_names_of_recipes():
    assert tuple(ESTIMATORS) == get_args(AlgorithmSection.model_fields["kl_estimator"].annotation)


@given(log_probs, log_probs)
def test_k2_and_k3_are_not_negative(policy, reference):
    for estimator in (k2, k3):
        assert (estimator(policy, reference) >= -1e-6).all()
    for estimator in ESTIMATORS.values():
        assert (estimator(policy, policy) == 0).all()


@pytest.fixture
def distributions():
    generator = torch.Generator().manual_seed(1)
    policy, reference = torch.randn(2, 9, generator=generator, dtype=torch.double)
    return policy.requires_grad_(), reference.log_softmax(-1)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(distributions, estimator):
    """The expectation under the policy is the KL divergence, exactly."""
    policy, reference = distributions[0].log_softmax(-1), distributions[1]
    divergence = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), divergence)


def test_gradients_as_terms_of_the_loss(distributions):
    """Expected over the policy's own samples: k1's is 0, k2's is the divergence's own."""
    logits, reference = distributions
    policy = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    found = {}
    for name, estimator in ESTIMATORS.items():
        expected = (policy.detach().exp() * estimator(policy, reference)).sum()
        (found[name],) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(found["k1"], torch.zeros_like(logits), atol=1e-12, rtol=0)
    torch.testing.assert_close(found["k2"], true)
    assert (found["k3"] - true).abs().max() > 1e-3  # k3's is that of the divergence the other way round
