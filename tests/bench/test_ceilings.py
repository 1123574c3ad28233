"""The machine's ceilings, and the roofline under them."""

import pytest

from megarl.bench.ceilings import Ceilings, measure_ceilings


def test_the_slower_of_the_two_decides():
    ceilings = Ceilings(bandwidth=10.0, peak=100.0)
    assert ceilings.seconds(bytes=20.0, operations=100.0) == 2.0
    assert ceilings.seconds(bytes=20.0, operations=300.0) == 3.0
    assert ceilings.seconds() == 0


def test_measured():
    ceilings = measure_ceilings()
    copy, product = ceilings.lines
    assert (copy.unit, product.unit) == ("GB/s", "TFLOP/s")
    assert copy.megarl == pytest.approx(ceilings.bandwidth / 1e9) and copy.megarl > 0
    assert product.megarl == pytest.approx(ceilings.peak / 1e12) and product.megarl > 0
