"""What docs/adding-a-model.md asks of a family, run for each one that is registered: a new entry is checked at once."""

import pytest

from megarl.models.families import FAMILIES
from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, Layout, lazy
from tests.rollout.test_engine import BOTH, _sample_and_score, largest, same_on_all_ranks
from tests.training.test_gradients import _gradients, reference_gradients, worst

policies = lazy("tests.policies")

TOLERANCE = 1e-5
CP2 = Layout(2, 1, context_parallel=2)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return tiny.write_family_checkpoint(tmp_path_factory.mktemp(family.model_type) / "checkpoint", family.model_type)


@pytest.fixture(scope="module")
def theirs(folder):
    return tiny.Reference(folder)


@pytest.fixture(scope="module")
def encoded(family, folder, tmp_path_factory):
    return tiny.make_prompts(tmp_path_factory.mktemp("pictures"), folder)


def layouts(family, *chosen):
    """As the family runs in them: a mixture of experts is tensor-parallel with sequence parallelism only."""
    return [layout for layout in chosen if layout != TP2 or "moe" not in family.model_type]


def test_engine_trainer_and_transformers_agree(ranks, family, folder, encoded, theirs):
    for layout in layouts(family, TP1, TP2, TP2_SP):
        answers = ranks.run(_sample_and_score, folder, list(encoded.values()), layout, BOTH, **layout.job)
        same_on_all_ranks(answers)
        for name, prompt, group in zip(encoded, encoded.values(), answers[0]["groups"], strict=True):
            for ids, engine, trainer in group:
                expected = theirs.log_probs(prompt, ids)[0]
                assert largest(engine - expected) < TOLERANCE, (layout, name)
                assert largest(trainer - expected) < TOLERANCE, (layout, name)


def test_gradients(ranks, family, folder, encoded, theirs):
    sequences = tiny.make_sequences(encoded, group=2)
    expected = reference_gradients(theirs.model, theirs, sequences)
    for layout in layouts(family, TP1, TP2, TP2_SP, CP2):
        answers = ranks.run(
            _gradients, folder, sequences, 256, sequence_parallel=layout.sequence_parallel, **layout.job
        )
        for found in answers:
            assert worst(found, expected)[0] < 1e-4, (layout, worst(found, expected))
