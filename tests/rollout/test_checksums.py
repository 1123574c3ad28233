"""Numbers by which weights are compared across layouts: what they overlook would be overlooked in a run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed import lazy

checksums = lazy("megarl.rollout.checksums")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def _values(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.ranks(1)
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_parts_add_up_to_the_whole(rows, columns, data):
    """However it is cut, along either dimension, and in whatever pieces it is read."""
    values = _values(rows, columns, dtype=data.draw(st.sampled_from(DTYPES)))
    whole = checksums.checksum(values, values.shape, (0, 0))
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    cuts = [(slice(a, b), slice(c, d)) for a, b in ((0, row), (row, rows)) for c, d in ((0, column), (column, columns))]
    parts = [checksums.checksum(values[cut], values.shape, (cut[0].start, cut[1].start)) for cut in cuts]
    assert (sum(parts) - whole) % (1 << 64) == 0
    kept = checksums._ELEMENTS_AT_ONCE
    checksums._ELEMENTS_AT_ONCE = 2 * columns
    try:
        assert checksums.checksum(values, values.shape, (0, 0)) == whole
    finally:
        checksums._ELEMENTS_AT_ONCE = kept


@pytest.mark.ranks(1)
def test_what_changes_it():
    """The lowest bit of one element, a sign of zero, two elements or two halves that change places."""
    for dtype in DTYPES:
        values = _values(8, 6, dtype=dtype)
        values[3, 3] = 0
        whole = checksums.checksum(values, values.shape, (0, 0))
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        for place in ((0, 0), (3, 4), (7, 5)):
            other = values.clone()
            other.view(integers)[place] ^= 1
            assert checksums.checksum(other, values.shape, (0, 0)) != whole
        negative = values.clone()
        negative[3, 3] = -0.0
        assert torch.equal(negative, values) and checksums.checksum(negative, values.shape, (0, 0)) != whole
        for permuted in (values.flip(0), values.flip(1), values.roll(4, 0), values.roll(1, 1)):
            assert checksums.checksum(permuted, values.shape, (0, 0)) != whole
    assert checksums.checksum(_values(5), (5,), (0,)) == checksums.checksum(_values(5).clone(), (5,), (0,))
