"""Ranks of which one has pictures and the other has none: nobody waits, and the update is that of one rank.

The limits are seconds: a collective that a rank does not come to would last for minutes.
"""

import pytest

from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, Layout, lazy
from tests.training.test_gradients import TOLERANCE, row_loss, worst
from tests.training.test_trainer import supervised

policies = lazy("tests.policies")
parallel_state = lazy("megatron.core.parallel_state")

SECONDS = 60
MEDIA, TEXT = ["images", "video", "both"], ["text", "long_text", "same_prefix"]
LAYOUTS = [
    Layout(2, 1),
    TP2,
    TP2_SP,
    Layout(2, 1, context_parallel=2),
    pytest.param(Layout(4, 2, sequence_parallel=True), marks=pytest.mark.slow),
    pytest.param(Layout(4, 1, context_parallel=2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def sequences(prompts):
    """One a microbatch, those with and without media in turns; data-parallel ranks have either."""
    return tiny.make_sequences({name: prompts[name] for pair in zip(MEDIA, TEXT, strict=True) for name in pair})


@pytest.fixture(scope="module")
def alone(ranks, checkpoint, sequences):
    (answer,) = ranks.run(_two_updates, checkpoint, sequences, False, **TP1.job)
    return answer


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.world_size}-{layout}")
def test_equals_one_rank(ranks, checkpoint, sequences, alone, layout):
    answers = ranks.run(_two_updates, checkpoint, sequences, layout.sequence_parallel, timeout=SECONDS, **layout.job)
    data_parallel = layout.world_size // layout.tensor_parallel // layout.context_parallel
    rows = {has for _, _, _, has in answers}
    assert rows == ({(True,) * 3, (False,) * 3} if data_parallel == 2 else {(True, False) * 3})
    gradients, norms, weights, _ = alone
    for found, found_norms, found_weights, _ in answers:
        assert worst(found, gradients)[0] < TOLERANCE, worst(found, gradients)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert max(float((found_weights[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-6


def _two_updates(checkpoint, sequences, sequence_parallel):
    """Gradients before the first update, gradient norms, weights after the second, which rows have media."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    policy = policies.policy(checkpoint, sequence_parallel=sequence_parallel)
    # With Adam's usual epsilon an entry whose gradient is all rounding goes either way by a whole step.
    trainer = policies.trainer(policy.model, learning_rate=1e-3, adam_eps=1e-3)
    rows = [row for sequence in sequences[rank::size] for row in policies.rows([sequence])]
    gradients = policies.gradients(policy, trainer, rows, row_loss)
    norms = [trainer.update(rows, supervised)[0].grad_norm for _ in range(2)]
    return gradients, norms, policies.weights(policy), tuple(bool(row.items) for row in rows)
