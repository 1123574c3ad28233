import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.observe.mismatch import (
    MismatchParts,
    labelled_metrics,
    mismatch_by_label,
    mismatch_metrics,
    mismatch_parts,
)

logprobs = st.floats(-20, 0, width=32)
token = st.tuples(logprobs, logprobs)


def compare(pairs: list[tuple[float, float]]) -> MismatchParts:
    engine, trainer = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2).unbind(1)
    return mismatch_parts(engine, trainer)


def reduce(parts: list[MismatchParts]) -> MismatchParts:
    """What the all-reduces do."""
    return MismatchParts(
        torch.stack([part.sums for part in parts]).sum(0),
        torch.stack([part.maximum for part in parts]).max(0).values,
    )


def test_numbers_by_hand():
    # d = trainer - engine = ln 2, -ln 2, 0
    metrics = mismatch_metrics(compare([(-2.0, -2.0 + math.log(2)), (-1.0, -1.0 - math.log(2)), (-3.0, -3.0)]))
    assert metrics == pytest.approx(
        {
            "mismatch/max": math.log(2),
            "mismatch/mean": 2 * math.log(2) / 3,
            "mismatch/tmpe": (2 + 2 + 1) / 3,
            "mismatch/kl": ((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)) + 0) / 3,
        },
        abs=1e-6,
    )


def test_equal_logprobs_have_no_mismatch():
    metrics = mismatch_metrics(compare([(-1.5, -1.5), (-0.25, -0.25)]))
    assert metrics == {"mismatch/max": 0, "mismatch/mean": 0, "mismatch/tmpe": 1, "mismatch/kl": 0}


def test_a_small_kl_is_not_lost_to_rounding():
    d = 2.0**-12  # exact in float32 at -1; the naive float32 formula is wrong by a factor here
    assert mismatch_metrics(compare([(-1.0, -1.0 + d)]))["mismatch/kl"] == pytest.approx(d * d / 2, rel=1e-3)


def test_the_kl_estimate_is_that_of_the_engine_to_the_trainer():
    """In expectation over the engine's samples k3 is the KL: weigh every token by its probability."""
    engine, trainer = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.2, 0.3]).log()
    expected = sum(
        math.exp(engine[i]) * mismatch_metrics(mismatch_parts(engine[i : i + 1], trainer[i : i + 1]))["mismatch/kl"]
        for i in range(3)
    )
    assert expected == pytest.approx((engine.exp() * (engine - trainer)).sum().item(), rel=1e-5)


def test_no_token_gives_no_metric():
    parts = compare([])
    assert mismatch_metrics(parts) == {}
    assert parts.sums.tolist() == [0, 0, 0, 0] and parts.maximum.tolist() == [0]


def test_parts_have_one_shape_whatever_the_tokens():
    for parts in (compare([]), compare([(-1.0, -2.0)] * 5)):
        assert parts.sums.shape == (4,) and parts.maximum.shape == (1,)
        assert parts.sums.dtype == parts.maximum.dtype == torch.float64


@given(ranks=st.lists(st.lists(token, max_size=5), min_size=1, max_size=4))
def test_parts_reduced_over_ranks_are_those_of_all_tokens(ranks):
    whole = compare([pair for rank in ranks for pair in rank])
    assert mismatch_metrics(reduce([compare(rank) for rank in ranks])) == pytest.approx(mismatch_metrics(whole))


@given(tokens=st.lists(token, min_size=1, max_size=20))
def test_metrics_are_ordered_and_never_negative(tokens):
    metrics = mismatch_metrics(compare(tokens))
    assert 0 <= metrics["mismatch/mean"] <= metrics["mismatch/max"] * (1 + 1e-12)
    assert metrics["mismatch/tmpe"] >= 1
    assert metrics["mismatch/kl"] >= 0


def test_a_nan_shows():
    metrics = mismatch_metrics(compare([(-1.0, math.nan), (-1.0, -1.0)]))
    assert all(math.isnan(value) for value in metrics.values())


def test_a_graph_is_not_kept():
    parts = mismatch_parts(torch.zeros(2), torch.zeros(2, requires_grad=True))
    assert not parts.sums.requires_grad and not parts.maximum.requires_grad


@pytest.mark.parametrize(("engine", "trainer"), [([3], [4]), ([3], [1]), ([2, 3], [2, 3]), ([], [])])
def test_other_shapes_are_refused(engine, trainer):
    with pytest.raises(ValueError, match="must both be"):
        mismatch_parts(torch.zeros(engine), torch.zeros(trainer))


def test_labels():
    """Over all samples, and over those of each label that any rank has; a rank without some takes part."""
    names = ("text", "image", "video")
    engine = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0]), torch.tensor([-4.0])]
    trainer = [torch.tensor([-1.5, -2.0]), torch.tensor([-3.25]), torch.tensor([-4.0])]
    labels = ["image", "text", "image"]
    whole = mismatch_by_label(engine, trainer, labels, names)
    parts = [mismatch_by_label(engine[part], trainer[part], labels[part], names) for part in (slice(1), slice(1, 3))]
    found = labelled_metrics(reduce(parts), names)
    assert found == pytest.approx(labelled_metrics(whole, names))
    expected = {
        "": mismatch_parts(torch.cat(engine), torch.cat(trainer)),
        "/text": mismatch_parts(engine[1], trainer[1]),
        "/image": mismatch_parts(torch.cat([engine[0], engine[2]]), torch.cat([trainer[0], trainer[2]])),
    }
    by_hand = {f"{key}{name}": value for name, p in expected.items() for key, value in mismatch_metrics(p).items()}
    assert found == pytest.approx(by_hand)
    assert found["mismatch/max/image"] == 0.5 and found["mismatch/max/text"] == 0.25
