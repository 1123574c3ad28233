"""Boxes and points in pictures, as Qwen-VL and others write them.

Coordinates are compared as they are: the ground truth must be in the model's own (Qwen2.5-VL: pixels of the picture
as it was resized, Qwen3-VL: thousandths of its sides).
"""

import re
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated

from annotated_types import Gt, Le

from megarl.environments.score import Grade

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 with x1 < x2 and y1 < y2."""
Point = tuple[float, float]

_N = r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*"
_BOX = re.compile(rf"\[{_N},{_N},{_N},{_N}\]|\({_N},{_N}\)\s*,?\s*\({_N},{_N}\)|\({_N},{_N},{_N},{_N}\)")
_POINT = re.compile(rf"\[{_N},{_N}\]|\({_N},{_N}\)")
MOST = 64
"""Boxes of an answer; one with more is given no credit, so that time is bounded."""


def boxes(text: str) -> list[Box]:
    """All boxes of a text: `[x1, y1, x2, y2]` alone, in lists or in JSON such as `{"bbox_2d": [x1, y1, x2, y2]}`, and
    `(x1,y1),(x2,y2)`.  One whose corners are the wrong way round is there, with no area."""
    return [tuple(float(n) for n in found.groups() if n is not None) for found in _BOX.finditer(text)]


def points(text: str) -> list[Point]:
    """All points of a text: `[x, y]`, alone or in JSON such as `{"point_2d": [x, y]}`, and `(x, y)`."""
    return [tuple(float(n) for n in found.groups() if n is not None) for found in _POINT.finditer(text)]


def iou(a: Box, b: Box) -> float:
    """Area of the intersection over that of the union."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0 or _area(a) <= 0 or _area(b) <= 0:
        return 0.0
    return width * height / (_area(a) + _area(b) - width * height)


def _area(box: Box) -> float:
    width, height = box[2] - box[0], box[3] - box[1]
    return width * height if width > 0 and height > 0 else 0.0


def best_match(given: list[Box], true: list[Box]) -> list[float]:
    """IoU of each pair of the one-to-one match of the largest sum."""
    table = [[iou(a, b) for b in true] for a in given]
    if min(len(given), len(true)) == 1:
        return [max(value for row in table for value in row)]
    if len(given) == len(true) <= 3:
        ways = ([table[i][j] for i, j in enumerate(way)] for way in permutations(range(len(true))))
        return max(ways, key=sum)
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(table, maximize=True)
    return [table[i][j] for i, j in zip(rows, columns, strict=True)]


@dataclass(frozen=True)
class BoxIoU:
    """How well the boxes of an answer fit those of the ground truth.

    Boxes are matched one to one, the sum of IoU being largest.  A match is worth its IoU, or with a `threshold` 1 where
    its IoU reaches it and 0 elsewhere; the credit is the sum over the larger of the two numbers of boxes, so that one
    too many costs as much as one that is missing.  Correct is an answer all of whose matches reach the threshold, or
    0.5 where there is none, and that has as many boxes as the truth.
    """

    threshold: Annotated[float, Gt(0), Le(1)] | None = None

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        self.check(answer)
        found, true = boxes(given), boxes(answer)
        if not 0 < len(found) <= MOST:
            return Grade(0.0, False)
        matched = best_match(found, true)
        least = self.threshold or 0.5
        worth = matched if self.threshold is None else [float(value >= least) for value in matched]
        correct = len(found) == len(true) and all(value >= least for value in matched)
        return Grade(sum(worth) / max(len(found), len(true)), correct)

    def check(self, answer: str) -> None:
        """
        Raises:
            ValueError: a ground truth is no box, or one without an area.
        """
        _check_boxes(answer)


@dataclass(frozen=True)
class PointInBox:
    """1 for an answer with one point that lies in a box of the ground truth, its edges included."""

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        self.check(answer)
        found = points(given)
        if len(found) != 1:
            return Grade(0.0, False)
        ((x, y),) = found
        correct = any(x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in boxes(answer))
        return Grade(float(correct), correct)

    def check(self, answer: str) -> None:
        """
        Raises:
            ValueError: a ground truth is no box, or one without an area.
        """
        _check_boxes(answer)


def _check_boxes(answer: str) -> None:
    found = boxes(answer)
    if not 0 < len(found) <= MOST or not all(map(_area, found)):
        raise ValueError(
            f"the ground truth {answer[:60]!r} is no box: should have 1 to {MOST} of [x1, y1, x2, y2], "
            "x1 < x2 and y1 < y2"
        )
