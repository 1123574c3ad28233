"""`deterministic`: engine and trainer give a token the same bits."""

import json
from pathlib import Path

import pytest
import torch

from tests import commands, tiny
from tests.distributed import lazy

policies = lazy("tests.policies")
prompts = lazy("megarl.bench.prompts")
invariant = lazy("megarl.models.invariant")

LARGEST_DIGIT = Path(__file__).parent.parent.parent / "recipes" / "largest_digit.yaml"
MODES = {
    "plain": {},
    "caches and chunks": {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_tokens_per_step": 64},
}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def text_checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / request.param
    return tiny.write_family_checkpoint(folder, request.param, tied=request.param == "qwen3")


@pytest.mark.parametrize("mode", MODES)
def test_same_bits(ranks, text_checkpoint, mode):
    """More requests than decode at a time, of all lengths, before and after an update; not so without the mode."""
    (found,) = ranks.run(_distances, text_checkpoint, MODES[mode], True)
    assert found == [0.0, 0.0]
    (found,) = ranks.run(_distances, text_checkpoint, MODES[mode], False)
    assert all(0 < distance < 1e-5 for distance in found)


def _distances(checkpoint, mode, deterministic):
    try:
        policy = policies.policy(checkpoint, deterministic=deterministic)
        trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, **mode)
        torch.manual_seed(1)
        asked = [prompts.text_prompt(n, tiny.VOCABULARY) for n in (5, 17, 40, 90, 64, 33, 8, 9, 9, 71)]
        distances = []
        for _ in range(2):
            rollouts = [r for group in engine.generate(asked, policies.sampling(20), group_size=2) for r in group]
            sequences = [rollout.sequence for rollout in rollouts]
            trained = torch.cat(policies.score(trainer, sequences))
            distances.append(float((trained - torch.cat([r.log_probs for r in rollouts])).abs().max()))
            policies.one_update(trainer, sequences)
            engine.weights_changed()
        return distances
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.ranks(1)
def test_a_module_without_such_a_function():
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8))
    with pytest.raises(Exception, match="deterministic = True: should be false, since 1 is a Linear"):
        invariant.install(model)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deterministic")
    settings = {
        "data.path": folder / "data",
        "run_dir": folder / "run",
        "deterministic": "true",
        "steps": 3,
        "warmup.steps": 2,
        "algorithm.prompts_per_step": 8,
        "algorithm.group_size": 4,
        "rollout.max_new_tokens": 6,
        "evaluation.every": 0,
        "evaluation.max_prompts": 8,
    }
    return [LARGEST_DIGIT, *(f"{key}={value}" for key, value in settings.items())]


@pytest.mark.slow
def test_a_run(arguments):
    result = commands.run("megarl.train", *arguments)
    assert result.code == 0, result.err
    run = Path(arguments[2].removeprefix("run_dir="))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line["mismatch/max"] for line in lines if "mismatch/max" in line]
    assert found == [0.0] * 3


def test_verified(arguments):
    result = commands.run("megarl.verify", *arguments, "--only", "engine,packing,sync", "--json")
    assert result.code == 0, (result.out, result.err)
    lines = [line for line in json.loads(result.out)["checks"] if line["subject"].startswith("log-probabilities")]
    assert len(lines) == 3
    assert all(line["at_most"] == {"max": 0.0} and line["measured"]["max"] == 0.0 for line in lines)
