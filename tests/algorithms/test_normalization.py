"""Weights of the loss: what is a mean over the minibatch stays one however it is cut."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.normalization import Normalization, batch_totals, sequence_weights
from megarl.algorithms.sequences import spread
from megarl.recipe import AlgorithmSection

NAMES = get_args(Normalization)


def test_by_hand():
    """8 tokens in sequences of 2, 5 and 1, the second left out: 3 tokens in 2 sequences; at most 10 tokens each."""
    lengths, kept = torch.tensor([2, 5, 1]), torch.tensor([True, False, True])
    totals = batch_totals(lengths, kept)
    assert totals.tolist() == [8, 3, 2]
    for name, expected in (
        ("token", [8 / 3, 0, 8 / 3]),
        ("sequence", [8 / (2 * 2), 0, 8 / (2 * 1)]),
        ("constant", [8 / (2 * 10), 0, 8 / (2 * 10)]),
    ):
        torch.testing.assert_close(sequence_weights(lengths, kept, totals, name, 10), torch.tensor(expected))


def test_names_of_recipes():
    assert get_args(AlgorithmSection.model_fields["normalization"].annotation) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_kept(name):
    lengths, kept = torch.tensor([2, 5]), torch.tensor([False, False])
    assert sequence_weights(lengths, kept, batch_totals(lengths, kept), name, 10).tolist() == [0, 0]


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=2, max_size=8), st.data(), st.sampled_from(NAMES))
def test_against_the_mean_itself(sequences, data, name):
    """The sum over two ranks' tokens, divided by all tokens: the mean written down sequence by sequence."""
    lengths, kept = (torch.tensor(x) for x in zip(*sequences, strict=True))
    losses = torch.randn(int(lengths.sum()), generator=torch.Generator().manual_seed(1))
    cut = data.draw(st.integers(1, len(sequences) - 1))
    parts = [slice(None, cut), slice(cut, None)]
    totals = sum(batch_totals(lengths[part], kept[part]) for part in parts)
    weights = torch.cat([sequence_weights(lengths[part], kept[part], totals, name, 12) for part in parts])
    found = (spread(weights, lengths.tolist()) * losses).sum() / lengths.sum()
    mine = [loss for loss, keep in zip(losses.split(lengths.tolist()), kept, strict=True) if keep]
    if not mine:
        expected = torch.tensor(0.0)
    elif name == "token":
        expected = torch.cat(mine).mean()
    elif name == "sequence":
        expected = torch.stack([loss.mean() for loss in mine]).mean()
    else:
        expected = torch.stack([loss.sum() / 12 for loss in mine]).mean()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
