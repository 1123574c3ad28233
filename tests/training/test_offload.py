"""The optimizer's state away from the GPU between updates: gone in between, and the same when it is back."""

import pytest
import torch

from tests import tiny
from tests.distributed import Layout, lazy

policies = lazy("tests.policies")
build = lazy("megarl.models.build")
offload = lazy("megarl.training.offload")
checkpoints = lazy("megarl.training.checkpoint")
folders = lazy("megarl.training.checkpoint_folder")

DP2 = Layout(2, 1)
STEPS = 2


def _trainer(checkpoint, half):
    built = policies.policy(checkpoint)
    if half:
        built = build.load_policy(checkpoint, build.ModelOptions(torch.bfloat16))
    return built, policies.trainer(built.model, learning_rate=1e-3)


def _storages(trainer, half, stepped):
    """(what leaves, what stays), by what Megatron and torch call them."""
    (distributed,) = trainer._optimizer.chained_optimizers
    moments = [v for s in distributed.optimizer.state.values() for k, v in s.items() if k.startswith("exp_avg")]
    masters = [t for group in distributed.shard_fp32_from_float16_groups for t in group]
    assert bool(masters) == half and bool(moments) == stepped
    gradients = [p.main_grad for p in trainer.model.parameters()]
    return [t.untyped_storage() for t in [*moments, *masters, *gradients]], [
        p.untyped_storage() for p in trainer.model.parameters()
    ]


def _learn(checkpoint, sequences, half, away):
    """Gradient norms, scores and last weights of some steps, each of which scores, updates twice and, if asked, samples
    in between with the state `away`."""
    built, trainer = _trainer(checkpoint, half)
    engine, seen = policies.engine(built.model), []
    for step in range(STEPS):
        if away:
            trainer.offload()
            trainer.offload()  # the second asks for what is done
            leaves, stays = _storages(trainer, half, step > 0)
            assert all(s.nbytes() == 0 for s in leaves) and all(s.nbytes() for s in stays)
        engine.generate([sequences[0].prompt], policies.sampling(4))
        seen += [score.tolist() for score in policies.score(trainer, sequences)]
        for _ in range(2):
            result, _ = trainer.update(
                policies.rows(sequences), lambda row, lp, entropy: (-lp.sum(), lp.sum().detach())
            )
            seen.append([result.grad_norm])
        engine.weights_changed()
        assert all(s.nbytes() for s in _storages(trainer, half, True)[0])
    return seen, policies.weights(built)


def _with_and_without(*args):
    return [_learn(*args, away) for away in (False, True)]


@pytest.mark.parametrize("half, job", [(False, {}), (True, {}), (True, DP2.job)], ids=["float32", "bfloat16", "dp2"])
def test_training_is_the_same(ranks, checkpoint, prompts, half, job):
    """To the bit, whether weights have masters of their own or not."""
    for stayed, left in ranks.run(_with_and_without, checkpoint, tiny.make_sequences(prompts), half, **job):
        (seen, weights), (same, same_weights) = stayed, left
        assert seen == same
        assert all(torch.equal(weight, same_weights[name]) for name, weight in weights.items())


@pytest.mark.ranks(1)
def test_save_while_away(checkpoint, prompts, tmp_path):
    """What a checkpoint holds, and goes on to, is what it would have held; an update follows at once."""
    sequences, ends = tiny.make_sequences(prompts), []
    for away in (False, True):
        built, trainer = _trainer(checkpoint, half=False)
        policies.one_update(trainer, sequences)
        if away:
            trainer.offload()
        writer = checkpoints.CheckpointWriter(tmp_path / str(away), folders.Retention())
        writer.save("a", trainer, {})
        if away:
            trainer.offload()  # while the checkpoint is written
        policies.one_update(trainer, sequences)
        writer.wait()
        ends.append(policies.weights(built))
        built, trainer = _trainer(checkpoint, half=False)
        if away:
            trainer.offload()
        checkpoints.load(tmp_path / str(away) / "a", trainer)
        policies.one_update(trainer, sequences)
        ends.append(policies.weights(built))
    for weights in ends[1:]:
        assert all(torch.equal(weight, ends[0][name]) for name, weight in weights.items())


def _fails():
    raise OSError("in mid-rollout")


@pytest.mark.ranks(1)
def test_after_an_exception_and_into_another_phase(checkpoint, prompts):
    """A generation that fails while the state is away costs nothing; a fresh optimizer leaves and returns too, through
    the host memory that the first had."""
    sequences, ends = tiny.make_sequences(prompts), []
    for away in (False, True):
        built, trainer = _trainer(checkpoint, half=False)
        engine = policies.engine(built.model)
        policies.one_update(trainer, sequences)
        if away:
            trainer.offload()
            with pytest.raises(OSError, match="in mid-rollout"):
                engine.generate([sequences[0].prompt], policies.sampling(40, ()), interrupted=_fails)
        policies.one_update(trainer, sequences)
        for _ in range(2):
            if away:
                trainer.offload()
                first, size = len(trainer._offload._host._blocks), trainer.offloaded_bytes
            policies.begin(trainer, 1e-3)
            policies.one_update(trainer, sequences)
        if away:
            trainer.offload()
            assert (len(trainer._offload._host._blocks), trainer.offloaded_bytes) == (first, size)
        ends.append(policies.weights(built))
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


@pytest.mark.ranks(1)
def test_shared_storage_and_room_on_the_host():
    """Views of one storage leave once and stay views; blocks are as large as what they hold, and are used again."""
    away = offload.Offload(torch.device("cpu"))
    base, other = torch.arange(1000.0), torch.randn(7)
    view, kept = base[10:20], other.clone()
    for _ in range(2):
        away.leave([view, base, other])
        assert away.bytes == 4 * 1007 and base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        away.wait()
        assert torch.equal(base, torch.arange(1000.0)) and torch.equal(other, kept)
    view.zero_()
    assert base[10:20].eq(0).all()
    assert [block.numel() for block in away._host._blocks] == [4096 + 512]
    more = torch.randn(300)
    away.leave([base, other, more])
    assert [block.numel() for block in away._host._blocks] == [4096 + 512, 1536]
    away.wait()
