import time

import pytest

from megarl.environments.boxes import MOST, BoxIoU, PointInBox, best_match, boxes, iou, points
from megarl.environments.score import Grade

QWEN = '```json\n[\n\t{"bbox_2d": [1, 2, 3.5, 40], "label": "a [red] cube"},\n\t{"bbox_2d": [-5,6,7,8]}\n]\n```'


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[1, 2, 3, 4]", [(1, 2, 3, 4)]),
        ("The box is [1,2,3,4].", [(1, 2, 3, 4)]),
        ("[[1, 2, 3, 4], [5, 6, 7, 8]]", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ('{"bbox_2d": [1, 2, 3, 4]}', [(1, 2, 3, 4)]),
        (QWEN, [(1, 2, 3.5, 40), (-5, 6, 7, 8)]),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", [(1, 2, 3, 4)]),
        ("(1, 2, 3, 4)", [(1, 2, 3, 4)]),
        ("[1, 2, 3]", []),
        ("[1, 2, 3, 4, 5]", []),
        ("[1, 2, 3, x]", []),
        ("1, 2, 3, 4", []),
        ("", []),
    ],
)
def test_boxes(text, expected):
    assert boxes(text) == expected


def test_points():
    assert points("[1, 2]") == points("(1,2)") == points('{"point_2d": [1, 2], "label": "x"}') == [(1, 2)]
    assert points("[1, 2, 3, 4]") == points("nowhere") == []


def test_iou_by_hand():
    """Areas 4 and 4, intersection 1: 1 / 7."""
    assert iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert iou((0, 0, 2, 2), (0, 0, 2, 2)) == 1
    assert iou((0, 0, 2, 2), (2, 0, 4, 2)) == 0
    assert iou((0, 0, 4, 4), (1, 1, 2, 2)) == 1 / 16
    assert iou((2, 2, 0, 0), (0, 0, 2, 2)) == 0


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_best_match_is_found_in_any_order(count):
    true = [(10.0 * i, 0.0, 10.0 * i + 12, 10.0) for i in range(count)]
    assert sorted(best_match(true[::-1], true)) == [1.0] * count


@pytest.mark.parametrize(
    "threshold, given, credit, correct",
    [
        (None, "[0, 0, 10, 10]", 1, True),
        (None, "[0, 0, 10, 5]", 0.5, True),
        (None, "[0, 0, 10, 4]", 0.4, False),
        (0.5, "[0, 0, 10, 5]", 1, True),
        (0.5, "[0, 0, 10, 4]", 0, False),
        (None, "[0, 0, 10, 10], [20, 20, 30, 30]", 0.5, False),
        (0.5, "[0, 0, 10, 10], [0, 0, 10, 10]", 0.5, False),
        (None, "[10, 10, 0, 0]", 0, False),
        (None, "no box", 0, False),
    ],
)
def test_one_box(threshold, given, credit, correct):
    assert BoxIoU(threshold).grade(given, "[0, 0, 10, 10]") == Grade(pytest.approx(credit), correct)


def test_several_boxes():
    truth = '[{"bbox_2d": [0, 0, 10, 10]}, {"bbox_2d": [20, 20, 30, 30]}]'
    assert BoxIoU().grade("[20, 20, 30, 30] [0, 0, 10, 10]", truth) == Grade(1, True)
    assert BoxIoU().grade("[20, 20, 30, 30]", truth) == Grade(0.5, False)
    assert BoxIoU(0.5).grade("[20, 20, 30, 30] [0, 0, 10, 1]", truth) == Grade(0.5, False)


def test_point_in_box():
    truth = "[0, 0, 10, 10], [20, 20, 30, 30]"
    for point, right in (("[5, 5]", True), ("(10, 10)", True), ("[25, 21]", True), ("[11, 5]", False)):
        assert PointInBox().grade(point, truth) == Grade(float(right), right)
    assert PointInBox().grade("[5, 5] [25, 25]", truth) == Grade(0, False)
    assert PointInBox().grade("here", truth) == Grade(0, False)


@pytest.mark.parametrize("grader", [BoxIoU(), PointInBox()])
@pytest.mark.parametrize("answer", ["cat", "[1, 2, 3]", "[5, 5, 5, 9]", "[9, 9, 1, 1]"])
def test_a_truth_that_is_no_box(grader, answer):
    with pytest.raises(ValueError, match="is no box: should have 1 to 64"):
        grader.grade("[1, 1]", answer)


def test_more_boxes_than_are_matched():
    """They would be most of what there is, and right by chance."""
    truth = "[0, 0, 10, 10]"
    assert BoxIoU().grade(truth * MOST, truth).credit == 1 / MOST
    assert BoxIoU().grade(truth * (MOST + 1), truth) == Grade(0, False)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1, " * 50_000, "[" + " " * 100_000, "[" + "1" * 100_000])
def test_time_is_bounded(text):
    begun = time.process_time()
    BoxIoU().grade(text, "[0, 0, 1, 1]")
    assert time.process_time() - begun < 1
