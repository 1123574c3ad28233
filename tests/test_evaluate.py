"""Held-out accuracy: over all prompts and ranks, for each source and modality, of one answer and of several."""

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


def stand_in(held_out: Prompts, answers: list[list[str]] | None = None, modalities: str = "t") -> SimpleNamespace:
    """A run whose policy says "yes" to everything, or `answers[place]` to each prompt; one that ends in "..." was cut
    off.  `modalities` are by place, over and over: text, image or video."""
    answers = answers or [["yes"]] * len(held_out)
    names = {"t": "text", "i": "image", "v": "video"}

    def encode(prompt):
        return SimpleNamespace(prompt=prompt, modality=names[modalities[prompt.index % len(modalities)]])

    def generate(encoded, sampling, group_size, keys):
        assert len(encoded) == len(keys) and len(encoded) * group_size <= 4
        return [
            [SimpleNamespace(ids=a, finished=not a.endswith("..."), prompt=one) for a in answers[one.prompt.index]]
            for one in encoded
        ]

    def scores(rollouts):
        attempts = [Attempt(one.ids, one.finished, one.prompt.prompt.answer) for one in rollouts]
        return InProcess(Graded(ExactMatch())).score(attempts)

    engines = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return SimpleNamespace(
        recipe=SimpleNamespace(
            seed=1,
            rollout=SimpleNamespace(max_requests=4, max_new_tokens=3),
            evaluation=SimpleNamespace(temperature=0.0, samples=len(answers[0])),
        ),
        stop_ids=(2,),
        encoder=SimpleNamespace(encode=encode, prefetch=lambda prompts: None),
        engine=SimpleNamespace(generate=generate, groups=SimpleNamespace(dp_cp=engines, tp=None)),
        conversed=lambda groups, *_: groups,
        text=str,
        scores=scores,
        test_prompts=held_out,
    )


@pytest.mark.ranks(2)
def test_sources_that_lie_on_different_ranks():
    """`b` is asked on both ranks, `a` on the first and `c` on the second only."""
    found = evaluation.evaluate(stand_in(prompts("aababcb", "x-x-xx-")))
    assert (found.prompts, found.accuracy) == (7, 4 / 7)
    assert found.by_source == {"a": {"accuracy": 1 / 3}, "b": {"accuracy": 2 / 3}, "c": {"accuracy": 1}}
    assert found.metrics() == {
        "eval/accuracy": 4 / 7,
        "eval/accuracy/a": 1 / 3,
        "eval/accuracy/b": 2 / 3,
        "eval/accuracy/c": 1,
    }


@pytest.mark.ranks(1)
def test_one_source_is_not_reported_twice():
    assert evaluation.evaluate(stand_in(prompts("aaa", "x--"))).metrics() == {"eval/accuracy": 1 / 3}


@pytest.mark.ranks(1)
def test_a_name_for_every_row_does_not_fill_the_log():
    most = evaluation.MOST_SOURCES
    names = "".join(map(chr, range(0x100, 0x100 + most + 1)))
    found = evaluation.evaluate(stand_in(prompts(names, "x" * (most + 1))))
    assert (found.accuracy, found.by_source) == (1, {})
    assert len(evaluation.evaluate(stand_in(prompts(names[:-1], "x" * most))).by_source) == most


@pytest.mark.ranks(2)
def test_fewer_prompts_than_ranks():
    found = evaluation.evaluate(stand_in(prompts("a", "x")))
    assert (found.accuracy, found.by_source, found.by_modality) == (1, {}, {})


@pytest.mark.ranks(2)
def test_several_answers():
    """By hand; blanks do not tell answers apart, one that was cut off has no vote, and a tie goes to the first."""
    held_out = prompts("aabb", "xxxx")  # "yes" is right
    answers = [
        ["no", "yes", " yes", "no..."],  # 2 right, and the majority
        ["no", "yes", "yes", "no"],  # 2 right; a tie that "no" wins
        ["yes...", "yes...", "no", "yes..."],  # none is right
        ["yes", "yes", "yes", "yes"],
    ]
    found = evaluation.evaluate(stand_in(held_out, answers, "iivt"))
    of_two = 1 - 1 / 6  # of 4 answers with 2 right ones
    overall = {"accuracy": 8 / 16, "pass@2": (2 * of_two + 1) / 4, "pass@4": 3 / 4, "maj@4": 2 / 4}
    image = {"accuracy": 4 / 8, "pass@2": of_two, "pass@4": 1, "maj@4": 1 / 2}
    nothing, all_right = (dict.fromkeys(overall, value) for value in (0, 1))
    half = dict.fromkeys(overall, 1 / 2)
    assert found.overall == pytest.approx(overall)
    assert found.by_source == {"a": pytest.approx(image), "b": pytest.approx(half)}
    assert found.by_modality == {"text": all_right, "image": pytest.approx(image), "video": nothing}
    metrics = found.metrics()
    assert len(metrics) == 4 * (1 + 2 + 3)
    assert metrics["eval/maj@4"] == 1 / 2
    assert metrics["eval/pass@2/a"] == pytest.approx(of_two)
    assert metrics["eval/accuracy/modality/video"] == 0
