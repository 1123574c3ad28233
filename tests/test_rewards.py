"""From rollouts to samples: components of the reward, what is left out, and the metrics."""

import dataclasses

import pytest
import torch

from megarl.data.prompt import MediaSource, Prompt
from megarl.environments.environment import Graded
from megarl.environments.exact_match import ExactMatch
from megarl.environments.extraction import Format
from megarl.environments.in_process import InProcess
from megarl.environments.score import Attempt, Score, failed
from tests.distributed import lazy

credit = lazy("megarl.training.credit")
rewards = lazy("megarl.rewards")
engine = lazy("megarl.rollout.engine")
parallel_state = lazy("megatron.core.parallel_state")


def _judged(groups, score, decode, options):
    scorer = rewards.Scorer(score, decode)
    judge = rewards.Judge(scorer, rewards.RewardOptions(4, **options))
    return judge(groups, parallel_state.get_tensor_and_context_parallel_group()), scorer


def _digits(attempts):
    return InProcess(Graded(ExactMatch(), format=Format("[0-9]"), format_reward=0.1)).score(attempts)


def _batch(prompts, options, score=_digits):
    """Two groups of two for a prompt whose answer is `7`: lengths 1, 4 (cut off), 3 and 2."""
    prompt = prompts["text"]
    prompt = dataclasses.replace(prompt, prompt=dataclasses.replace(prompt.prompt, answer="7"))
    texts = {1: "7", 4: "7", 3: "8", 2: "word"}
    groups = [
        [engine.Rollout(prompt, torch.arange(n), torch.zeros(n), finished=n != 4) for n in lengths]
        for lengths in ((1, 4), (3, 2))
    ]
    return _judged(groups, score, lambda ids: texts[len(ids)], options)[0]


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
            "reward/failed": 0.0,
            "reward/constant_groups": 0.0,
            "rollout/finished": 0.75,
            "rollout/mean_length": 2.5,
            "rollout/tokens": 10,
            "rollout/turns": 1,
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
    batch, _ = _judged([], _digits, str, {})
    assert batch.constant.tolist() == []


def _one_fails(attempts):
    """The one whose text is `8`."""
    return [failed(2, "no") if a.text == "8" else Score((1.0, 0.0), True, True) for a in attempts]


@pytest.mark.ranks(1)
def test_a_failed_reward_is_zero(prompts):
    batch = _batch(prompts, {}, _one_fails)
    assert batch.rewards.tolist() == [1, 1, 0, 1]
    assert batch.judged.all()
    assert batch.constant.tolist() == [True, False]
    found = batch.metrics()
    assert (found["reward/failed"], found["reward/mean"], found["reward/accuracy"]) == (0.25, 0.75, 0.75)


@pytest.mark.ranks(1)
def test_a_failed_reward_is_dropped(prompts):
    """Of the second group one is left, which teaches nothing."""
    batch = _batch(prompts, dict(drop_failed=True), _one_fails)
    assert batch.judged.tolist() == [True, True, False, True]
    assert batch.constant.tolist() == [True, True]
    found = batch.metrics()
    assert (found["reward/failed"], found["reward/mean"], found["reward/accuracy"]) == (0.25, 1, 1)


@pytest.mark.ranks(1)
def test_failures_are_kept_up_to_a_bound(prompts):
    groups = [[engine.Rollout(prompts["text"], torch.arange(1), torch.zeros(1), finished=True)] * 150]
    _, scorer = _judged(groups, lambda attempts: [failed(1, "no") for _ in attempts], str, {})
    count, failures = scorer.take_failures()
    prompt = prompts["text"].prompt
    assert (count, len(failures)) == (150, rewards.MOST_FAILURES)
    assert failures[0] == rewards.Failure(prompt.row, prompt.source, "no", "tensor([0])")
    assert scorer.take_failures() == (0, [])


@pytest.mark.ranks(2, 2)
def test_ranks_with_the_same_rollouts_agree(prompts):
    """Each judges every other one, and none is judged by both."""
    lengths = [1, 2, 3, 4, 5]
    groups = [[engine.Rollout(prompts["text"], torch.arange(n), torch.zeros(n), finished=True)] for n in lengths]
    rank, asked = parallel_state.get_tensor_model_parallel_rank(), []

    def score(attempts):
        asked.extend(a.text for a in attempts)
        return [Score((int(a.text) + rank / 10,), True, True) for a in attempts]

    batch, _ = _judged(groups, score, lambda ids: str(len(ids)), {})
    assert batch.rewards.tolist() == pytest.approx([1, 2.1, 3, 4.1, 5])
    assert asked == [["1", "3", "5"], ["2", "4"]][rank]


@pytest.mark.ranks(1)
def test_what_an_environment_is_told(prompts):
    parts = ({"type": "image", "image": MediaSource("image", "a.png")}, {"type": "text", "text": "A. red"})
    content = (*parts, {"type": "text", "text": "B. blue"})
    messages = ({"role": "system", "content": parts[1:]}, {"role": "user", "content": content})
    prompt = dataclasses.replace(prompts["text"], prompt=Prompt(3, 5, messages, "A", "colours"))
    rollout = engine.Rollout(prompt, torch.arange(2), torch.zeros(2), finished=False)
    assert rewards.attempt_of(rollout, "A") == Attempt("A", False, "A", "colours", 5, "A. red\nB. blue")
