"""Runs of decode steps: as many of them as one likes, the rollouts are those of single steps."""

import pytest
import torch

from tests.distributed import TP1, TP2_SP, lazy

policies = lazy("tests.policies")
engines = lazy("megarl.rollout.engine")
sequence = lazy("megarl.packing.rows")


@pytest.mark.parametrize("layout", [TP1, pytest.param(TP2_SP, marks=pytest.mark.slow)], ids=str)
def test_runs_of_any_length(ranks, checkpoint, prompts, layout):
    """Requests of different lengths that end at different steps, in a batch that some wait to join, and in a KV cache
    in which the blocks of a whole run are scarce: token for token what single steps sample."""
    answers = ranks.run(_sample_in_runs, checkpoint, list(prompts.values()), layout, **layout.job)
    for rollouts, steps in answers:
        alone = rollouts.pop(1)
        assert steps[1] == 1 < steps[5] <= 5 < steps[32]
        assert len({len(ids) for ids, _ in alone}) > 3  # lengths
        for length, others in rollouts.items():
            for (ids, log_probs), (expected, expected_log_probs) in zip(others, alone, strict=True):
                assert ids.tolist() == expected.tolist(), length
                torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-5, rtol=0)


def _sample_in_runs(checkpoint, prompts, layout):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    found, longest = {}, {}
    for most, size in [(1, {}), (5, {}), (32, {}), (31, {"kv_cache_gb": 0.0006})]:
        engine = policies.engine(policy.model, max_requests=6, enable_prefix_caching=True, **size)
        decode, seen = engine._engine.controller.decode, [0]
        decode.most_steps, stock = most, decode.run

        def run(*arguments, stock=stock, seen=seen):
            sampled, goes_on = stock(*arguments)
            seen.append(len(sampled.tokens))
            return sampled, goes_on

        decode.run = run
        groups = engine.generate(prompts, policies.sampling(40, tuple(range(2, 6))), group_size=3)
        found[most] = [(r.ids, r.log_probs) for group in groups for r in group]
        longest[most] = max(seen)
        allocator = engine._context.kv_block_allocator
        assert allocator.get_total_used() == int((allocator.block_hashes >= 0).sum())  # no block is lost
    return found, longest


def test_the_number_of_steps_is_kept(ranks, checkpoint, prompts):
    """`advance(n)` is n steps of the model, not n runs of them."""
    (counts,) = ranks.run(_advance, checkpoint, prompts["text"])
    assert counts == [1, 4, 10, 17]


def _advance(checkpoint, prompt):
    engine = policies.engine(policies.policy(checkpoint).model)
    engine.start([prompt], policies.sampling(17, ()))
    counts = []
    for steps in (1, 3, 6, None):
        engine.advance(steps)
        counts.append(int(engine._engine.completions.count))
    engine.collect()
    return counts


def test_a_group_is_computed_once(ranks, checkpoint, prompts):
    """The prompts of all groups in the first step, what is left of them for the other rollouts in the second."""
    (steps,) = ranks.run(_tokens_of_prompts, checkpoint, [prompts["long_text"], prompts["text"]])
    first, second, *more = steps
    assert not more
    lengths = [prompts[name].ids.numel() for name in ("long_text", "text")]
    assert first == sum(lengths)
    # At most a block of each is computed again, beside the tokens that the first ones have sampled.
    assert second <= 7 * 2 * 16 + 2 < 7 * sum(lengths)


def _tokens_of_prompts(checkpoint, prompts):
    engine = policies.engine(policies.policy(checkpoint).model, enable_prefix_caching=True)
    wrapper, seen = engine._engine.controller.inference_wrapped_model, []
    stock = wrapper._forward

    def forward(inference_input):
        seen.append(engine._context.active_token_count)
        return stock(inference_input)

    wrapper._forward = forward
    engine.generate(prompts, policies.sampling(4), group_size=8)
    return seen


@pytest.mark.ranks(1)
def test_order_of_requests():
    assert list(engines._in_order(5, 2, 4)) == [0, 2, 1, 3, 4, 6, 5, 7, 8, 9]
    assert list(engines._in_order(2, 3, 2)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.ranks(1)
def test_sizes_of_graphs(checkpoint):
    """Few, none too small, and from 16 rows on none a quarter too large."""
    engine = policies.engine(policies.policy(checkpoint).model)
    decode = engine._engine.controller.decode
    decode._graphs = {}
    for multiple in (1, 2, 8):
        decode._multiple = multiple
        sizes = {n: decode._padded(n) for n in range(1, 1025)}
        assert all(n <= size < n + max(n / 4, 4, multiple) + 1 and size % multiple == 0 for n, size in sizes.items())
        assert len(set(sizes.values())) < 45


def test_recomputed_mlps(ranks, checkpoint, prompts):
    """`selective` computes MLPs again in a backward pass; the engine's steps and scoring go through them once."""
    (calls,) = ranks.run(_calls_of_an_mlp, checkpoint, prompts["text"])
    assert calls == {"engine": 4, "scoring": 1, "training": 2}


def _calls_of_an_mlp(checkpoint, prompt):
    policy = policies.policy(checkpoint, recompute="selective")
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model)
    layer, calls, seen = policy.model.language_model.decoder.layers[0], {}, []
    assert layer._recompute_mlp
    layer.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    ((rollout,),) = engine.generate([prompt], policies.sampling(4, ()))
    sequences = [sequence.TokenSequence(rollout.prompt, rollout.ids)]
    for name, call in [("engine", None), ("scoring", policies.score), ("training", policies.one_update)]:
        if call is not None:
            call(trainer, sequences)
        calls[name] = len(seen)
        seen.clear()
    return calls
