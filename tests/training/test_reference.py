"""The reference policy is swapped in and out exactly, after an exception too."""

import pytest
import torch

from tests import tiny
from tests.distributed import TP1, TP2_SP, lazy

policies = lazy("tests.policies")
reference = lazy("megarl.training.reference")
build = lazy("megarl.models.build")


def _state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.ranks(1)
def test_swap(checkpoint, prompts):
    """Bit for bit: the snapshot inside, the trained weights outside, whichever way the block ends."""
    policy = policies.policy(checkpoint)
    trainer, sequences = policies.trainer(policy.model), tiny.make_sequences(prompts)
    start = _state(policy.model)
    scores = policies.score(trainer, sequences)
    kept = reference.ReferencePolicy(policy.model)
    for _ in range(2):
        policies.one_update(trainer, sequences)
        trained = _state(policy.model)
        assert not _equal(trained, start)
        with kept.swapped_in():
            assert _equal(_state(policy.model), start)
            for a, b in zip(policies.score(trainer, sequences), scores, strict=True):
                assert torch.equal(a, b)
        assert _equal(_state(policy.model), trained)
        with pytest.raises(RuntimeError, match="inside"), kept.swapped_in():
            raise RuntimeError("inside")
        assert _equal(_state(policy.model), trained)
        assert _equal(kept.weights, start)


@pytest.mark.ranks(1)
def test_only_what_is_trained_is_kept(checkpoint):
    policy = policies.policy(checkpoint, freeze=("vision", "projector"))
    kept = reference.ReferencePolicy(policy.model)
    assert kept.weights.keys() == {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert all(name.startswith("language_model.") for name in kept.weights)


@pytest.mark.ranks(1)
def test_parameters_stay_where_they_are(checkpoint, prompts):
    """The optimizer and the engine hold views of the parameters' memory: a swap must write into it."""
    policy = policies.policy(checkpoint)
    trainer = policies.trainer(policy.model)
    places = {name: parameter.data_ptr() for name, parameter in policy.model.named_parameters()}
    kept = reference.ReferencePolicy(policy.model)
    policies.one_update(trainer, tiny.make_sequences(prompts))
    with kept.swapped_in():
        assert places == {name: parameter.data_ptr() for name, parameter in policy.model.named_parameters()}
    assert places == {name: parameter.data_ptr() for name, parameter in policy.model.named_parameters()}


@pytest.mark.ranks(1)
def test_take(checkpoint, prompts):
    """A reference that moves: what was trained until then is swapped in from then on."""
    policy = policies.policy(checkpoint)
    trainer, sequences = policies.trainer(policy.model), tiny.make_sequences(prompts)
    kept = reference.ReferencePolicy(policy.model)
    policies.one_update(trainer, sequences)
    moved = _state(policy.model)
    kept.take()
    policies.one_update(trainer, sequences)
    with kept.swapped_in():
        assert _equal(_state(policy.model), moved)
    assert not _equal(_state(policy.model), moved)


def _teacher(checkpoint, other, sequences, sequence_parallel, freeze):
    """Scores of the policy and of the other checkpoint as its reference, and whether the policy is what it was."""
    policy = policies.policy(checkpoint, sequence_parallel=sequence_parallel, freeze=freeze)
    trainer, before = policies.trainer(policy.model), _state(policy.model)
    kept = reference.ReferencePolicy.filled(policy.model, lambda: build.fill(policy, other))
    assert _equal(_state(policy.model), before)
    policies.one_update(trainer, sequences)
    with kept.swapped_in():
        return policies.score(trainer, sequences)


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory, checkpoint):
    """Of the same sizes, with all weights and biases moved."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("teacher") / "other"
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: w * 0.9 + 0.01 for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", [TP1, TP2_SP], ids=str)
def test_another_checkpoint(ranks, checkpoint, other_checkpoint, prompts, layout):
    """A teacher: its own scores, frozen parts included, as transformers gives them, after the policy was trained."""
    sequences = tiny.make_sequences(prompts)
    teacher = tiny.Reference(other_checkpoint)
    freeze = ("vision",)
    for scores in ranks.run(
        _teacher, checkpoint, other_checkpoint, sequences, layout.sequence_parallel, freeze, **layout.job
    ):
        for sequence, score in zip(sequences, scores, strict=True):
            expected = teacher.log_probs(sequence.prompt, sequence.completion)[0].detach()
            torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)
