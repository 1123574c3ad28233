"""The rollout engine against the trainer and against transformers; its sampling, its limits and its caches."""

from itertools import pairwise

import pytest
import torch

from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, lazy

policies = lazy("tests.policies")
packing = lazy("megarl.packing.rows")
parallel_state = lazy("megatron.core.parallel_state")

MODES = {
    "plain": {},
    "prefix-cache": {"enable_prefix_caching": True},
    "chunked": {"enable_chunked_prefill": True, "max_tokens_per_step": 64},
    "both": {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_tokens_per_step": 64},
}
BOTH = MODES["both"]
TOLERANCE = 1e-5


@pytest.fixture(params=[TP1, TP2_SP], ids=str)
def layout(request):
    return request.param


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


def in_layouts(*cases):
    """One rank in every mode, and several ranks in one mode each: what a mode does is the same on all of them."""
    cases = [*((TP1, name) for name in MODES), *cases]
    return pytest.mark.parametrize("layout, mode", [pytest.param(a, MODES[b], id=f"{a}-{b}") for a, b in cases])


# Engine = trainer = transformers


@in_layouts((TP2, "plain"), (TP2_SP, "both"))
def test_log_probs(ranks, checkpoint, prompts, reference, layout, mode):
    """Sampled tokens of a mixed batch, groups of 2: the same log-probability everywhere, tokens the same on
    every rank."""
    answers = ranks.run(_sample_and_score, checkpoint, list(prompts.values()), layout, mode, **layout.job)
    same_on_all_ranks(answers)
    for name, prompt, group in zip(prompts, prompts.values(), answers[0]["groups"], strict=True):
        for ids, engine, trainer in group:
            expected = reference.log_probs(prompt, ids)[0]
            assert largest(engine - expected) < TOLERANCE, name
            assert largest(trainer - expected) < TOLERANCE, name
    splits = [n for n in answers[0]["tokens_per_step"] if n > 0]
    longest = max(p.ids.numel() for p in prompts.values())
    assert (max(splits) <= 64 < longest) == mode.get("enable_chunked_prefill", False)


def _sample_and_score(checkpoint, prompts, layout, mode):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, **mode)
    seen = _watch(engine)
    groups = engine.generate(prompts, policies.sampling(), group_size=2)
    return {"groups": _scored(trainer, groups), "tokens_per_step": seen}


def _watch(engine) -> list[int]:
    """Tokens of each later step."""
    seen, wrapper = [], engine._engine.controller.inference_wrapped_model
    stock = wrapper._forward

    def forward(inference_input):
        seen.append(engine._context.active_token_count)
        return stock(inference_input)

    wrapper._forward = forward
    return seen


def _scored(trainer, groups):
    """(ids, engine's log-probabilities, trainer's) of each rollout of each group."""
    rollouts = [rollout for group in groups for rollout in group]
    scores = policies.score(trainer, [packing.TokenSequence(r.prompt, r.ids) for r in rollouts])
    flat = iter([(r.ids, r.log_probs, s) for r, s in zip(rollouts, scores, strict=True)])
    return [[next(flat) for _ in group] for group in groups]


def test_greedy(ranks, checkpoint, prompts, reference, layout):
    """Temperature 0 gives what transformers' `generate(do_sample=False)` gives."""
    stop = reference.model.generation_config.eos_token_id or reference.model.config.text_config.eos_token_id
    answers = ranks.run(_greedy, checkpoint, list(prompts.values()), layout, stop, **layout.job)
    same_on_all_ranks(answers)
    for name, prompt, ids in zip(prompts, prompts.values(), answers[0], strict=True):
        assert ids.tolist() == reference.greedy(prompt, 12).tolist(), name


