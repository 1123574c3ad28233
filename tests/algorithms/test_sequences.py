import torch

from megarl.algorithms.sequences import sequence_means, sequence_sums, spread


def test_by_hand():
    values = torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0, 0.0])
    assert spread(torch.tensor([1.0, -2.0, 3.0]), (2, 1, 3)).tolist() == [1.0, 1.0, -2.0, 3.0, 3.0, 3.0]
    assert sequence_sums(values, (2, 1, 3)).tolist() == [3.0, 3.0, 12.0]
    assert sequence_means(values, (2, 1, 3)).tolist() == [1.5, 3.0, 4.0]


def test_gradients():
    values = torch.randn(6, dtype=torch.double, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for function in (sequence_sums, sequence_means):
        assert torch.autograd.gradcheck(lambda v, function=function: function(v, [2, 1, 3]), values)
