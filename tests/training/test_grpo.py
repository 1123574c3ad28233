"""A GRPO step against one written down again in plain PyTorch over transformers."""

import dataclasses

import pytest
import torch

from megarl.media.mask import mask_patches
from tests import tiny
from tests.distributed import LAYOUTS, Layout, lazy

policies = lazy("tests.policies")
grpo = lazy("megarl.training.grpo")
credits = lazy("megarl.training.credit")
objective = lazy("megarl.algorithms.objective")
perception = lazy("megarl.algorithms.perception")
reference_policy = lazy("megarl.training.reference")

RATE, GROUP = 2e-3, 2
SETTINGS = dict(clip_low=0.1, clip_high=0.15, kl_coefficient=0.3, entropy_coefficient=0.05)


@pytest.fixture(scope="module")
def batch(prompts):
    """(sequence, the engine's log-probabilities, advantage) of 4 groups of 2.  The log-probabilities are off by
    what may be a ratio beyond either bound.  Completions have different lengths."""
    generator = torch.Generator().manual_seed(8)
    chosen = {name: prompts[name] for name in ("text", "image", "images", "other_image")}
    sequences = tiny.make_sequences(chosen, GROUP)
    return [
        (sequence, -4.8 + torch.randn(sequence.completion.numel(), generator=generator), advantage)
        for sequence, advantage in zip(
            sequences, torch.randn(len(sequences), generator=generator).tolist(), strict=True
        )
    ]


def _step(checkpoint, batch, options, sequence_parallel=False, moved=False, settings=SETTINGS, credit=None):
    """Scores and a whole step: (weights before, scores, metrics, weights afterwards)."""
    policy = policies.policy(checkpoint, sequence_parallel=sequence_parallel)
    trainer = policies.trainer(policy.model, learning_rate=RATE, weight_decay=0.0, clip_grad=0.0)
    kept = reference_policy.ReferencePolicy(policy.model) if settings["kl_coefficient"] else None
    if moved:  # the policy is no longer its reference
        policies.one_update(trainer, [sequence for sequence, _, _ in batch])
        policies.begin(trainer, RATE, weight_decay=0.0, clip_grad=0.0)
    start = policies.weights(policy)
    samples = [credits.Sample(sequence, log_probs, (0.0,)) for sequence, log_probs, _ in batch]
    options = {"tokens_per_row": 200, "credit": credits.CreditOptions(GROUP), "seed": 5, **options}
    if "perception" in settings:
        settings = {**settings, "perception": perception.PerceptionOptions(**settings["perception"])}
    step = grpo.PolicyStep(
        trainer, kept, grpo.StepOptions(objective=objective.ObjectiveOptions(**settings), **options), tiny.MERGE
    )
    scored = step.score(samples)
    metrics = step.update(samples, scored, _credit(batch, **credit or {}), step=3)
    return start, (scored.trainer, scored.reference), metrics, policies.weights(policy)


def _credit(batch, corrections=None, kept=None):
    """As the test says, in place of what the rewards would give."""
    return credits.Credit(
        torch.tensor([advantage for _, _, advantage in batch]),
        corrections or [torch.ones(sequence.completion.numel()) for sequence, _, _ in batch],
        torch.tensor(kept or [True] * len(batch)),
    )


