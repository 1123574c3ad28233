"""Parts of even sums: every cost once, as even as can be asked, the same every time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.packing.balance import even_parts

costs = st.lists(st.integers(0, 50), max_size=12)


@given(costs, st.integers(1, 5))
def test_every_cost_is_in_one_part(values, parts):
    found = even_parts(values, parts)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(values)))
    assert found == even_parts(values, parts)
    assert all(part == sorted(part) for part in found)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(2, 3))
def test_near_the_best(values, parts):
    """Against all partitions: within the 4/3 that sorting alone guarantees for greedy list scheduling."""
    best = min(
        max(sum(v for v, p in zip(values, assignment, strict=True) if p == part) for part in range(parts))
        for assignment in itertools.product(range(parts), repeat=len(values))
    )
    found = max(sum(values[i] for i in part) for part in even_parts(values, parts))
    assert best <= found <= 4 / 3 * best


@given(st.integers(1, 5), st.integers(0, 5), st.data())
def test_parts_of_equal_size(parts, each, data):
    values = data.draw(st.lists(st.integers(0, 100), min_size=parts * each, max_size=parts * each))
    found = even_parts(values, parts, equal_size=True)
    assert [len(part) for part in found] == [each] * parts
    sums = [sum(values[i] for i in part) for part in found]
    if values:
        assert max(sums) - min(sums) <= max(values) - min(values)


def test_by_hand():
    assert max(sum([8, 7, 6, 5, 4][i] for i in part) for part in even_parts([8, 7, 6, 5, 4], 2)) == 16


def test_refusals():
    with pytest.raises(ValueError, match="5 costs do not make 2 equal parts"):
        even_parts([1] * 5, 2, equal_size=True)
    with pytest.raises(ValueError, match="1 costs do not make 0 parts"):
        even_parts([1], 0)
