"""Advantages, corrections and what is left out, from scored samples: of one rank, and of several as of one."""

import pytest
import torch

from tests.distributed import Layout, lazy

credits = lazy("megarl.training.credit")
advantages = lazy("megarl.algorithms.advantages")
corrections = lazy("megarl.algorithms.corrections")
parallel_state = lazy("megatron.core.parallel_state")

GROUP = 2
REWARDS = [(1.0, 0.1), (0.0, 0.1), (0.0, 0.0), (0.0, 0.1), (1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (1.0, 0.1)]
LENGTHS = [3, 1, 2, 4, 2, 2, 5, 1]


def _assign(places, options):
    """(advantages, corrections, kept, metrics) of the samples at these places."""
    from megarl.packing.rows import TokenSequence

    generator = torch.Generator().manual_seed(4)
    engine = [-2 + torch.randn(n, generator=generator) for n in LENGTHS]
    trainer = [log_probs + torch.randn(len(log_probs), generator=generator) / 4 for log_probs in engine]
    reference = [log_probs + torch.randn(len(log_probs), generator=generator) / 4 for log_probs in engine]
    samples = [
        credits.Sample(TokenSequence(None, torch.zeros(LENGTHS[i], dtype=torch.long)), engine[i], REWARDS[i], i != 3)
        for i in places
    ]
    scored = credits.Scored([trainer[i] for i in places], [reference[i] for i in places])
    found = credits.assign_credit(samples, scored, options())
    return engine, trainer, reference, found


@pytest.mark.ranks(1)
def test_by_hand():
    options = lambda: credits.CreditOptions(  # noqa: E731
        GROUP, advantages.AdvantageOptions("group_mean"), corrections.CorrectionOptions("token", high=1.2, drop_max=0.4)
    )
    engine, trainer, _, found = _assign(range(8), options)
    expected = [0.5, -0.5, -0.05, 0.05, 0.0, 0.0, -0.55, 0.55]
    torch.testing.assert_close(found.advantages, torch.tensor(expected))
    far = [float((a - b).abs().max()) > 0.4 for a, b in zip(engine, trainer, strict=True)]
    assert 0 < sum(far) < 8
    assert found.kept.tolist() == [not off and i != 3 for i, off in enumerate(far)]
    bounded = 0
    for a, b, weights in zip(engine, trainer, found.corrections, strict=True):
        torch.testing.assert_close(weights, (b - a).exp().clamp(max=1.2))
        bounded += int(((b - a).exp() > 1.2).sum())
    assert found.metrics == pytest.approx(
        {
            "reward/kl_penalty": 0.0,
            "policy/left_out": sum(not kept for kept in found.kept.tolist()) / 8,
            "mismatch/dropped": sum(far) / 8,
            "mismatch/bounded": bounded / sum(LENGTHS),
        }
    )


@pytest.mark.ranks(1)
def test_divergence_in_the_reward():
    """Summed over the completion, weighed, and taken off before the group's mean is."""
    options = lambda: credits.CreditOptions(  # noqa: E731
        GROUP, advantages.AdvantageOptions("group_mean"), reward_kl_coefficient=0.3, kl_estimator="k1"
    )
    _, trainer, reference, found = _assign(range(8), options)
    penalties = [0.3 * float((a - b).sum()) for a, b in zip(trainer, reference, strict=True)]
    rewards = [sum(parts) - penalty for parts, penalty in zip(REWARDS, penalties, strict=True)]
    for i in range(0, 8, 2):
        half = (rewards[i] - rewards[i + 1]) / 2
        assert found.advantages[i : i + 2].tolist() == pytest.approx([half, -half], abs=1e-5)
    assert found.metrics["reward/kl_penalty"] == pytest.approx(sum(penalties) / 8, abs=1e-5)


def _share(name):
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    places = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)

    def options():
        drop = corrections.CorrectionOptions("geometric", "mask", 0.9, 1.2, drop_mean=0.4)
        return credits.CreditOptions(GROUP, advantages.AdvantageOptions(name), drop, 0.1)

    found = _assign(places, options)[-1]
    return found.advantages, found.corrections, found.kept, found.metrics


@pytest.mark.parametrize("name", ["group_std", "batch_std"])
@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(2, 1, context_parallel=2)], ids=["dp2", "cp2"])
def test_ranks(ranks, name, layout):
    """Data-parallel ranks with half of the groups each give what one with all of them does; context-parallel ranks,
    which have the same samples, count once."""
    (whole,) = ranks.run(_share, name)
    answers = ranks.run(_share, name, **layout.job)
    halves = answers if layout.context_parallel == 1 else answers[:1]
    torch.testing.assert_close(torch.cat([a[0] for a in halves]), whole[0])
    torch.testing.assert_close(torch.cat([x for a in halves for x in a[1]]), torch.cat(whole[1]))
    assert torch.equal(torch.cat([a[2] for a in halves]), whole[2])
    for answer in answers:
        assert answer[3] == pytest.approx(whole[3])


@pytest.mark.ranks(1)
def test_a_sample_of_no_known_reward():
    """Its group is the other two, and it is no part of the loss."""
    from megarl.packing.rows import TokenSequence

    rewards = [(1.0,), (0.0,), (0.5,)]
    samples = [
        credits.Sample(TokenSequence(None, torch.zeros(2, dtype=torch.long)), torch.zeros(2), reward, judged=i != 1)
        for i, reward in enumerate(rewards)
    ]
    options = credits.CreditOptions(3, advantages.AdvantageOptions("group_mean"))
    found = credits.assign_credit(samples, credits.Scored([torch.zeros(2)] * 3, None), options)
    assert found.advantages.tolist() == [0.25, 0, -0.25]
    assert found.kept.tolist() == [True, False, True]
    assert found.metrics["policy/left_out"] == pytest.approx(1 / 3)
