"""Gradients of every parameter against transformers' autograd, one sequence at a time."""

import pytest
import torch

from megarl.models.families import FAMILIES
from tests import tiny
from tests.distributed import LAYOUTS, TP1, TP2_SP, Layout, lazy

policies = lazy("tests.policies")

CP2 = Layout(2, 1, context_parallel=2)
TOLERANCE = 1e-4
"""Largest difference over the parameter's largest gradient."""


def loss(targets, log_probs, entropy):
    """Log-probability and entropy terms, weighted differently from token to token."""
    return -((1 + targets % 3) * log_probs).sum() - 0.3 * ((1 + targets % 2) * entropy).sum()


def row_loss(row, log_probs, entropy):
    return loss(row.targets, log_probs, entropy)


@pytest.fixture(scope="module")
def sequences(prompts):
    """Groups of 2: packed rows mix text and pictures, and sequences of a group share theirs."""
    return tiny.make_sequences(prompts, group=2)


@pytest.fixture(scope="module")
def expected(reference, sequences):
    return reference_gradients(reference.model, reference, sequences)


def reference_gradients(model, reference, sequences):
    model.zero_grad()
    for sequence in sequences:
        loss(sequence.completion, *reference.log_probs(sequence.prompt, sequence.completion)).backward()
    name_of = FAMILIES[model.config.model_type].name_in_checkpoint
    return {name_of(name): parameter.grad.clone() for name, parameter in model.named_parameters()}


def worst(found: dict, expected: dict) -> tuple[float, str]:
    """Largest relative difference and the name of its parameter."""
    assert found.keys() >= expected.keys()
    return max((float((found[name] - grad).abs().max() / grad.abs().max()), name) for name, grad in expected.items())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients(ranks, checkpoint, sequences, expected, layout, recompute):
    answers = ranks.run(
        _gradients, checkpoint, sequences, sequence_parallel=layout.sequence_parallel, recompute=recompute, **layout.job
    )
    assert min(float(grad.abs().max()) for grad in expected.values()) > 1e-3  # nothing is compared with 0
    for found in answers:
        assert worst(found, expected)[0] < TOLERANCE, worst(found, expected)


def _gradients(checkpoint, sequences, tokens_per_row=300, recompute="none", **options):
    policy = policies.policy(checkpoint, recompute=recompute, **options)
    assert policy.model.config.recompute_granularity == {"none": None}.get(recompute, recompute)
    trainer = policies.trainer(policy.model)
    packed = policies.rows(sequences, tokens_per_row)
    if tokens_per_row == 300:
        assert any(len(row.members) > 2 for row in packed)
        assert any(len(row.items) < sum(len(sequences[m].prompt.items) for m in row.members) for row in packed)
    return policies.gradients(policy, trainer, packed, row_loss)


@pytest.mark.parametrize("layout", [TP1, TP2_SP], ids=str)
def test_tied_embeddings(ranks, tied_checkpoint, sequences, layout):
    reference = tiny.Reference(tied_checkpoint)
    expected = reference_gradients(reference.model, reference, sequences)
    assert "lm_head.weight" not in expected
    answers = ranks.run(
        _gradients, tied_checkpoint, sequences, sequence_parallel=layout.sequence_parallel, **layout.job
    )
    for found in answers:
        assert worst(found, expected)[0] < TOLERANCE, worst(found, expected)


def test_rows_do_not_matter(ranks, checkpoint, sequences):
    """One sequence a row, and all in one row."""
    (alone,) = ranks.run(_gradients, checkpoint, sequences, tokens_per_row=180)
    (together,) = ranks.run(_gradients, checkpoint, sequences, tokens_per_row=4096)
    assert worst(alone, together)[0] < TOLERANCE, worst(alone, together)


PARTS = {
    "vision": ("model.visual.", lambda name: ".merger" not in name and ".deepstack_merger" not in name),
    "projector": ("model.visual.", lambda name: ".merger" in name or ".deepstack_merger" in name),
    "language": ("", lambda name: not name.startswith("model.visual.")),
}


@pytest.mark.parametrize("layout", [TP1, TP2_SP, CP2], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_frozen_parts(ranks, checkpoint, sequences, expected, part, layout):
    """A frozen part gets no gradient and does not move; the others get theirs and do."""
    answers = ranks.run(_freeze, checkpoint, sequences[:6], part, layout.sequence_parallel, **layout.job)
    moved = answers[0]
    prefix, inside = PARTS[part]
    frozen = {name for name in expected if name.startswith(prefix) and inside(name)}
    assert 0 < len(frozen) < len(expected)
    assert {name for name in expected if not moved[name]} == frozen


def _freeze(checkpoint, sequences, part, sequence_parallel):
    policy = policies.policy(checkpoint, sequence_parallel=sequence_parallel, freeze=(part,))
    trainer = policies.trainer(policy.model)
    for parameter in policy.model.parameters():
        assert parameter.requires_grad == hasattr(parameter, "main_grad")
    before = policies.weights(policy)
    policies.one_update(trainer, sequences)
    return {name: not torch.equal(weight, before[name]) for name, weight in policies.weights(policy).items()}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("what", ["picture", "video", "token"])
def test_no_cross_talk(checkpoint, prompts, what):
    """One sample's picture or clip, or one of its prompt's tokens, changes its log-probabilities and no other's, in
    one row with all of them."""
    import dataclasses

    trainer = policies.trainer(policies.policy(checkpoint).model)
    sequences = tiny.make_sequences(prompts)
    before = policies.score(trainer, sequences, tokens_per_row=4096)
    place = list(prompts).index("both" if what == "video" else "images")
    prompt = sequences[place].prompt
    if what != "token":
        assert prompt.items[1].kind == ("video" if what == "video" else "image")
        item = dataclasses.replace(prompt.items[1], pixels=-prompt.items[1].pixels, digest=b"other")
        prompt = dataclasses.replace(prompt, items=(prompt.items[0], item, *prompt.items[2:]))
    else:
        ids = prompt.ids.clone()
        ids[-2] = ids[-2] % 90 + 10
        prompt = dataclasses.replace(prompt, ids=ids)
    sequences[place] = dataclasses.replace(sequences[place], prompt=prompt)
    after = policies.score(trainer, sequences, tokens_per_row=4096)
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        assert (float((a - b).abs().max()) > 1e-3) if index == place else torch.equal(a, b)


TP2_CP2 = Layout(4, 2, context_parallel=2)
TP2_SP_CP2 = Layout(4, 2, sequence_parallel=True, context_parallel=2)
CONTEXT = {
    "cp2": (CP2, {}),
    "cp4": (Layout(4, 1, context_parallel=4), {}),
    "tp2-cp2": (TP2_CP2, {}),
    "tp2-sp-cp2": (TP2_SP_CP2, {}),
    "cp2-replicated": (CP2, {"vision_dp_when_cp": False}),
    "tp2-sp-cp2-replicated": (TP2_SP_CP2, {"vision_dp_when_cp": False}),
    "tp2-sp-cp2-recompute": (TP2_SP_CP2, {"recompute": "full"}),
}


@pytest.mark.parametrize("case", CONTEXT)
def test_context_parallel(ranks, checkpoint, sequences, expected, case):
    """With the media of a row spread over the ranks, and with all of it on each."""
    layout, options = CONTEXT[case]
    answers = ranks.run(
        _gradients, checkpoint, sequences, sequence_parallel=layout.sequence_parallel, **options, **layout.job
    )
    for found in answers:
        assert worst(found, expected)[0] < TOLERANCE, worst(found, expected)
