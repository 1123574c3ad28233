"""The ground truths of a data set by their source: what guessing is worth, and guesses for the warm-up."""

from collections import Counter
from collections.abc import Sequence

import torch


def best_constants(sources: Sequence[str], answers: Sequence[str]) -> float:
    """Accuracy of always giving the most frequent answer of a prompt's source; 0 to 1.

    `sources` and `answers` are those of the prompts, in order.  That is what a policy reaches which knows the
    task that it is asked, as the wording of a question tells, and nothing of the media.
    """
    frequent: dict[str, int] = {}
    for (source, _), count in Counter(zip(sources, answers, strict=True)).items():
        frequent[source] = max(frequent.get(source, 0), count)
    return sum(frequent.values()) / len(answers)


class AnswerPool:
    """The distinct answers of each source."""

    def __init__(self, sources: Sequence[str], answers: Sequence[str]):
        """`sources` and `answers` are those of the prompts, in order."""
        distinct: dict[str, set[str]] = {}
        for source, answer in zip(sources, answers, strict=True):
            distinct.setdefault(source, set()).add(answer)
        self._answers = {source: sorted(found) for source, found in sorted(distinct.items())}

    def draw(self, sources: Sequence[str], generator: torch.Generator) -> list[str]:
        """An answer for each of the sources, all of its source equally likely: never a digit for a direction.

        Raises:
            KeyError: a source that has no answers.
        """
        drawn = [""] * len(sources)
        for source, answers in self._answers.items():
            places = [place for place, name in enumerate(sources) if name == source]
            chosen = torch.randint(len(answers), (len(places),), generator=generator).tolist()
            for place, choice in zip(places, chosen, strict=True):
                drawn[place] = answers[choice]
        if unknown := set(sources) - self._answers.keys():
            raise KeyError(min(unknown))
        return drawn
