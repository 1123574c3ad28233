"""Letters of options, in the forms in which models give them."""

import re
from dataclasses import dataclass

from megarl.environments.score import Grade
from megarl.environments.visual_answer import normalised

_OPTION = re.compile(r"^[ \t]*(?:\(([A-Z])\)|([A-Z])[.):])[ \t]*(\S.*)$", re.MULTILINE)
"""A line of the question, `A. text`, `A) text`, `A: text` or `(A) text`."""
_LABEL = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.):])(?:\s+(.*))?", re.DOTALL)
_ANOTHER = re.compile(r"\([A-Z]\)|\b[A-Z][.):](?:\s|$)")
_SAID = re.compile(r"\banswer\b(?:\s+is|\s*[:=])+\s*(?:option\s+)?\(?([A-Z])(?![\w'])(\s+\w)?", re.IGNORECASE)
"""`Answer: C`, `the answer is (C)`; the second group says that a word follows, as after the article A."""
_WRAPPED = re.compile(r"\\boxed\{(.*)\}|\\text\{(.*)\}|\*\*(.*)\*\*|\$(.*)\$", re.DOTALL)
_LONGEST = 20_000


def options(question: str) -> dict[str, str]:
    """Text by letter of the options that the question lists, a line each."""
    return {first or second: text.rstrip() for first, second, text in _OPTION.findall(question[:_LONGEST])}


def letter(text: str, known: dict[str, str]) -> str | None:
    """The one option that a text names: `C`, `c`, `(C)`, `C.`, `C. and its text`, `\\boxed{C}`, `**C**`, `Answer: C`,
    or the text of an option.  None where it names none, or several."""
    text = _unwrapped(text.strip())
    if len(text) == 1 and "A" <= text.upper() <= "Z":
        return text.upper()
    if found := _LABEL.fullmatch(text[:1].upper() + text[1:] if text[1:2] in (".", ")") else text):
        rest = found[3] or ""
        return None if _ANOTHER.search(rest) else found[1] or found[2]
    if found := re.fullmatch(r"\(([a-z])\)", text):
        return found[1].upper()
    named = [label for label, option in known.items() if normalised(option) == normalised(text)]
    if len(named) == 1:
        return named[0]
    if len(text) > 2 and text[1] == " " and normalised(known.get(text[0], "")) == normalised(text[2:]) != "":
        return text[0]
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if boxed:
        return letter(boxed[-1], known)
    said = [m for m in _SAID.finditer(text) if m[1].isupper() and not (m[1] in "AI" and m[2])]
    return said[-1][1] if said else None


def _unwrapped(text: str) -> str:
    """Without what only sets it off; at most a few layers."""
    for _ in range(4):
        found = _WRAPPED.fullmatch(text)
        inner = next((part for part in found.groups() if part is not None), None) if found else None
        if inner is None or "boxed" in inner or "**" in inner:
            break
        text = inner.strip()
    return text


@dataclass(frozen=True)
class MultipleChoice:
    """1 for the option that is the ground truth, which the row gives by its letter or by its text.

    The options are those that the question lists, a line each; without such a list only letters are known.
    """

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        known = options(question)
        given = given.strip()[-_LONGEST:]
        truth, chosen = letter(answer, known), letter(given, known)
        correct = chosen == truth if truth is not None else normalised(given) == normalised(answer)
        return Grade(float(correct), correct, chosen)
