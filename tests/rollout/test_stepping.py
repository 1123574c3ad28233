"""Faults that the engine's stepping must not have, beside those that `test_engine.py` compares away."""

import pytest

from tests import tiny
from tests.distributed import RankFailed, lazy

policies = lazy("tests.policies")


def test_a_chunk_that_predicts_a_stop_token_is_no_end(ranks, checkpoint, prompts):
    """Every token is a stop token, and long prompts come in chunks, each of which predicts one."""
    (lengths,) = ranks.run(_sample_with_all_stops, checkpoint, list(prompts.values()))
    assert lengths == [(1, True)] * 2 * len(prompts)


def _sample_with_all_stops(checkpoint, prompts):
    policy = policies.policy(checkpoint)
    engine = policies.engine(policy.model, enable_chunked_prefill=True, max_tokens_per_step=64)
    assert max(prompt.ids.numel() for prompt in prompts) > 64
    options = policies.sampling(stop_ids=tuple(range(tiny.VOCABULARY)))
    groups = engine.generate(prompts, options, group_size=2)
    return [(rollout.ids.numel(), rollout.finished) for group in groups for rollout in group]


def test_a_prompt_without_room_is_an_error(ranks, checkpoint, prompts):
    """A cache of three blocks can never hold it; an empty rollout in its place would train on nothing, silently."""
    with pytest.raises(RankFailed, match="the engine has no room for a prompt of"):
        ranks.run(_sample_in_a_small_cache, checkpoint, [prompts["long_text"]])


def _sample_in_a_small_cache(checkpoint, prompts):
    policy = policies.policy(checkpoint)
    block_bytes = 2 * 3 * 16 * 2 * 16 * 4  # key and value x layers x tokens x heads x size x float32
    engine = policies.engine(policy.model, kv_cache_gb=4 * block_bytes / 2**30, max_requests=4)
    engine.generate(prompts, policies.sampling())