def _greedy(checkpoint, prompts, layout, stop):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    sampling = policies.sampling(12, (stop,), temperature=0.0)
    groups = policies.engine(policy.model, **BOTH).generate(prompts, sampling)
    return [rollout.ids for (rollout,) in groups]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sequence_parallel_is_real(ranks, checkpoint, prompts, sequence_parallel):
    """Each rank's decoder layers see half the tokens with sequence parallelism and all of them without, in
    the engine and in the trainer."""
    answers = ranks.run(_decoder_tokens, checkpoint, prompts["image"], sequence_parallel, **TP2.job)
    for engine_padded, engine_seen, row, trainer_seen in answers:
        share = 2 if sequence_parallel else 1
        assert engine_seen == engine_padded // share
        assert trainer_seen == row // share


def _decoder_tokens(checkpoint, prompt, sequence_parallel):
    policy = policies.policy(checkpoint, sequence_parallel=sequence_parallel)
    assert policy.model.config.sequence_parallel == sequence_parallel
    seen = []
    layer = policy.model.language_model.decoder.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[0]),
        with_kwargs=True,
    )
    engine = policies.engine(policy.model)
    padded = []
    stock = engine._engine.controller.inference_wrapped_model._forward

    def forward(inference_input):
        padded.append(inference_input["tokens"].shape[1])
        return stock(inference_input)

    engine._engine.controller.inference_wrapped_model._forward = forward
    engine.generate([prompt], policies.sampling(1))
    sequence = packing.TokenSequence(prompt, torch.tensor([20, 21]))
    trainer = policies.trainer(policy.model)
    policies.score(trainer, [sequence])
    (row,) = policies.rows([sequence])
    return padded[0], seen[0], row.ids.numel(), seen[-1]


# The weights change


def test_after_an_update(ranks, checkpoint, prompts, layout):
    """After a training step and the hook: engine = trainer, with all caches.  The step moved every log-
    probability much more than the tolerance."""
    answers = ranks.run(_update_between, checkpoint, list(prompts.values()), layout, True, **layout.job)
    assert answers[0]["moved"] > 0.1
    assert max(answer["error"] for answer in answers) < TOLERANCE


def test_without_the_hook(ranks, checkpoint, prompts, layout):
    """Poison: the prefix cache and the feature cache serve what older weights computed, and it shows."""
    answers = ranks.run(_update_between, checkpoint, list(prompts.values()), layout, False, **layout.job)
    assert min(answer["error"] for answer in answers) > 1e-2


@pytest.mark.parametrize("cache", ["prefix", "features"])
def test_each_cache_is_cleared(ranks, checkpoint, prompts, cache):
    """Each of the two caches alone would be stale: the other one is cleared by hand."""
    batch = [prompts[name] for name in (("long_text", "text") if cache == "prefix" else ("images", "image"))]
    mode = {"enable_prefix_caching": cache == "prefix"}
    (good,) = ranks.run(_update_between, checkpoint, batch, TP1, True, mode)
    (stale,) = ranks.run(_update_between, checkpoint, batch, TP1, False, mode)
    assert good["error"] < TOLERANCE
    assert stale["error"] > 1e-2


def _update_between(checkpoint, prompts, layout, tell, mode=BOTH):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, **mode)
    sequences = [
        packing.TokenSequence(rollout.prompt, rollout.ids)
        for (rollout,) in engine.generate(prompts, policies.sampling())
    ]
    before = policies.score(trainer, sequences)
    policies.one_update(trainer, sequences)
    moved = min(largest(a - b) for a, b in zip(policies.score(trainer, sequences), before, strict=True))
    if tell:
        engine.weights_changed()
    scored = _scored(trainer, engine.generate(prompts, policies.sampling()))
    return {"moved": moved, "error": max(largest(e - t) for group in scored for _, e, t in group)}


def test_training_goes_on_after_generation(ranks, checkpoint, prompts, layout):
    """Gradients after a generation are those without one, although the engine ran the same module in inference
    mode; `train` and `eval` are restored as they were."""
    answers = ranks.run(_gradients_around_generation, checkpoint, prompts, layout, **layout.job)
    for error, modes in answers:
        assert error == 0.0
        assert modes == [True, False]


