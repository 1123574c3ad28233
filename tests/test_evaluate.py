"""Held-out accuracy: over all prompts and ranks, and for each source."""

from types import SimpleNamespace

import pytest

from megarl.data.prompt import Prompt
from megarl.environments.environment import Graded
from megarl.environments.exact_match import ExactMatch
from megarl.environments.in_process import InProcess
from megarl.environments.score import Attempt
from tests.distributed import lazy

evaluation = lazy("megarl.evaluate")
parallel_state = lazy("megatron.core.parallel_state")


class Prompts(list):
    """As `PromptSet` is: `sources` beside the prompts."""

    @property
    def sources(self) -> list[str]:
        return [prompt.source for prompt in self]


def prompts(sources: str, right: str) -> Prompts:
    """A prompt for each letter of `sources`; the stand-in for the policy answers it right where `right` has x."""
    return Prompts(
        Prompt(index, index + 1, (), "yes" if letter == "x" else "no", source)
        for index, (source, letter) in enumerate(zip(sources, right, strict=True))
    )


def stand_in(held_out: Prompts) -> SimpleNamespace:
    """A run whose policy says "yes" to everything."""

    def generate(encoded, sampling, keys):
        assert len(encoded) == len(keys) <= 2
        return [[SimpleNamespace(ids="yes", finished=True, prompt=SimpleNamespace(prompt=p))] for p in encoded]

    def scores(rollouts):
        attempts = [Attempt(one.ids, one.finished, one.prompt.prompt.answer) for one in rollouts]
        return InProcess(Graded(ExactMatch())).score(attempts)

    engines = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return SimpleNamespace(
        recipe=SimpleNamespace(
            seed=1,
            rollout=SimpleNamespace(max_requests=2, max_new_tokens=3),
            evaluation=SimpleNamespace(temperature=0.0),
        ),
        stop_ids=(2,),
        encoder=SimpleNamespace(encode=lambda prompt: prompt, prefetch=lambda prompts: None),
        engine=SimpleNamespace(generate=generate, groups=SimpleNamespace(dp_cp=engines)),
        scores=scores,
        test_prompts=held_out,
    )


@pytest.mark.ranks(2)
def test_sources_that_lie_on_different_ranks():
    """`b` is asked on both ranks, `a` on the first and `c` on the second only."""
    overall, by_source = evaluation.evaluate(stand_in(prompts("aababcb", "x-x-xx-")))
    assert overall == 4 / 7
    assert by_source == {"a": 1 / 3, "b": 2 / 3, "c": 1}


@pytest.mark.ranks(1)
def test_one_source_is_not_reported_twice():
    assert evaluation.evaluate(stand_in(prompts("aaa", "x--"))) == (1 / 3, {})


@pytest.mark.ranks(1)
def test_a_name_for_every_row_does_not_fill_the_log():
    most = evaluation.MOST_SOURCES
    names = "".join(map(chr, range(0x100, 0x100 + most + 1)))
    overall, by_source = evaluation.evaluate(stand_in(prompts(names, "x" * (most + 1))))
    assert (overall, by_source) == (1, {})
    assert len(evaluation.evaluate(stand_in(prompts(names[:-1], "x" * most)))[1]) == most


@pytest.mark.ranks(2)
def test_fewer_prompts_than_ranks():
    assert evaluation.evaluate(stand_in(prompts("a", "x"))) == (1, {})
