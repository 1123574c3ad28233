"""Where in a completion the answer is, and whether the completion has the form that was asked for.

Regular expressions are a user's and may take exponential time; the library `regex`, unlike `re`, gives them up after
`SECONDS` that the process has computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import regex

SECONDS = 1.0
_PLAIN = r"(?:(?!</?(?:think|answer)>).)*+"
FORMATS = {"think_answer": rf"(?s)<think>{_PLAIN}</think>\s*<answer>{_PLAIN}</answer>"}
"""By the name that a recipe gives: each pair of tags once, and nothing around them."""


def tagged(text: str) -> str | None:
    """What the last <answer>...</answer> holds."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end]


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, in which braces may nest; None too where it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


EXTRACTIONS: dict[str, Callable[[str], str | None]] = {"answer": tagged, "boxed": boxed}
"""By the name that a recipe gives."""


def malformed(pattern: str) -> str | None:
    """What is wrong with a regular expression."""
    try:
        regex.compile(pattern)
    except regex.error as error:
        return str(error)
    return None


def without_group(pattern: str) -> bool:
    """Whether a well-formed regular expression has no group that would be the answer."""
    return regex.compile(pattern).groups == 0


@dataclass(frozen=True)
class Extraction:
    extract: str | None = None
    """A name of `EXTRACTIONS`, or a regular expression whose first group is the answer; None: all of the text is."""

    def __call__(self, text: str) -> str | None:
        """The answer in the text, from the last match; None where there is none.

        Raises:
            TimeoutError: the expression takes too long.
        """
        if self.extract is None:
            return text
        if self.extract in EXTRACTIONS:
            return EXTRACTIONS[self.extract](text)
        found = None
        for found in regex.finditer(self.extract, text, timeout=SECONDS):  # noqa: B007
            pass
        return None if found is None else found[1]


@dataclass(frozen=True)
class Format:
    format: str | None = None
    """A name of `FORMATS`, or a regular expression that a well-formed text matches in full; None accepts all."""

    def __call__(self, text: str) -> bool:
        """Whether the text is well-formed.

        Raises:
            TimeoutError: the expression takes too long.
        """
        if self.format is None:
            return True
        return regex.fullmatch(FORMATS.get(self.format, self.format), text, timeout=SECONDS) is not None
