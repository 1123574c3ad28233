"""Distances, bounds and verdicts, by hand."""

import math

import pytest
import torch

from megarl.verify.compare import Bounds, Check, gradient_check, gradient_distances, log_prob_distance, norm
from megarl.verify.table import as_json, failed


def test_log_prob_distance():
    found = log_prob_distance(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    assert found == pytest.approx({"max": 0.5, "mean": 0.25, "tmpe": (math.exp(0.5) + 1) / 2})


def test_gradient_distances():
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([12.0]), "more": torch.ones(1)}
    each, together = gradient_distances(found, expected)
    assert each == pytest.approx({"a": 0.1, "b": 0.0}) and together == pytest.approx(0.5 / 13)
    assert norm(expected) == pytest.approx(13)


def test_a_gradient_of_nothing_but_noise_is_measured_against_all_gradients():
    expected = {"a": torch.tensor([1.0]), "silent": torch.tensor([1e-12])}
    each, _ = gradient_distances({"a": torch.tensor([1.0]), "silent": torch.tensor([-1e-12])}, expected)
    assert each["silent"] < 1e-5


@pytest.mark.parametrize("wrong", [None, torch.zeros(3), torch.tensor([math.nan])], ids=["missing", "shape", "nan"])
def test_a_gradient_that_cannot_be_compared_fails(wrong):
    expected = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    found = {"a": torch.tensor([1.0])} | ({} if wrong is None else {"b": wrong})
    check = gradient_check("x", found, expected, Bounds.float32(["text"]))
    assert (check.verdict, check.note) == ("failed", "b")


def test_verdicts():
    assert Check("x", "y", {"v": 1.0}, {"v": 1.0}).verdict == "passed"
    assert Check("x", "y", {"v": 1.1}, {"v": 1.0}).verdict == "failed"
    assert Check("x", "y", {"v": math.nan}, {"v": 1.0}).verdict == "failed"
    assert Check("x", "y", {"v": 0.9}, at_least={"v": 1.0}).verdict == "failed"
    assert Check("x", "y", note="why").verdict == "skipped"
    assert not failed([Check("x", "y", note="why")])
    assert '"passed": true' in as_json([Check("x", "y", note="why")], recipe="r")


def test_bfloat16_bounds_are_measured():
    """1.5 times what transformers itself is off; sqrt(2) more between two that are off; a modality or a weight that
    happens to be rounded well is held to the average."""
    exact = {"text": torch.zeros(2), "image": torch.zeros(2)}
    half = {"text": torch.tensor([0.1, -0.3]), "image": torch.tensor([0.0, 0.1])}
    gradients = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    against = Bounds.bfloat16(half, exact, {"a": torch.tensor([1.2]), "b": torch.tensor([1.0])}, gradients)
    assert against.log_probs["text"] == pytest.approx({"mean": 1.5 * 0.2, "max": 4 * 0.3})
    assert against.log_probs["image"] == pytest.approx({"mean": 1.5 * 0.125, "max": 4 * 0.3})
    together = 0.2 / math.sqrt(2)
    assert against.gradient == pytest.approx(1.5 * together)
    assert against.gradient_of == pytest.approx({"a": 4 * 0.2, "b": 4 * together})
    two = against.between_two()
    assert two.log_probs["text"]["mean"] == pytest.approx(math.sqrt(2) * 1.5 * 0.2)
    assert two.gradient_of["a"] == pytest.approx(math.sqrt(2) * 4 * 0.2)