def _gradients_around_generation(checkpoint, prompts, layout):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model)
    rows = policies.rows(tiny.make_sequences(prompts))
    # First the engine, in steps larger than a row: Megatron's scratch memory is then its own.
    engine.generate(list(prompts.values()), policies.sampling())
    after, modes = _gradients(trainer, rows), []
    for training in (True, False):
        policy.model.train(training)
        engine.generate(list(prompts.values()), policies.sampling())
        modes.append(policy.model.training)
    parallel_state.get_global_memory_buffer().buffer.clear()
    fresh = _gradients(trainer, rows)
    assert min(g.abs().max() for g in fresh.values()) > 0
    return max(largest(after[name] - fresh[name]) for name in fresh), modes


def _gradients(trainer, rows):
    trainer._ddp.train()
    trainer._ddp.zero_grad_buffer()
    trainer._run(rows, lambda row, out: (out[0].sum(), out.sum().detach()), forward_only=False)
    return {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}


# Draws


def test_draws_depend_on_the_key_alone(ranks, checkpoint, prompts):
    """Equal keys: equal rollouts, alone and in any batch, at TP1 and TP2 and with any engine mode.  Different
    keys: different ones; rollouts of a group differ."""
    names = ["image", "long_text", "text"]
    drawn = [
        ranks.run(_draws, checkpoint, prompts, names, layout, mode, **layout.job)
        for layout, mode in ((TP1, {}), (TP1, BOTH), (TP2, BOTH), (TP2_SP, {}))
    ]
    for answers in drawn:
        same_on_all_ranks(answers)
        assert answers[0] == drawn[0][0]
    together, alone, reordered, other_keys = drawn[0][0]
    assert together == alone == reordered
    for name in names:
        assert together[name][0] != together[name][1]
        assert all(a != b for a, b in zip(together[name], other_keys[name], strict=True))


def _draws(checkpoint, prompts, names, layout, mode):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    engine = policies.engine(policy.model, **mode)
    keys = {name: 2**62 + 11 * place for place, name in enumerate(names)}

    def run(order, keys):
        groups = engine.generate([prompts[n] for n in order], policies.sampling(), 2, [keys[n] for n in order])
        return {name: [r.ids.tolist() for r in group] for name, group in zip(order, groups, strict=True)}

    together = run(names, keys)
    alone = {name: run([name], keys)[name] for name in names}
    reordered = run([*reversed(names), "images"], {**keys, "images": 5})
    reordered.pop("images")
    return together, alone, reordered, run(names, {name: key + 1 for name, key in keys.items()})


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"temperature": 1.5, "top_p": 0.6}],
    ids=str,
)
def test_distribution_of_draws(ranks, checkpoint, prompts, reference, options):
    """4,096 first tokens against the filtered distribution of transformers' logits: chi-square, and the
    log-probabilities are that distribution's.  The unfiltered distribution is told apart."""
    prompt = prompts["image"]
    ((tokens, log_probs),) = ranks.run(_first_tokens, checkpoint, prompt, options)
    logits = reference.logits(prompt, torch.tensor([20]))[prompt.ids.numel() - 1].detach().double()
    expected = filtered(logits, **options)
    assert largest(log_probs.double() - expected.log()[tokens]) < TOLERANCE
    assert p_value(tokens, expected) > 1e-3
    for wrong in ({"temperature": 1.3}, {"top_k": 6}, {"top_p": 0.8}):
        assert p_value(tokens, filtered(logits, **wrong)) < 1e-3


