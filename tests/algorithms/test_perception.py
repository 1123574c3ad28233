import math

import pytest
import torch

from megarl.algorithms.objective import ObjectiveInputs, ObjectiveOptions, objective
from megarl.algorithms.perception import PerceptionInputs, PerceptionOptions, perception_loss
from megarl.recipe import PerceptionSection

OPTIONS = PerceptionOptions(0.5, 0.6, entropy_coefficient=0.1, masked_entropy_coefficient=0.2)


def test_by_hand():
    """Twice as likely with the picture; as likely; a prompt without media, of which nothing is asked."""
    log_probs = torch.log(torch.tensor([0.5, 0.3, 0.5]))
    masked = torch.log(torch.tensor([0.25, 0.3, 0.1]))
    inputs = PerceptionInputs(masked, torch.tensor([2.0, 3.0, 4.0]), torch.tensor([True, True, False]))
    found = perception_loss(log_probs, torch.ones(3), inputs, OPTIONS)
    divergence = 0.5 + math.log(2) - 1
    torch.testing.assert_close(found, torch.tensor([0.1 + 0.4 - 0.5 * divergence, 0.1 + 0.6, 0.0]))


def test_in_the_objective():
    """Beside the policy gradient, weighed like it, and not corrected."""
    log_probs, entropy, masked = torch.tensor([[-1.0, -2.0], [0.5, 0.7], [-1.5, -1.8]])
    inputs = PerceptionInputs(masked, entropy * 2, torch.tensor([True, False]))
    rest = dict(old_log_probs=log_probs, advantages=torch.tensor([1.0, -1.0]), lengths=(1, 1))
    weights, corrections = torch.tensor([2.0, 3.0]), torch.tensor([0.5, 0.5])
    with_term, sums = objective(
        ObjectiveInputs(log_probs, entropy, **rest, corrections=corrections, weights=weights, perception=inputs),
        ObjectiveOptions(perception=OPTIONS),
    )
    without, _ = objective(
        ObjectiveInputs(log_probs, entropy, **rest, corrections=corrections, weights=weights), ObjectiveOptions()
    )
    added = (perception_loss(log_probs, entropy, inputs, OPTIONS) * weights).sum()
    torch.testing.assert_close(with_term, without + added)
    assert float(sums[-1]) > 0


def test_gradient_in_double():
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double).requires_grad_()
    sees = torch.tensor([True, True, False, True, False, True])

    def function(values):
        return perception_loss(values[0], values[1], PerceptionInputs(values[2], values[3], sees), OPTIONS)

    assert torch.autograd.gradcheck(function, values)
    (gradient,) = torch.autograd.grad(function(values).sum(), values)
    assert (gradient[:, sees] != 0).all() and (gradient[:, ~sees] == 0).all()


def test_one_default_twice():
    assert PerceptionSection().model_dump() == pytest.approx(vars(PerceptionOptions()))