class Plain:
    """The same in plain PyTorch: its own loss, loop and AdamW."""

    def __init__(self, checkpoint, start):
        self.reference = tiny.Reference(checkpoint)
        self.policy = tiny.Reference(checkpoint)
        self.policy.model.load_state_dict(start)
        self.adam = torch.optim.AdamW(self.policy.model.parameters(), RATE, (0.9, 0.95), 1e-8, weight_decay=0.0)

    def scores(self, batch, model):
        with torch.no_grad():
            return [model.log_probs(s.prompt, s.completion)[0] for s, _, _ in batch]

    def step(self, batch, epochs, minibatches, old_log_probs):
        """Means of loss, ratio, clipped share, entropy and KL over all tokens of all updates; gradient norms."""
        trainer = self.scores(batch, self.policy)
        kept = self.scores(batch, self.reference)
        size = len(batch) // minibatches
        sums, tokens, norms = torch.zeros(5), 0, []
        for _ in range(epochs):
            for start in range(0, len(batch), size):
                total, count = 0.0, 0
                for index in range(start, start + size):
                    sequence, engine, advantage = batch[index]
                    old = engine if old_log_probs == "rollout" else trainer[index]
                    log_probs, entropy = self.policy.log_probs(sequence.prompt, sequence.completion)
                    for t in range(len(log_probs)):
                        ratio = torch.exp(log_probs[t] - old[t])
                        bounded = torch.clamp(ratio, 0.9, 1.15)
                        gain = torch.min(ratio * advantage, bounded * advantage)
                        clipped = bool(ratio > 1.15) if advantage > 0 else bool(ratio < 0.9)
                        distance = kept[index][t] - log_probs[t]
                        kl = torch.exp(distance) - distance - 1
                        loss = -gain + 0.3 * kl - 0.05 * entropy[t]
                        total, count = total + loss, count + 1
                        sums += torch.tensor([float(x) for x in (loss, ratio, clipped, entropy[t], kl)])
                tokens += count
                for parameter in self.policy.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)  # without pictures the tower's is 0, not absent
                (total / count).backward()
                norms.append(float(torch.stack([p.grad.norm() for p in self.policy.model.parameters()]).norm()))
                self.adam.step()
        return (sums / tokens).tolist(), norms