def _first_tokens(checkpoint, prompt, options):
    policy = policies.policy(checkpoint)
    engine = policies.engine(policy.model, max_requests=512, enable_prefix_caching=True, kv_cache_gb=0.1)
    (group,) = engine.generate([prompt], policies.sampling(1, **options), 4096, keys=[3])
    return torch.cat([r.ids for r in group]), torch.cat([r.log_probs for r in group])


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The sampling distribution, one token at a time in plain Python."""
    probabilities = (logits / temperature).softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept, mass = [], 0.0
    for token in order[: top_k or None]:
        if mass >= top_p:
            break
        kept.append(token)
        mass += probabilities[token]
    out = torch.zeros(len(probabilities), dtype=torch.float64)
    out[kept] = torch.tensor([probabilities[i] for i in kept], dtype=torch.float64)
    return out / out.sum()


def p_value(tokens, expected) -> float:
    """Of Pearson's test; cells that expect less than 5 draws are one cell."""
    from scipy.stats import chisquare

    counts = torch.bincount(tokens, minlength=expected.numel()).double()
    if counts[expected == 0].any():
        return 0.0
    want = expected * counts.sum()
    small = want < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    want = torch.cat([want[~small], want[small].sum()[None]])
    keep = want > 0
    return float(chisquare(counts[keep].numpy(), want[keep].numpy()).pvalue)


# Ends and limits


@pytest.mark.ranks(1)
def test_stop_tokens(checkpoint, prompts):
    """Each of several stop tokens ends a completion, is its last token and makes it `finished`; without them a
    completion has the asked length and is not finished."""
    engine = policies.engine(policies.policy(checkpoint).model)
    batch = list(prompts.values())
    free = [r.ids.tolist() for (r,) in engine.generate(batch, policies.sampling(12, (), temperature=0.0))]
    assert all(len(ids) == 12 for ids in free)
    stops = {free[0][4], free[1][2], free[4][0]}
    lengths = set()
    for ids, (rollout,) in zip(
        free, engine.generate(batch, policies.sampling(12, tuple(stops), temperature=0.0)), strict=True
    ):
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        assert rollout.ids.tolist() == (ids if end is None else ids[: end + 1])
        assert rollout.finished == (end is not None)
        assert rollout.log_probs.shape == rollout.ids.shape
        lengths.add(rollout.ids.numel())
    assert len(lengths) > 2


@pytest.mark.ranks(1)
def test_stop_at_the_length_limit(checkpoint, prompts):
    """A stop token at the last place that is allowed still counts as finished."""
    engine = policies.engine(policies.policy(checkpoint).model)
    ((free,),) = engine.generate([prompts["text"]], policies.sampling(3, (), temperature=0.0))
    assert not free.finished
    ((stopped,),) = engine.generate([prompts["text"]], policies.sampling(3, (int(free.ids[2]),), temperature=0.0))
    assert stopped.finished == (int(free.ids[2]) in free.ids.tolist())


@pytest.mark.ranks(1)
def test_no_prompts(checkpoint):
    policy = policies.policy(checkpoint)
    assert policies.engine(policy.model).generate([], policies.sampling(), 4) == []


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "limits",
    [
        {"max_requests": 3},
        {"max_requests": 3, **BOTH},
        {"kv_cache_gb": 0.0006},
        {"kv_cache_gb": 0.0006, **BOTH},
        {"kv_cache_gb": 0.0006, "enable_chunked_prefill": True, "max_tokens_per_step": 64},
    ],
    ids=str,
)
def test_scarcity(checkpoint, prompts, limits):
    """More requests than fit at a time, or too few KV blocks for those that fit: requests wait, are paused and
    evicted, and get what they get with plenty."""
    policy = policies.policy(checkpoint)
    batch, sampling = list(prompts.values()), policies.sampling(40, ())
    plenty = policies.engine(policy.model, kv_cache_gb=0.1, max_requests=64).generate(batch, sampling, 3)
    engine = policies.engine(policy.model, **limits)
    scarce = engine.generate(batch, sampling, 3)
    assert_equal_rollouts(scarce, plenty)
    if "kv_cache_gb" in limits:
        assert engine._engine.evicted_request_count > 0
    again = engine.generate(batch, sampling, 3)  # nothing is left over from the first time
    assert [r.ids.tolist() for g in again for r in g] == [r.ids.tolist() for g in scarce for r in g]


