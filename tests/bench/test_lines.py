"""What is derived from a measured line."""

from megarl.bench.lines import Line


def test_ratio():
    assert Line("a", "s", 3.0, 2.0).ratio == 1.5
    assert Line("a", "s", 3.0).ratio is None


def test_gap_is_a_cost_over_a_cost():
    """Of a time and of a rate: at the floor it is 1, and worse is more."""
    assert Line("a", "ms", 3.0, floor=2.0).gap == 1.5
    assert Line("a", "tokens/s", 3.0, floor=6.0).gap == 2.0
    assert Line("a", "ms", 3.0).gap is None
    assert Line("a", "ms", 3.0, floor=0.0).gap is None
