"""A GRPO step beside TRL's; that both were asked and said as much is checked by the bench itself."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from megarl.errors import UserError
from tests import commands
from tests.commands import ROOT
from tests.distributed import lazy

grpo = lazy("megarl.bench.grpo")


def _lines(folder: Path, recipe: str, *arguments) -> dict[str, dict]:
    recipe = ROOT / "recipes" / f"{recipe}.yaml"
    places = f"run_dir={folder / 'run'}", f"data.path={folder / 'data'}"
    command = commands.run("megarl.bench", recipe, *places, "--only", "grpo", "--rounds", "1", "--json", *arguments)
    assert command.code == 0, command.err
    lines = json.loads(command.out.splitlines()[-1])["lines"]
    return {line["name"]: line for line in lines if not line["name"].startswith("ceiling")}


def _check(lines: dict[str, dict], name: str) -> None:
    whole, *phases = lines.values()
    assert list(lines) == [name, *(f"{name}: {phase}" for phase in ("rollout", "scoring", "training"))]
    for side in ("megarl", "peer", "floor"):
        assert whole[side] == pytest.approx(sum(phase[side] for phase in phases))
        assert all(phase[side] > 0 for phase in phases)
    assert all(line["gap"] > 1 for line in lines.values())


@pytest.mark.slow
def test_made_up_prompts(tmp_path):
    """12 letters and what the chat template adds."""
    sizes = "--prompts", 2, "--group", 4, "--prompt-tokens", 12, "--new-tokens", 5
    lines = _lines(tmp_path, "largest_digit", *sizes)
    _check(lines, "GRPO step, 2 prompts of 13 x 4 of 5 tokens")


@pytest.mark.slow
def test_prompts_of_the_recipe(tmp_path):
    """Pictures, a reference policy, two updates."""
    lines = _lines(tmp_path, "digits", "algorithm.prompts_per_step=4", "algorithm.group_size=4")
    _check(lines, "GRPO step, 4 prompts of 8 x 4 of 2 tokens")


def test_without_trl(ranks):
    (refusal,) = ranks.run(_without_trl)
    assert refusal == "--only grpo: the peer is TRL, which is not installed; run pip install 'megarl[test]'"


def _without_trl():
    with patch("megarl.bench.grpo.find_spec", return_value=None), pytest.raises(UserError) as refused:
        grpo.measure(None, None, None)
    return str(refused.value)
