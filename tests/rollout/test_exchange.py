"""Groups that change ranks: nothing is lost, minibatches keep their groups, and the work becomes even."""

import dataclasses

import pytest
import torch

from tests.distributed import Layout, lazy

exchange = lazy("megarl.rollout.exchange")
engine = lazy("megarl.rollout.engine")
cost = lazy("megarl.packing.cost")
parallel_state = lazy("megatron.core.parallel_state")

DP2, DP4, DP2_TP2 = Layout(2, 1), Layout(4, 1), Layout(4, 2)
MINIBATCHES = 2


@pytest.fixture
def copies(prompts):
    """Prompts by place, all as long as each other, told apart by their answers."""
    prompt = prompts["image"]
    named = [dataclasses.replace(prompt.prompt, answer=str(place)) for place in range(8)]
    return [dataclasses.replace(prompt, prompt=one) for one in named]


def _exchange(prompts, lengths):
    """`lengths[rank][group]`: tokens of both completions of that group; prompts by place."""
    rank = parallel_state.get_data_parallel_rank()
    places = [rank * len(lengths[rank]) + j for j in range(len(lengths[rank]))]

    def rollout(place, length, member):
        ids = torch.arange(length) + 1000 * place + 100 * member
        routing = (ids[:, None, None] % 200).expand(-1, 3, 2).to(torch.uint8)
        return engine.Rollout(prompts[place], ids, -ids.float(), bool(member), routing)

    groups = [[rollout(p, n, m) for m in range(2)] for p, n in zip(places, lengths[rank], strict=True)]
    stack = cost.StackCost(1000, 1)
    encoded = []

    def encode(place):
        encoded.append(place)
        return prompts[place]

    ranks, size = len(lengths), len(groups) // MINIBATCHES
    in_batch = [(j // size * ranks + rank) * size + j % size for j in range(len(groups))]
    kept, imbalance = exchange.balance(
        groups, in_batch, places, ranks * len(groups), MINIBATCHES, cost.CostModel(stack, stack), encode, None
    )
    return (
        [[_plain(rollout) for rollout in group] for group in kept],
        imbalance,
        encoded,
    )


def _plain(rollout):
    tensors = rollout.ids, rollout.log_probs, rollout.routing_indices
    ids, log_probs, routing = (tensor.tolist() for tensor in tensors)
    return ids, log_probs, rollout.finished, routing, rollout.prompt.prompt.answer


def places_of(group):
    ((ids, *_), *_) = group
    return ids[0] // 1000


def check(answers, lengths):
    """All places, and that each group is what it was."""
    per_rank = len(lengths[0])
    size = per_rank // MINIBATCHES
    seen = []
    for kept, imbalance, _ in answers:
        assert len(kept) == per_rank and imbalance == answers[0][1]
        for position, group in enumerate(kept):
            place = places_of(group)
            rank, j = divmod(place, per_rank)
            assert j // size == position // size  # its minibatch is what it was
            assert len(group) == 2
            for member, (ids, log_probs, finished, routing, answer) in enumerate(group):
                assert ids == [1000 * place + 100 * member + i for i in range(lengths[rank][j])]
                assert log_probs == [-float(i) for i in ids]
                assert routing == [[[i % 200] * 2] * 3 for i in ids]
                assert finished == bool(member) and answer == str(place)
            seen.append(place)
    return sorted(seen)


def test_long_groups_are_shared_out(ranks, copies):
    """One rank has all the long completions of both minibatches: half of them move, and no more."""
    lengths = [[900, 900, 800, 800], [5, 5, 4, 4]]
    answers = ranks.run(_exchange, copies, lengths, **DP2.job)
    assert check(answers, lengths) == list(range(8))
    assert answers[0][1] == pytest.approx(1)
    assert [len(encoded) for _, _, encoded in answers] == [2, 2]


def test_even_work_stays(ranks, copies):
    lengths = [[50, 50], [50, 50]]
    for rank, (kept, imbalance, encoded) in enumerate(ranks.run(_exchange, copies, lengths, **DP2.job)):
        assert [places_of(group) for group in kept] == [2 * rank, 2 * rank + 1]
        assert imbalance == 1 and encoded == []


def _uneven(prompts, held, lengths, batch):
    """`held[rank]`: places in the batch of the groups that the rank has; `lengths` by place."""
    rank = parallel_state.get_data_parallel_rank()
    groups = [
        [engine.Rollout(prompts[place], torch.arange(lengths[place]), torch.zeros(lengths[place]), True)]
        for place in held[rank]
    ]
    model = cost.CostModel(cost.StackCost(1000, 1), cost.StackCost(1000, 1))
    kept, imbalance = exchange.balance(groups, held[rank], held[rank], batch, 2, model, prompts.__getitem__, None)
    return [int(rollout.prompt.prompt.answer) for (rollout,) in kept], imbalance


def test_as_many_on_each_rank(ranks, copies):
    """Whoever had how many: each rank trains on its share of each minibatch, also where nothing would be won by it."""
    lengths = [40, 40, 40, 40, 90, 10, 60, 44]
    held = [[7, 1, 2, 3, 4, 6], [0, 5]]
    (first, imbalance), (second, _) = ranks.run(_uneven, copies, held, lengths, 8, **DP2.job)
    assert sorted(first + second) == list(range(8)) and imbalance == pytest.approx(1, abs=0.02)
    for kept in (first, second):
        assert [place // 4 for place in kept] == [0, 0, 1, 1]
    assert sum(lengths[place] for place in first[2:]) in (100, 104)


def test_four_ranks(ranks, copies):
    lengths = [[70, 10], [60, 20], [50, 30], [40, 45]]
    answers = ranks.run(_exchange, copies, lengths, **DP4.job)
    assert check(answers, lengths) == list(range(8))


def test_tensor_parallel_ranks_move_alike(ranks, copies):
    lengths = [[60, 4, 60, 4], [3, 2, 3, 2]]
    answers = ranks.run(_exchange, copies, lengths, **DP2_TP2.job)
    assert answers[0] == answers[1] and answers[2] == answers[3]
    assert check([answers[0], answers[2]], lengths) == list(range(8))


def test_one_rank(ranks, copies):
    ((kept, imbalance, encoded),) = ranks.run(_exchange, copies, [[9, 1, 8, 2]])
    assert [places_of(group) for group in kept] == [0, 1, 2, 3] and imbalance == 1 and encoded == []
