"""Numbers, as far from each other as is allowed."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge

from megarl.environments.score import Grade

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?"
_NUMBER = re.compile(rf"(?P<mantissa>(?=[.\d]){_DECIMAL})(?:[eE](?P<exponent>[+-]?\d{{1,3}}))?")
_FRACTION = re.compile(r"(?:(?P<whole>\d+)\s+)?(?P<top>[^\s/]+)\s*/\s*(?P<bottom>[^\s/]+)")
_LATEX = re.compile(r"(?P<whole>\d+)?\s*\\[dt]?frac\{(?P<top>[^{}]+)\}\{(?P<bottom>[^{}]+)\}")
_LONGEST = 100
"""Characters: Python refuses thousands of digits, and no answer has so many."""


def number(text: str) -> Fraction | None:
    """The number that a text is, exactly; None where it is none.

    Knows signs, thousands separators (`1,234,567.8`), exponents, fractions (`3/4`, `1 3/4`, `\\frac{3}{4}`), a
    currency's sign in front, and percent: `45%` is 0.45.
    """
    text = text.strip().strip("$").rstrip(".").replace("\\%", "%").replace("\\$", "").replace("\u2212", "-").strip()
    if len(text) > _LONGEST:
        return None
    sign = -1 if text.startswith("-") else 1
    text = text[1:].lstrip() if text[:1] in ("-", "+") else text
    text = text.lstrip("$€£¥").lstrip()
    percent = text.endswith("%")
    text = text[:-1].rstrip() if percent else text
    value = _plain(text)
    if value is None and (found := _FRACTION.fullmatch(text) or _LATEX.fullmatch(text)):
        top, bottom = _plain(found["top"].strip()), _plain(found["bottom"].strip())
        value = int(found["whole"] or 0) + top / bottom if top is not None and bottom else None
    return None if value is None else sign * value / (100 if percent else 1)


def _plain(text: str) -> Fraction | None:
    found = _NUMBER.fullmatch(text)
    if not found or not re.search(r"[0-9]", found["mantissa"]) or not text.isascii():
        return None
    return Fraction(found["mantissa"].replace(",", "").rstrip(".")) * Fraction(10) ** int(found["exponent"] or 0)


@dataclass(frozen=True)
class Numeric:
    """1 for a number g with |g - t| ≤ max(absolute_tolerance, relative_tolerance · |t|), t being the ground truth.

    Exact arithmetic: 0.1 is 1/10, and with a tolerance of 0.1 1.1 is near enough to 1.
    """

    absolute_tolerance: Annotated[float, Ge(0)] = 0.0
    relative_tolerance: Annotated[float, Ge(0)] = 0.0

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        self.check(answer)
        value, truth = number(given), number(answer)
        allowed = max(Fraction(repr(self.absolute_tolerance)), Fraction(repr(self.relative_tolerance)) * abs(truth))
        correct = value is not None and abs(value - truth) <= allowed
        return Grade(float(correct), correct, None if value is None else str(value))

    def check(self, answer: str) -> None:
        """
        Raises:
            ValueError: a ground truth is no number.
        """
        if number(answer) is None:
            raise ValueError(f"the ground truth {answer[:60]!r} is no number")
