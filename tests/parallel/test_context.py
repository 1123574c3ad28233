"""Parts of uneven length become whole, and gradients find the way back to who made them."""

import pytest
import torch

from tests.distributed import lazy

context = lazy("megarl.parallel.context")

COUNTS = [(3, 1), (0, 2), (4, 0)]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("summed", [False, True])
def test_gather_uneven(ranks, dim, summed):
    """Values, and the gradient of a loss that differs from rank to rank (`summed`) or is the same."""
    ranks.run(_gather, dim, summed, world_size=2, context_parallel=2)


def _gather(dim, summed):
    rank = context.group().rank()
    for counts in COUNTS:
        shape = [2, 3, 5]
        shape[dim] = sum(counts)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        weights = [torch.randn(shape, generator=torch.Generator().manual_seed(2 + r)) for r in range(2)]
        part = whole.split(counts, dim)[rank].clone().requires_grad_()
        gathered = context.gather_uneven(part, list(counts), dim, summed)
        assert torch.equal(gathered, whole)
        (gathered * weights[rank if summed else 0]).sum().backward()
        expected = (weights[0] + weights[1] if summed else weights[0]).split(counts, dim)[rank]
        torch.testing.assert_close(part.grad, expected)


def test_one_rank_gathers_nothing(ranks):
    ranks.run(_alone)


def _alone():
    values = torch.ones(2, 3)
    assert context.gather_uneven(values, [3]) is values
