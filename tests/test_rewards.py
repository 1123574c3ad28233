"""From rollouts to samples: components of the reward, what is left out, and the metrics."""

import dataclasses

import pytest
import torch

from tests.distributed import lazy

credit = lazy("megarl.training.credit")
rewards = lazy("megarl.rewards")
engine = lazy("megarl.rollout.engine")
exact_match = lazy("megarl.environments.exact_match")


def _batch(prompts, options):
    """Two groups of two for a prompt whose answer is `7`: lengths 1, 4 (cut off), 3 and 2."""
    prompt = prompts["text"]
    prompt = dataclasses.replace(prompt, prompt=dataclasses.replace(prompt.prompt, answer="7"))
    texts = {1: "7", 4: "7", 3: "8", 2: "word"}
    groups = [
        [engine.Rollout(prompt, torch.arange(n), torch.zeros(n), finished=n != 4) for n in lengths]
        for lengths in ((1, 4), (3, 2))
    ]
    judge = rewards.Judge(
        exact_match.ExactMatch("[0-9]", 0.1), lambda ids: texts[len(ids)], rewards.RewardOptions(4, **options)
    )
    return judge(groups)


@pytest.mark.ranks(1)
def test_components_and_metrics(prompts):
    batch = _batch(prompts, {})
    assert [sample.rewards for sample in batch.samples] == [(1.0, 0.1), (0.0, 0.0), (0.0, 0.1), (0.0, 0.0)]
    assert all(sample.trainable for sample in batch.samples)
    assert batch.constant.tolist() == [False, False]
    assert batch.metrics() == pytest.approx(
        {
            "reward/mean": 1.2 / 4,
            "reward/accuracy": 0.25,
            "reward/well_formed": 0.5,
            "reward/constant_groups": 0.0,
            "rollout/finished": 0.75,
            "rollout/mean_length": 2.5,
            "rollout/tokens": 10,
        }
    )


@pytest.mark.ranks(1)
def test_overlong(prompts):
    """Of 4 tokens the last 2 cost up to 0.5; what was cut off is judged and not trained on."""
    batch = _batch(prompts, dict(overlong_buffer=2, overlong_penalty=0.5, filter_overlong=True))
    assert [sample.rewards[2] for sample in batch.samples] == [0.0, -0.5, -0.25, 0.0]
    assert [sample.trainable for sample in batch.samples] == [True, False, True, True]
    assert batch.rewards.tolist() == pytest.approx([1.1, -0.5, -0.15, 0.0])
    assert batch.metrics()["reward/mean"] == pytest.approx(0.45 / 4)


@pytest.mark.ranks(1)
def test_components_that_add_up_to_the_same(prompts):
    """Such a group teaches nothing where components are summed, and something where they are weighed one by one."""
    samples = [credit.Sample(None, None, parts) for parts in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0))]
    for by_component, expected in ((False, [True, True]), (True, [False, True])):
        assert rewards.Batch([], [], [], samples, 2, by_component).constant.tolist() == expected


@pytest.mark.ranks(1)
def test_nothing_to_judge(prompts):
    """As a rank has it that has no group to draw anew."""
    judge = rewards.Judge(exact_match.ExactMatch(), str, rewards.RewardOptions(4))
    assert judge([]).constant.tolist() == []
