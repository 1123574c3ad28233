"""Rollouts that go on in the next step: who is trained on when, with what weights, and that nothing is lost."""

import torch

from tests import tiny
from tests.distributed import Layout, lazy

agreement = lazy("megarl.parallel.agreement")
engines = lazy("megarl.rollout.engine")
parallel_state = lazy("megatron.core.parallel_state")
partials = lazy("megarl.partial_rollouts")
spreading = lazy("megarl.rollout.spread")
policies = lazy("tests.policies")

STEPS, ROUND, LONGEST = 6, 4, 12
STOP = tuple(range(12))


def _options(**changes):
    sizes = dict(prompts_per_step=2, extra_prompts=2, group_size=2, tokens_per_round=ROUND, max_new_tokens=LONGEST)
    return partials.PartialOptions(**{**sizes, **changes})


def _flight(checkpoint, prompts, layout, options=None, steps=STEPS, change=True, again_from=None):
    """Plain values of each step's groups, by place; and what was left in flight.  The weights change after each step.
    With `again_from` everything is built anew after that step, and goes on from the state."""
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, enable_prefix_caching=True)
    options = _options(**(options or {}))
    sampling = policies.sampling(options.tokens_per_round, stop_ids=STOP)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    group, sizes = parallel_state.get_data_parallel_group(), []

    def generate(some, keys):
        sizes.append(len(some))
        return spreading.generate_spread(engine, some, sampling, 1, keys, lambda: False)

    def build():
        return partials.PartialRollouts(
            options,
            lambda numbers: [prompts[number % len(prompts)] for number in numbers],
            generate,
            lambda number, member: 1000 * number + member,
            lambda number: number % ranks == rank,
            lambda numbers: sorted(set().union(*agreement.gathered(numbers, group))),
        )

    partial, found = build(), []
    for step in range(1, steps + 1):
        groups = partial.step(step)
        mine = {
            place: (one.number, [(r.ids, r.log_probs, r.weight_versions, r.finished) for r in one.rollouts])
            for place, one in groups.items()
        }
        found.append({place: one for part in agreement.gathered(mine, group) for place, one in part.items()})
        if change:
            policies.one_update(trainer, tiny.make_sequences({"p": prompts[0]}))
            engine.weights_changed()
        if step == again_from:
            left = {number: one for part in agreement.gathered(partial.state(), group) for number, one in part}
            partial = build()
            partial.resume(partials.unflat(partials.flat(left)))
    left = sorted(number for part in agreement.gathered(partial.numbers, group) for number in part)
    return found, left, sizes


def _prompts(prompts):
    return [prompts[name] for name in ("text", "image", "both")]


def test_steps(ranks, checkpoint, prompts):
    """Each step has its batch, of the groups that began first; each group is trained on once, whole; its tokens say
    which weights sampled them, and those of a step are the newest that there were."""
    ((found, left, _),) = ranks.run(_flight, checkpoint, _prompts(prompts), Layout(1, 1))
    trained = []
    ages = set()
    for step, groups in enumerate(found, start=1):
        assert sorted(groups) == [0, 1] and groups[0][0] < groups[1][0]
        for number, rollouts in groups.values():
            trained.append(number)
            assert len(rollouts) == 2
            for ids, log_probs, versions, finished in rollouts:
                assert ids.numel() == log_probs.numel() == versions.numel()
                assert finished == (int(ids[-1]) in STOP) and (finished or ids.numel() == LONGEST)
                assert not torch.isin(ids[:-1], torch.tensor(STOP)).any()
                assert versions.tolist() == sorted(versions.tolist()) and versions.max() <= step - 1
                begun = max(0, number - 2) // 2  # two groups begin in a step, and two more in the first
                assert versions[0] == begun
                ages.add(step - 1 - int(versions[0]))
    assert len(set(trained)) == len(trained) == 2 * STEPS
    assert sorted(trained + left) == list(range(2 * STEPS + 2))
    assert max(ages) >= 1  # something was carried


def test_any_layout(ranks, checkpoint, prompts):
    """What is sampled when does not depend on who samples it."""
    ((alone, left, _),) = ranks.run(_flight, checkpoint, _prompts(prompts), Layout(1, 1))
    for layout in (Layout(2, 1), Layout(2, 2), Layout(2, 1, context_parallel=2)):
        for found, still, _ in ranks.run(_flight, checkpoint, _prompts(prompts), layout, **layout.job):
            assert still == left
            for ours, theirs in zip(found, alone, strict=True):
                assert sorted(ours) == sorted(theirs)
                for place, (number, rollouts) in ours.items():
                    assert number == theirs[place][0]
                    for (ids, log_probs, versions, _), other in zip(rollouts, theirs[place][1], strict=True):
                        assert torch.equal(ids, other[0]) and torch.equal(versions, other[2])
                        assert (log_probs - other[1]).abs().max() < 1e-4


def test_resumed(ranks, checkpoint, prompts):
    """From the state after a step the next ones are the same to the bit, also where the state went through a file."""
    ((whole, left, _),) = ranks.run(_flight, checkpoint, _prompts(prompts), Layout(1, 1))
    ((again, still, _),) = ranks.run(_flight, checkpoint, _prompts(prompts), Layout(1, 1), again_from=3)
    assert still == left
    for ours, theirs in zip(again, whole, strict=True):
        for place, (number, rollouts) in ours.items():
            assert number == theirs[place][0]
            for one, other in zip(rollouts, theirs[place][1], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True)) and one[3] == other[3]


def _uncut(checkpoint, prompts):
    policy = policies.policy(checkpoint)
    engine = policies.engine(policy.model)
    sampling = policies.sampling(LONGEST, stop_ids=STOP)
    keys = [1000 * number + member for number in range(len(prompts)) for member in range(2)]
    twice = [prompt for prompt in prompts for _ in range(2)]
    return [(one.ids, one.log_probs) for (one,) in engine.generate(twice, sampling, keys=keys)]


def test_cut_and_uncut(ranks, checkpoint, prompts):
    """Under the same weights a rollout that was cut into rounds is the one that was not."""
    ((found, _, sizes),) = ranks.run(
        _flight, checkpoint, _prompts(prompts), Layout(1, 1), {"prompts_per_step": 3}, steps=1, change=False
    )
    (uncut,) = ranks.run(_uncut, checkpoint, _prompts(prompts))
    compared = 0
    for number, rollouts in found[0].values():
        if number < 3:
            for member, (ids, log_probs, _, _) in enumerate(rollouts):
                expected = uncut[2 * number + member]
                assert torch.equal(ids, expected[0]) and (log_probs - expected[1]).abs().max() < 1e-5
                compared += 1
    assert compared >= 4 and len(sizes) > 1


def _given_up(prompts):
    script = iter([True, False, True, True])

    def generate(some, keys):
        if not next(script):
            return None
        return [
            [engines.Rollout(one, torch.full((ROUND,), 99), torch.zeros(ROUND), number < 2)]
            for one, number in zip(some, keys, strict=True)
        ]

    partial = partials.PartialRollouts(
        _options(),
        lambda numbers: [prompts[0] for _ in numbers],
        generate,
        lambda number, member: number,
        lambda number: True,
        sorted,
    )
    partial.step(1)
    before = partial.numbers
    assert partial.step(2) is None
    assert partial.numbers == before
    return before, sorted(group.number for group in partial.step(2).values()), partial.numbers


def test_given_up(ranks, prompts):
    """A step that is interrupted leaves what was carried as it was, and is made again from there."""
    ((before, trained, after),) = ranks.run(_given_up, _prompts(prompts))
    assert before == [2, 3] and trained == [2, 3] and after == [4, 5]
