"""The machine's ceilings, and the roofline under them."""

import time

import torch

from megarl.bench.ceilings import Ceilings, measure_ceilings


def test_the_slower_of_the_two_decides():
    ceilings = Ceilings(bandwidth=10.0, peak=100.0)
    assert ceilings.seconds(bytes=20.0, operations=100.0) == 2.0
    assert ceilings.seconds(bytes=20.0, operations=300.0) == 3.0
    assert ceilings.seconds() == 0


def test_measured():
    """No product of another size takes much less than its operations at the peak, and no copy than its bytes."""
    ceilings = measure_ceilings()
    left = torch.randn(768, 768)
    source, target = torch.zeros(2**25, dtype=torch.uint8), torch.empty(2**25, dtype=torch.uint8)
    assert _best(lambda: left @ left) > 0.5 * ceilings.seconds(operations=2 * 768**3)
    assert _best(lambda: target.copy_(source)) > 0.3 * ceilings.seconds(bytes=2 * 2**25)
    copy, product = ceilings.lines
    assert (copy.unit, product.unit) == ("GB/s", "TFLOP/s")
    assert copy.megarl * 1e9 == ceilings.bandwidth and product.megarl * 1e12 == ceilings.peak


def _best(call):
    def seconds():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(seconds() for _ in range(5))