@pytest.mark.parametrize(
    "options",
    [
        dict(epochs=1, minibatches=1, old_log_probs="trainer"),
        dict(epochs=1, minibatches=1, old_log_probs="rollout"),
        dict(epochs=2, minibatches=2, old_log_probs="trainer"),
        dict(epochs=2, minibatches=4, old_log_probs="rollout"),
    ],
    ids=str,
)
def test_against_plain_pytorch(ranks, checkpoint, batch, options):
    start, (trainer, kept), metrics, _ = ranks.run(_step, checkpoint, batch, options, moved=True)[0]
    plain = Plain(checkpoint, start)
    for found, expected in ((trainer, plain.policy), (kept, plain.reference)):
        for a, b in zip(found, plain.scores(batch, expected), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    (loss, ratio, clipped, entropy, kl), norms = plain.step(batch, **options)
    # Adam turns rounding into whole steps where a gradient is almost 0, so later updates drift a little.
    close = 1e-4 if len(norms) == 1 else 2e-3
    assert metrics["policy/loss"] == pytest.approx(loss, rel=close, abs=close)
    assert metrics["policy/ratio"] == pytest.approx(ratio, rel=close)
    assert metrics["policy/entropy"] == pytest.approx(entropy, rel=close)
    assert metrics["policy/kl"] == pytest.approx(kl, rel=close, abs=close)
    assert metrics["policy/clip_fraction"] == pytest.approx(clipped, abs=1e-6 if len(norms) == 1 else 0.02)
    assert metrics["optimizer/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=close)
    assert metrics["optimizer/skipped_updates"] == 0
    if options["old_log_probs"] == "rollout":
        assert clipped > 0.05  # the clipping is at work


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(ranks, checkpoint, batch, layout):
    options = dict(epochs=1, minibatches=2, old_log_probs="rollout")
    (one,) = ranks.run(_step, checkpoint, batch, options)
    answers = ranks.run(_step, checkpoint, batch, options, layout.sequence_parallel, **layout.job)
    for _, _, metrics, _ in answers:
        assert metrics == pytest.approx(one[2], rel=1e-3, abs=1e-5)


def test_data_parallel(ranks, checkpoint, batch):
    """Two ranks with half of the groups each give the step of one with all of them."""
    options = dict(epochs=1, minibatches=1, old_log_probs="rollout")
    (one,) = ranks.run(_step, checkpoint, batch, options)
    for _, _, metrics, _ in ranks.run(_half, checkpoint, batch, options, world_size=2):
        assert metrics == pytest.approx(one[2], rel=1e-4, abs=1e-5)


def _half(checkpoint, batch, options):
    from megatron.core import parallel_state

    rank, half = parallel_state.get_data_parallel_rank(), len(batch) // 2
    return _step(checkpoint, batch[rank * half : (rank + 1) * half], options)


VARIANTS = {
    "sequence mean": (dict(), dict(normalization="sequence")),
    "constant length": (dict(entropy_coefficient=0.05), dict(normalization="constant", max_new_tokens=17)),
    "GSPO": (dict(ratio="sequence", clip_low=0.02, clip_high=0.03), dict(normalization="sequence")),
    "dual clip, k1": (dict(dual_clip=1.3, kl_coefficient=0.3, kl_estimator="k1"), dict()),
    "CISPO": (dict(surrogate="cispo", clip_low=1.0, clip_high=0.1), dict()),
    "PAPO": (
        dict(perception=dict(coefficient=0.4, mask_ratio=0.5, entropy_coefficient=0.1, masked_entropy_coefficient=0.2)),
        dict(normalization="sequence"),
    ),
    "unclipped, k2": (dict(surrogate="unclipped", kl_coefficient=0.3, kl_estimator="k2"), dict()),
}
KEPT = [True, False, True, True, True, True, True, False]


def _variant(checkpoint, batch, corrections, name, layout):
    """Metrics of one update on what this data-parallel rank has of the batch, and the weights that it gives."""
    from megatron.core import parallel_state

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = slice(rank * len(batch) // ranks, (rank + 1) * len(batch) // ranks)
    settings, options = VARIANTS[name]
    options = dict(epochs=1, minibatches=1, old_log_probs="rollout", tokens_per_row=layout[1], **options)
    credit = dict(corrections=corrections[mine], kept=KEPT[mine])
    settings = {"kl_coefficient": 0.0, **settings}
    _, _, metrics, _ = _step(checkpoint, batch[mine], options, layout[0], True, settings, credit)
    return metrics


def _plain_loss(checkpoint, start, batch, corrections, name):
    """Loss and gradient norm of one update, sequence by sequence, from the definitions."""
    plain = Plain(checkpoint, start)
    settings, options = VARIANTS[name]
    o = dict(dict(clip_low=0.2, clip_high=0.2, ratio="token", surrogate="clipped", dual_clip=None), **settings)
    kept = plain.scores(batch, plain.reference)
    means, tokens = [], sum(s.completion.numel() for (s, _, _), keep in zip(batch, KEPT, strict=True) if keep)
    for index, (sequence, old, advantage) in enumerate(batch):
        if not KEPT[index]:
            continue
        log_probs, entropy = plain.policy.log_probs(sequence.prompt, sequence.completion)
        losses = []
        for t in range(len(log_probs)):
            away = (log_probs - old).mean() if o["ratio"] == "sequence" else log_probs[t] - old[t]
            ratio = torch.exp(away)
            bounded = ratio.clamp(1 - o["clip_low"], 1 + o["clip_high"])
            if o["surrogate"] == "cispo":
                loss = -bounded.detach() * advantage * log_probs[t]
            elif o["surrogate"] == "unclipped":
                loss = -ratio * advantage
            else:
                loss = -torch.min(ratio * advantage, bounded * advantage)
                if o["dual_clip"] and advantage < 0:
                    loss = torch.min(loss, torch.tensor(-o["dual_clip"] * advantage))
            loss = loss * corrections[index][t] - o.get("entropy_coefficient", 0.0) * entropy[t]
            d = log_probs[t] - kept[index][t]
            loss = loss + o.get("kl_coefficient", 0.0) * (d if o.get("kl_estimator") == "k1" else d * d / 2)
            losses.append(loss)
        if "perception" in o and sequence.prompt.items:
            items = tuple(mask_patches(item, 0.5, "5/3/") for item in sequence.prompt.items)
            hidden = dataclasses.replace(sequence.prompt, items=items)
            less, flat = plain.policy.log_probs(hidden, sequence.completion)
            d = log_probs - less
            losses.append((-0.4 * (torch.exp(-d) + d - 1) + 0.1 * entropy + 0.2 * flat).sum())
        summed = torch.stack(losses).sum()
        divisor = {"token": tokens, "sequence": len(log_probs) * sum(KEPT), "constant": 17 * sum(KEPT)}
        means.append(summed / divisor[options.get("normalization", "token")])
    for parameter in plain.policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss = torch.stack(means).sum()
    loss.backward()
    return float(loss), float(torch.stack([p.grad.norm() for p in plain.policy.model.parameters()]).norm())


def _start(checkpoint, batch):
    policy = policies.policy(checkpoint)
    trainer = policies.trainer(policy.model, learning_rate=RATE, weight_decay=0.0, clip_grad=0.0)
    policies.one_update(trainer, [sequence for sequence, _, _ in batch])
    return policies.weights(policy)


CUTS = [
    (Layout(1, 1), 200),
    (Layout(1, 1), 4096),
    (Layout(2, 1), 200),
    (Layout(2, 1, context_parallel=2), 400),
    (Layout(2, 2, sequence_parallel=True), 256),
]


QUICK = ("constant length", "GSPO", "PAPO")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_variants_against_plain_pytorch(ranks, checkpoint, batch, name):
    """Loss and gradient norm of each objective: the same from rows of any size, from data-parallel ranks with half of
    the batch, and from ranks that share rows."""
    generator = torch.Generator().manual_seed(9)
    corrections = [torch.rand(s.completion.numel(), generator=generator) * 2 for s, _, _ in batch]
    (start,) = ranks.run(_start, checkpoint, batch)
    loss, norm = _plain_loss(checkpoint, start, batch, corrections, name)
    for layout, tokens_per_row in CUTS:
        where = layout.sequence_parallel, tokens_per_row
        for metrics in ranks.run(_variant, checkpoint, batch, corrections, name, where, **layout.job):
            assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-4), (layout, tokens_per_row)
            assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-4), (layout, tokens_per_row)


def test_first_update_has_ratio_one(ranks, checkpoint, batch):
    """With the trainer's own log-probabilities nothing is clipped before the first update, and without the
    coefficients no reference is scored."""
    settings = {**SETTINGS, "kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    options = dict(epochs=1, minibatches=1, old_log_probs="trainer")
    ((_, (_, kept), metrics, _),) = ranks.run(_step, checkpoint, batch, options, settings=settings)
    tokens = [s.completion.numel() for s, _, _ in batch]
    mean = sum(n * a for n, (_, _, a) in zip(tokens, batch, strict=True)) / sum(tokens)
    assert kept is None
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/kl"] == 0
    assert metrics["policy/loss"] == pytest.approx(-mean, abs=1e-5)


@pytest.mark.ranks(1)
def test_supervised_update(checkpoint, prompts):
    """Returns the mean loss a token before its update, and lowers it."""
    trainer = policies.trainer(policies.policy(checkpoint).model, learning_rate=1e-3)
    sequences = tiny.make_sequences(prompts)
    scores = torch.cat(policies.score(trainer, sequences))
    losses = [grpo.supervised_update(trainer, sequences, 200, tiny.MERGE) for _ in range(3)]
    assert losses[0] == pytest.approx(-float(scores.mean()), abs=1e-5)
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.ranks(1)
def test_zero_advantages_and_no_terms(checkpoint, prompts):
    """A batch that teaches nothing has no gradient and is no error."""
    policy = policies.policy(checkpoint)
    trainer = policies.trainer(policy.model, weight_decay=0.0)
    sequences = tiny.make_sequences(prompts, GROUP)
    samples = [credits.Sample(s, torch.full((s.completion.numel(),), -4.8), (0.7, 0.1)) for s in sequences]
    options = grpo.StepOptions(objective.ObjectiveOptions(), credits.CreditOptions(GROUP), 1, 1, "trainer", 256)
    step = grpo.PolicyStep(trainer, None, options, tiny.MERGE)
    before = policies.weights(policy)
    scored = step.score(samples)
    metrics = step.update(samples, scored, step.credit(samples, scored))
    assert metrics["optimizer/grad_norm"] == 0
    assert all(torch.equal(weight, before[name]) for name, weight in policies.weights(policy).items())
