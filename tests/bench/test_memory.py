"""The steps whose memory is measured are as full as the recipe lets them be."""

from pathlib import Path

from megarl.recipe import load_recipe
from tests import commands
from tests.distributed import lazy

memory = lazy("megarl.bench.memory")
run = lazy("megarl.run")
startup = lazy("megarl.startup")
RECIPES = Path(__file__).parent.parent.parent / "recipes"


def test_full_of_pictures(ranks, tmp_path):
    sizes = "data.max_prompt_tokens=512", "rollout.patches_per_pass=4096"
    ((tokens, media, predictors, pictures, requests),) = ranks.run(_sizes, tmp_path, "digits", sizes)
    assert 0.9 * 4096 < media < tokens <= 4096 and predictors == 8 * 16
    assert (pictures, requests) == (4, 512)  # of 32 x 32 patches


def test_full_of_completions(ranks, tmp_path):
    ((tokens, media, predictors, pictures, requests),) = ranks.run(_sizes, tmp_path, "largest_digit", ())
    assert (tokens, media, predictors) == (4096, 0, 4096 - 8 * 8)
    assert (pictures, requests) == (0, 512)


def _sizes(folder, name, overrides):
    recipe = load_recipe(RECIPES / f"{name}.yaml", [f"run_dir={folder}", *overrides])
    parts = run.build_parts(recipe, startup.prepare_checkpoint(recipe, folder))
    row, prompts = memory.full_row(recipe, parts), memory.full_step(recipe, parts)
    media = int((row.feature_rows >= 0).sum())
    return row.ids.numel(), media, row.predictors.numel(), sum(len(p.items) for p in prompts), len(prompts)


def test_a_cpu_is_refused():
    result = commands.run("megarl.bench", RECIPES / "digits.yaml", "--only", "memory")
    assert result.code == 2 and "--only memory: torch counts what is allocated on a GPU alone" in result.err
