"""The lines about engine, trainer and tower, on the model of the digits recipe."""

from pathlib import Path
from types import SimpleNamespace

from megarl.recipe import load_recipe
from tests.distributed import lazy

ceilings = lazy("megarl.bench.ceilings")
policy = lazy("megarl.bench.policy")
prompts = lazy("megarl.bench.prompts")
RECIPE = str(Path(__file__).parent.parent.parent / "recipes" / "digits.yaml")


def test_lines(ranks, tmp_path):
    ((lines, encoded),) = ranks.run(_measure, tmp_path)
    lines = {line.pop("name"): SimpleNamespace(**line) for line in lines}
    start, one, four, prefill, group, tower, encodes, training, state, change = lines
    assert start.startswith("engine, start") and (one, four) == ("decode, 1 request(s)", "decode, 4 request(s)")
    assert prefill == "prefill, 2 prompt(s) of 128 tokens"
    assert group == "prefill, a group of 16 on a prompt of 128 tokens; without prefix cache"
    assert tower == "vision tower, 8 pictures of 1024 patches"
    assert training == "training step, 48 tokens (MFU: 1 / gap)"
    assert state.startswith("optimizer state to the host and back, ")
    assert lines[state].megarl > 0 and lines[state].peer > 0
    for name in (one, four, prefill, group, tower, training):
        assert lines[name].megarl > 0 and lines[name].peer > 0 and lines[name].gap > 1, name
    assert (lines[encodes].megarl, lines[encodes].floor, lines[encodes].peer) == (4, 4, 256)
    assert lines[change].floor == 0
    assert encoded == 2  # what a round kept of its prompts is no help to the next


def _measure(folder):
    recipe = load_recipe(RECIPE, [f"run_dir={folder}"])
    sizes = dict(requests="1,4", prompt_tokens=8, new_tokens=4, prefill_tokens=256, train_tokens=50)
    options = SimpleNamespace(**sizes, rounds=1, profile=None)
    fast = ceilings.Ceilings(bandwidth=1e15, peak=1e18)
    lines = [vars(line) | {"gap": line.gap} for line in policy.measure(recipe, options, fast)]
    sides = policy.Sides(recipe, options, fast)
    item = prompts.noise_item("picture", (1, 4, 4), sides.policy.bridge.hf_pretrained.config.vision_config)
    for _ in range(2):
        sides.generate([prompts.media_prompt(item, 8, sides.model)], 1)
    return lines, sides.engine.features.encoded
