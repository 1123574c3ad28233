"""Training state on disk: an identical continuation, over layouts too."""

import psutil
import pytest
import torch

from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, lazy

policies = lazy("tests.policies")
checkpoints = lazy("megarl.training.checkpoint")
reference = lazy("megarl.training.reference")
folders = lazy("megarl.training.checkpoint_folder")
dist_checkpointing = lazy("megatron.core.dist_checkpointing")

STEPS = 3
OPTIONS = dict(learning_rate=1e-3, schedule="linear", warmup_steps=2)


def _begin(checkpoint, sequence_parallel=False):
    policy = policies.policy(checkpoint, sequence_parallel=sequence_parallel)
    return policy, policies.trainer(policy.model, **OPTIONS)


def _train(trainer, sequences, steps):
    """(gradient norm, learning rate) of each update."""
    results = []
    for _ in range(steps):
        result, _ = trainer.update(policies.rows(sequences), lambda row, lp, entropy: (-lp.sum(), lp.sum().detach()))
        results.append((result.grad_norm, result.learning_rate))
    return results


def save(folder, name, trainer, progress, score=None, **retention):
    """Begun and ended."""
    writer = checkpoints.CheckpointWriter(folder, folders.Retention(**retention))
    writer.save(name, trainer, progress, score)
    writer.wait()


def _save_and_go_on(checkpoint, folder, sequences, sequence_parallel):
    policy, trainer = _begin(checkpoint, sequence_parallel)
    _train(trainer, sequences, STEPS)
    writer = checkpoints.CheckpointWriter(folder, folders.Retention())
    writer.save("a", trainer, {"step": STEPS})
    after = _train(trainer, sequences, STEPS)  # while the state as it was is written
    writer.wait()
    return after, policies.weights(policy)


def _load_and_go_on(checkpoint, folder, sequences, sequence_parallel):
    policy, trainer = _begin(checkpoint, sequence_parallel)
    newest, said = folders.newest_whole(folder)
    assert said == []
    assert checkpoints.read_progress(newest) == {"step": STEPS}
    checkpoints.load(newest, trainer)
    return _train(trainer, sequences, STEPS), policies.weights(policy)


@pytest.mark.parametrize(
    "saved, loaded",
    [(TP1, TP1), (TP2_SP, TP2_SP), (TP1, TP2), (TP2, TP1), (TP1, TP2_SP)],
    ids=lambda layout: str(layout),
)
def test_continuation(ranks, checkpoint, prompts, tmp_path, saved, loaded):
    """The same gradient norms, learning rates and weights as without the stop: equal in one layout, within
    1e-5 over layouts."""
    sequences = tiny.make_sequences(prompts)
    args = checkpoint, tmp_path / "run", sequences
    results, weights = ranks.run(_save_and_go_on, *args, saved.sequence_parallel, **saved.job)[0]
    again, again_weights = ranks.run(_load_and_go_on, *args, loaded.sequence_parallel, **loaded.job)[0]
    rates = [rate for _, rate in results]
    assert len(set(rates)) == STEPS  # the schedule moves
    assert [rate for _, rate in again] == rates
    if saved == loaded:
        assert again == results
        assert all(torch.equal(again_weights[name], weight) for name, weight in weights.items())
    for (norm, _), (other, _) in zip(results, again, strict=True):
        assert other == pytest.approx(norm, rel=1e-5)
    # Adam's step of a parameter whose gradient is 0 but for rounding is as long as any other.
    assert max(float((again_weights[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-5


@pytest.mark.ranks(1)
def test_no_process_stays(checkpoint, tmp_path):
    """A save starts no helper, which a killed rank would leave behind."""
    before = psutil.Process().children(recursive=True)
    _, trainer = _begin(checkpoint)
    save(tmp_path / "run", "a", trainer, {})
    assert folders.latest(tmp_path / "run")
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.ranks(1)
def test_optimizer_state_matters(checkpoint, prompts, tmp_path):
    """The test above can fail: with the weights alone the continuation differs."""
    sequences = tiny.make_sequences(prompts)
    policy, trainer = _begin(checkpoint)
    _train(trainer, sequences, STEPS)
    checkpoints.save_weights(tmp_path / "weights", policy.model)
    stood = policies.weights(policy)
    _train(trainer, sequences, STEPS)
    expected = policies.weights(policy)

    policy, trainer = _begin(checkpoint)
    checkpoints.load_weights(tmp_path / "weights", policy.model)
    assert all(torch.equal(weight, stood[name]) for name, weight in policies.weights(policy).items())
    _train(trainer, sequences, STEPS)
    assert max(float((w - expected[n]).abs().max()) for n, w in policies.weights(policy).items()) > 1e-4


@pytest.mark.ranks(1)
def test_weights_are_written_once(checkpoint, prompts, tmp_path):
    """`save_weights` keeps what is there: the reference policy of a run never changes."""
    policy, trainer = _begin(checkpoint)
    checkpoints.save_weights(tmp_path / "reference", policy.model)
    start = policies.weights(policy)
    _train(trainer, tiny.make_sequences(prompts), 1)
    checkpoints.save_weights(tmp_path / "reference", policy.model)
    checkpoints.load_weights(tmp_path / "reference", policy.model)
    assert all(torch.equal(weight, start[name]) for name, weight in policies.weights(policy).items())


@pytest.mark.ranks(1)
def test_moving_reference(checkpoint, prompts, tmp_path):
    """It is kept with the checkpoint whose step it belongs to, apart from the policy's own weights."""
    sequences, folder = tiny.make_sequences(prompts), tmp_path / "run"
    policy, trainer = _begin(checkpoint)
    _train(trainer, sequences, 1)
    kept, moved = reference.ReferencePolicy(policy.model), policies.weights(policy)
    _train(trainer, sequences, 1)
    trained = policies.weights(policy)
    writer = checkpoints.CheckpointWriter(folder, folders.Retention(last=2))
    writer.save("a", trainer, {}, reference=kept)
    assert all(torch.equal(weight, trained[name]) for name, weight in policies.weights(policy).items())
    _train(trainer, sequences, 1)  # while it is written
    kept.take()
    writer.wait()
    newest, _ = folders.newest_whole(folder)
    checkpoints.load_reference(newest, policy.model)
    assert all(torch.equal(weight, moved[name]) for name, weight in policies.weights(policy).items())
    checkpoints.load(newest, trainer)
    assert all(torch.equal(weight, trained[name]) for name, weight in policies.weights(policy).items())
    writer.save("b", trainer, {})
    writer.wait()
    a, b = (dist_checkpointing.load_tensors_metadata(str(folder / name)) for name in "ab")
    assert {name for name in a if name.startswith("reference.")} == a.keys() - b.keys() != set()
