"""The table of docs/models.md: made anew, and within its bounds."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.models.families import FAMILIES
from megarl.verify.compare import FLOAT32_LOG_PROB
from tests.parity.exchange import FOUND
from tests.parity.measure import (
    FLOAT32_GRADIENT,
    FLOAT32_LOGIT,
    GRADIENTS,
    LOG_PROBS,
    LOGITS,
    QUANTITIES,
    lines,
    tiny_head,
)
from tests.parity.models import REAL, tiny_question

DOC = Path(__file__).parent.parent / "docs" / "models.md"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tiny(ranks, tmp_path, model_type):
    found = _lines(ranks, tmp_path, model_type)
    assert tuple(line.what for line in found) == QUANTITIES
    assert all(line.at_most for line in found)
    assert [line for line in found if not line.good] == []


def test_an_error_shows(ranks, tmp_path):
    """A wrong value of one logit, one log-probability or one weight's gradient breaks its own bound."""
    _lines(ranks, tmp_path, "qwen3")
    found = torch.load(tmp_path / FOUND, weights_only=False)
    name = min(found.gradients, key=lambda name: found.gradients[name].numel())
    gradients = found.gradients | {name: found.gradients[name] * (1 + 1e-4)}
    for what, change in {
        LOGITS: {"logits": _off_by(found.logits, 1e-4)},
        LOG_PROBS: {"log_probs": _off_by(found.log_probs, 1e-4)},
        GRADIENTS: {"gradients": gradients},
    }.items():
        torch.save(replace(found, **change), tmp_path / FOUND)
        assert [line.what for line in lines("qwen3", tmp_path) if not line.good] == [what]


def _lines(ranks, folder, model_type):
    tiny_question(folder, model_type)
    ranks.run_named("tests.parity.job", "answer", (folder,), {})
    return lines(model_type, folder)


def _off_by(values: list[torch.Tensor], difference: float) -> list[torch.Tensor]:
    last = values[-1].clone()
    last.view(-1)[-1] += difference
    return [*values[:-1], last]


def test_every_family_has_a_published_size():
    assert {shape.model_type for shape in REAL} == FAMILIES.keys()


def test_documented_numbers_are_within_the_bounds():
    text = DOC.read_text()
    head, rule = tiny_head()
    (table,) = re.findall(re.escape(f"{head}\n{rule}\n") + r"((?:\|.*\n)+)", text)
    rows = {cells[1].strip(" `"): [float(cell) for cell in cells[2:-1]] for cells in map(_cells, table.splitlines())}
    assert rows.keys() == FAMILIES.keys()
    for logits, log_probs, engine, gradient, together in rows.values():
        assert logits <= FLOAT32_LOGIT and max(log_probs, engine) <= FLOAT32_LOG_PROB
        assert max(gradient, together) <= FLOAT32_GRADIENT
    for family in FAMILIES.values():
        assert f"`{family.architecture}`" in text


def _cells(line: str) -> list[str]:
    return line.split("|")