@pytest.mark.ranks(1)
def test_pictures_are_encoded_once(checkpoint, prompts):
    """Once a weight version, however many rollouts, prompts and calls use them."""
    engine = policies.engine(policies.policy(checkpoint).model, **BOTH)
    batch = list(prompts.values())
    items = [item for prompt in batch for item in prompt.items]
    distinct = len({item.digest for item in items})
    assert distinct == 6 < len(items)
    for time in range(1, 3):
        engine.generate(batch, policies.sampling(2), 3)
        assert engine.features.encoded == distinct
        assert engine.asked == time * 3 * len(items)
    engine.weights_changed()
    engine.generate(batch, policies.sampling(2), 3)
    assert engine.features.encoded == 2 * distinct


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("patches_per_pass", [16, 65536])
def test_few_features_at_a_time(checkpoint, prompts, mode, patches_per_pass):
    """A budget below the features of one prompt, and passes below one picture: the same rollouts, and no more is
    kept than the budget says."""
    model = policies.policy(checkpoint).model
    batch, sampling = list(prompts.values()), policies.sampling()
    plenty = policies.engine(model, **MODES[mode]).generate(batch, sampling, 2)
    budget = 8 * model.feature_row_bytes
    engine = policies.engine(model, vision_cache_bytes=budget, patches_per_pass=patches_per_pass, **MODES[mode])
    assert_equal_rollouts(engine.generate(batch, sampling, 2), plenty)
    assert 0 < engine.features.bytes <= budget


# Interruptions


@in_layouts((TP2_SP, "both"))
def test_suspended_in_mid_generation(ranks, checkpoint, prompts, layout, mode):
    """Between any two steps the engine sleeps and the trainer runs forward and backward on the same module: every
    rollout is what it is undisturbed."""
    for error, tokens_equal, rounds in ranks.run(
        _interrupted, checkpoint, list(prompts.values()), layout, mode, **layout.job
    ):
        assert tokens_equal and error < TOLERANCE
        assert rounds >= 5


def _interrupted(checkpoint, prompts, layout, mode):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, **mode)
    sampling = policies.sampling()
    whole = engine.generate(prompts, sampling, 2)
    engine.weights_changed()  # so that the second time nothing is cached
    engine.start(prompts, sampling, 2)
    rows, rounds = policies.rows(tiny.make_sequences(dict(enumerate(prompts)))), 1
    while not engine.advance(max_steps=2):
        assert policy.model.training
        _gradients(trainer, rows)
        rounds += 1
    again = engine.collect()
    pairs = [(a, b) for x, y in zip(whole, again, strict=True) for a, b in zip(x, y, strict=True)]
    tokens_equal = all(a.ids.tolist() == b.ids.tolist() for a, b in pairs)
    return max(largest(a.log_probs - b.log_probs) for a, b in pairs), tokens_equal, rounds


@in_layouts((TP2_SP, "both"))
def test_weights_change_in_mid_generation(ranks, checkpoint, prompts, layout, mode):
    """What was sampled before the update has the old weights' log-probabilities, what came after it the new ones',
    of the whole sequence so far: nothing that older weights computed is served."""
    for old, new, counts, moved in ranks.run(
        _update_in_between, checkpoint, list(prompts.values()), layout, mode, **layout.job
    ):
        assert old < TOLERANCE and new < TOLERANCE
        assert min(counts) > 0
        assert moved > 0.1


