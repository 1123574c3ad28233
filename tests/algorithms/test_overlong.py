import torch

from megarl.algorithms.overlong import overlong_penalty


def test_by_hand():
    """At most 20 tokens, the last 8 of which cost."""
    lengths = torch.tensor([1, 12, 13, 16, 20])
    torch.testing.assert_close(overlong_penalty(lengths, 20, 8), torch.tensor([0.0, 0.0, -1 / 8, -0.5, -1.0]))
    torch.testing.assert_close(overlong_penalty(lengths, 20, 20), -lengths / 20)
