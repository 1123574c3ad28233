"""A mixture of experts in the trainer: log-probabilities and gradients against transformers, one sequence at a time."""

import pytest
import torch

from tests import tiny
from tests.distributed import TP1, TP2_SP, Layout, lazy
from tests.training.test_checkpoint import STEPS, _load_and_go_on, _save_and_go_on
from tests.training.test_gradients import TOLERANCE, reference_gradients, row_loss, worst

policies = lazy("tests.policies")
parallel_state = lazy("megatron.core.parallel_state")

LAYOUTS = [
    TP1,
    Layout(2, 1, expert_parallel=2),
    TP2_SP,
    Layout(2, 2, sequence_parallel=True, expert_tensor_parallel=2),
    Layout(2, 2, sequence_parallel=True, expert_parallel=2),
    Layout(2, 1, context_parallel=2),
    Layout(2, 1, context_parallel=2, expert_parallel=2),
    Layout(4, 1, expert_parallel=4),
    Layout(4, 1, expert_parallel=2),
    Layout(4, 1, context_parallel=2, expert_parallel=4),
    Layout(4, 2, sequence_parallel=True, expert_parallel=2, expert_tensor_parallel=2),
    Layout(4, 2, sequence_parallel=True, context_parallel=2, expert_parallel=2, expert_tensor_parallel=2),
]


@pytest.fixture(scope="module")
def sequences(prompts):
    """Groups of 2: packed rows mix text, pictures and video."""
    return tiny.make_sequences(prompts, group=2)


@pytest.fixture(scope="module")
def expected(mixture_reference, sequences):
    """Log-probabilities of each sequence, and gradients of the loss summed over all of them."""
    gradients = reference_gradients(mixture_reference.model, mixture_reference, sequences)
    with torch.no_grad():
        scores = [mixture_reference.log_probs(s.prompt, s.completion)[0] for s in sequences]
    assert min(float(grad.abs().max()) for grad in gradients.values()) > 1e-3  # nothing is compared with 0
    return scores, gradients


QUICK = {"tp1", "tp1-ep2", "tp1-cp2-ep2", "tp2-sp-ep2"}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=[] if str(layout) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_equals_transformers(ranks, mixture_checkpoint, sequences, expected, layout):
    """Data-parallel ranks have different sequences, and unequally many rows of them: each rank's experts see the
    tokens of all ranks that share them, and a rank that is through its rows serves the others."""
    answers = ranks.run(_score_and_gradients, mixture_checkpoint, sequences, layout, **layout.job)
    scores, gradients = expected
    seen = set()
    for mine, found, _, experts in answers:
        for index, values in mine.items():
            assert float((values - scores[index]).abs().max()) < 1e-5
        seen |= mine.keys()
        assert worst(found, gradients)[0] < TOLERANCE, worst(found, gradients)
        assert experts == 4 // layout.expert_parallel
    assert seen == set(range(len(sequences)))
    data_parallel = layout.world_size // (layout.tensor_parallel * layout.context_parallel)
    assert (len({rows for _, _, rows, _ in answers}) > 1) == (data_parallel > 1)


def _score_and_gradients(checkpoint, sequences, layout):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer = policies.trainer(policy.model)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    # The first rank has every sequence but those that the others have: one each, where there are others.
    mine = {i: s for i, s in enumerate(sequences) if (i if 0 < i < size else 0) == rank}
    scores = policies.score(trainer, list(mine.values()), tokens_per_row=300)
    packed = policies.rows(list(mine.values()), 300)
    experts = policy.model.language_model.decoder.layers[0].mlp.num_local_experts
    return (
        dict(zip(mine, scores, strict=True)),
        policies.gradients(policy, trainer, packed, row_loss),
        len(packed),
        experts,
    )


EP2 = Layout(2, 1, expert_parallel=2)


@pytest.mark.parametrize(
    "saved, loaded",
    [
        (TP1, TP1),
        (EP2, EP2),
        (EP2, TP1),
        (TP1, EP2),
        pytest.param(EP2, Layout(4, 1, expert_parallel=4), marks=pytest.mark.slow),
        pytest.param(Layout(4, 1, expert_parallel=2), EP2, marks=pytest.mark.slow),
        pytest.param(
            Layout(4, 2, sequence_parallel=True, expert_parallel=2, expert_tensor_parallel=2),
            EP2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_continuation(ranks, mixture_checkpoint, prompts, tmp_path, saved, loaded):
    """Saved and loaded, over layouts that share experts too: gradient norms and weights of an undisturbed run.  Data-
    parallel ranks have the same sequences here, so that the loss per token is that of one rank."""
    sequences = tiny.make_sequences(prompts)
    args = mixture_checkpoint, tmp_path / "run", sequences
    results, weights = ranks.run(_save_and_go_on, *args, saved.sequence_parallel, **saved.job)[0]
    again, again_weights = ranks.run(_load_and_go_on, *args, loaded.sequence_parallel, **loaded.job)[0]
    assert len(results) == STEPS
    for (norm, rate), (other, same) in zip(results, again, strict=True):
        assert (other, same) == (pytest.approx(norm, rel=1e-5), rate)
    assert max(float((again_weights[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-5