def _update_in_between(checkpoint, prompts, layout, mode):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, **mode)
    frozen = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    engine.start(prompts, policies.sampling(8, ()), 2)
    # Prefill in chunks takes several steps: some requests have begun, others wait, when the weights change.
    engine.advance(max_steps=6)
    done = engine._engine.completions.count.clone()
    policies.one_update(trainer, tiny.make_sequences(dict(enumerate(prompts))))
    engine.weights_changed()
    assert engine.advance()
    rollouts = [rollout for group in engine.collect() for rollout in group]
    sequences = [packing.TokenSequence(r.prompt, r.ids) for r in rollouts]
    new = policies.score(trainer, sequences)
    old = policies.score(policies.trainer(frozen.model), sequences)
    errors_old = [largest((r.log_probs - o)[:n]) for r, o, n in zip(rollouts, old, done, strict=True) if n > 0]
    errors_new = [largest((r.log_probs - o)[n:]) for r, o, n in zip(rollouts, new, done, strict=True) if n < 8]
    moved = min(largest(a - b) for a, b in zip(old, new, strict=True))
    return max(errors_old), max(errors_new), (len(errors_old), len(errors_new)), moved


@pytest.mark.ranks(1)
def test_abandoned(checkpoint, prompts):
    """A generation that is dropped half way leaves nothing behind; two at a time are refused."""
    engine = policies.engine(policies.policy(checkpoint).model, **BOTH)
    batch, sampling = list(prompts.values()), policies.sampling()
    whole = engine.generate(batch, sampling, 2)
    engine.start(batch, policies.sampling(temperature=0.0), 3)
    for change in (engine.advance, lambda max_steps: engine.weights_changed()):
        change(max_steps=4)
        with pytest.raises(RuntimeError, match="a generation is live"):
            engine.generate(batch, sampling)
        with pytest.raises(RuntimeError, match="not at its end"):
            engine.collect()
    engine.abandon()
    engine.abandon()
    with pytest.raises(RuntimeError, match="nothing to collect"):
        engine.collect()
    engine.weights_changed()
    assert_equal_rollouts(engine.generate(batch, sampling, 2), whole)


# Samples do not touch each other


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_no_cross_talk(checkpoint, prompts, kind, mode):
    """Another picture, or another clip, in one prompt of a batch moves that prompt's log-probabilities and no
    other's; the caches are warm with the first one."""
    engine = policies.engine(policies.policy(checkpoint).model, **MODES[mode])
    batch = {name: prompt for name, prompt in prompts.items() if name != f"other_{kind}"}
    changed = {**batch, kind: prompts[f"other_{kind}"]}
    assert torch.equal(batch[kind].ids, changed[kind].ids)
    # Greedy and one token: completions are equal wherever the distribution is.
    sampling = policies.sampling(1, (), temperature=0.0)
    before, after = (engine.generate(list(b.values()), sampling) for b in (batch, changed))
    for name, (a,), (b,) in zip(batch, before, after, strict=True):
        moved = largest(a.log_probs - b.log_probs)
        assert moved > 1e-3 if name == kind else moved < 1e-6, name


@pytest.mark.ranks(1)
def test_after_a_failed_call(checkpoint, prompts):
    """An exception inside a generation leaves the model trainable and as it was."""
    policy = policies.policy(checkpoint)
    engine = policies.engine(policy.model)
    policy.model.train()
    engine._engine.controller.inference_wrapped_model._forward = None  # called, it raises
    with pytest.raises(TypeError):
        engine.generate([prompts["text"]], policies.sampling())
    assert policy.model.training
    trainer = policies.trainer(policy.model)
    policies.one_update(trainer, tiny.make_sequences(prompts))


# Helpers


def largest(values: torch.Tensor) -> float:
    return float(values.detach().abs().max())


def assert_equal_rollouts(some: list, others: list) -> None:
    for a, b in zip([r for g in some for r in g], [r for g in others for r in g], strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert largest(a.log_probs - b.log_probs) < TOLERANCE


def same_on_all_ranks(answers: list) -> None:
    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value

    for one, other in pairwise(map(plain, answers)):
        assert one == other
