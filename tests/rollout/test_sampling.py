"""Drawing tokens: uniform numbers, filters, draws.  No engine."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.distributed import lazy

sampling = lazy("megarl.rollout.sampling")
pytestmark = pytest.mark.ranks(1)


def options(**values):
    return sampling.SamplingOptions(4, (2,), **values)


def test_uniform_against_splitmix64():
    """The finaliser twice over, written down again with Python's integers."""
    mask = 2**64 - 1

    def by_hand(key, place):
        z = (key * 0x9E3779B97F4A7C15 + place) & mask
        for _ in range(2):
            z = (z + 0x9E3779B97F4A7C15) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            z ^= z >> 31
        return (z >> 11) / 2**53

    keys, places = [0, 1, 2**63 - 1, 2**64 - 1], [0, 5, 77, 2**31]
    found = sampling.uniform(torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64)), torch.tensor(places))
    assert found.dtype == torch.float64
    assert found.tolist() == [by_hand(*pair) for pair in zip(keys, places, strict=True)]


@pytest.mark.parametrize("which", ["keys", "places", "groups", "high bits"])
def test_uniform_is_uniform(which):
    """Over keys, over places, over the rollouts of groups and over keys that differ in their upper half: flat,
    and neighbours are independent.  Another interval is told apart."""
    n = torch.arange(20000)
    groups = sampling.group_keys(torch.arange(1250), 16)
    keys = {"keys": n, "places": n * 0 + 9, "groups": groups, "high bits": n << 44}[which]
    places = n if which == "places" else n * 0 + 31
    u = sampling.uniform(keys, places).numpy()
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.kstest(u * 0.97, "uniform").pvalue < 1e-3
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    assert len(np.unique(u)) == 20000


def test_filters_by_hand():
    """Probabilities 0.5, 0.25, 0.125, 0.125."""
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.125, 0.125]]))

    def kept(**values):
        return sampling.filtered_log_probs(logits, options(**values)).exp()[0].tolist()

    assert kept() == pytest.approx([0.25, 0.5, 0.125, 0.125])
    assert kept(top_k=1) == pytest.approx([0, 1, 0, 0])
    assert kept(top_k=2) == pytest.approx([1 / 3, 2 / 3, 0, 0])
    assert kept(top_p=0.4) == pytest.approx([0, 1, 0, 0])
    assert kept(top_p=0.6) == pytest.approx([1 / 3, 2 / 3, 0, 0])
    assert kept(temperature=0.5) == pytest.approx([4 / 22, 16 / 22, 1 / 22, 1 / 22])
    assert kept(temperature=0.0) == kept()  # greedy reports the distribution at 1
    assert kept(temperature=0.5, top_p=0.8) == pytest.approx([0.2, 0.8, 0, 0])  # filters see the tempered one


logits = st.lists(st.lists(st.floats(-9, 9, width=32), min_size=7, max_size=7), min_size=1, max_size=4).map(
    torch.tensor
)


@settings(deadline=None)
@given(logits, st.floats(0.2, 3), st.integers(0, 7), st.floats(0.05, 1))
def test_filtered_is_a_distribution(logits, temperature, top_k, top_p):
    """It sums to 1; what is kept is the likeliest, never nothing, in the proportions of the tempered one."""
    for values in ({"top_k": top_k}, {"top_p": top_p}):
        found = sampling.filtered_log_probs(logits, options(temperature=temperature, **values))
        torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(logits)))
        plain = (logits / temperature).log_softmax(-1)
        for row, whole in zip(found, plain, strict=True):
            kept = row > -torch.inf
            assert whole[kept].max() == whole.max()  # which of two that rounding makes equal is all the same
            if not kept.all():
                assert whole[kept].min() >= whole[~kept].max()
            shift = (row - whole)[kept]
            torch.testing.assert_close(shift, shift[:1].expand_as(shift), atol=1e-4, rtol=0)


@settings(deadline=None)
@given(logits, st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-53]), st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.5}]))
def test_draw_is_the_inverse_of_the_distribution(logits, u, values):
    """The token at `u` of the cumulative distribution; never one that was cut off, at the ends of [0, 1) too."""
    log_probs = sampling.filtered_log_probs(logits, options(**values))
    tokens = sampling.draw(log_probs, torch.full((len(logits),), u, dtype=torch.double))
    for row, token in zip(log_probs.double().exp(), tokens.tolist(), strict=True):
        assert row[token] > 0
        assert row[:token].sum() <= u + 1e-5
        assert row[: token + 1].sum() >= u - 1e-5


def test_greedy():
    assert sampling.draw(torch.tensor([[0.1, 3.0, 3.0], [5.0, 1.0, 2.0]]), None).tolist() == [1, 0]


def test_tokens_without_probability_are_never_drawn():
    """At u = 0 behind a token that was cut off, and at the largest u before one."""
    log_probs = torch.log(torch.tensor([[0.0, 0.5, 0.5, 0.0]]))
    assert sampling.draw(log_probs, torch.tensor([0.0], dtype=torch.double)).tolist() == [1]
    assert sampling.draw(log_probs, torch.tensor([1 - 2**-53], dtype=torch.double)).tolist() == [2]
