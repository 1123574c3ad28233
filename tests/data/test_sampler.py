from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.prompt import Prompt
from megarl.data.sampler import PromptSampler, shard


def prompts(count):
    return [Prompt(index, index + 1, (), "", "test") for index in range(count)]


def indices(batch):
    return [prompt.index for prompt in batch]


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_every_epoch_holds_every_prompt_once(size, count, seed):
    sampler = PromptSampler(prompts(size), seed)
    steps = -(-3 * size // count)
    walk = [index for step in range(steps) for index in indices(sampler.batch(step, count))]
    assert len(walk) == steps * count
    for epoch in range(3):
        assert sorted(walk[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_step_does_not_depend_on_what_was_asked_before():
    data = prompts(50)
    forwards = [indices(PromptSampler(data, 7).batch(step, 8)) for step in range(30)]
    sampler = PromptSampler(data, 7)
    backwards = [indices(sampler.batch(step, 8)) for step in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_epochs_and_seeds_differ():
    data = prompts(50)
    orders = [indices(PromptSampler(data, seed).batch(epoch, 50)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(map(tuple, orders))) == 4
    assert list(range(50)) not in orders


def test_the_order_is_pinned():
    """A resumed run counts on it: this must not change with numpy or with megarl."""
    assert indices(PromptSampler(prompts(10), 0).batch(0, 12)) == [3, 7, 6, 4, 1, 0, 2, 8, 5, 9, 9, 4]


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(ValueError, match="no prompts"):
        PromptSampler([], 0)
    with pytest.raises(ValueError, match="seed -1"):
        PromptSampler(prompts(1), -1)


@given(st.lists(st.integers(), max_size=50), st.integers(1, 9))
def test_shards_are_the_batch(batch, dp_size):
    shards = [shard(batch, rank, dp_size) for rank in range(dp_size)]
    assert sum(shards, []) == batch
    assert len(Counter(map(len, shards))) <= 2
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_indices_are_those_of_the_batch():
    data = prompts(7)
    sampler = PromptSampler(data, 3)
    for step in range(6):
        assert indices(sampler.batch(step, 5)) == sampler.indices(step, 5)
