import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from megarl.data.generators import scenes
from megarl.data.generators.rows import draw_distinct
from megarl.data.generators.scenes import COLOURS, KINDS, SHAPES, SIZES, Thing, render, write_scenes
from tests.data.generators.folders import assert_held_out, digest, parts, rows

ANSWERS = {"count": list("01234"), "exist": ["no", "yes"], "color": sorted(COLOURS), "relation": ["no", "yes"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, train=320, test=160, image_size=32)
    return folder


def test_rows(folder):
    first = rows(folder, "train")[0]
    picture, question = parts(first)
    assert (picture, question["type"]) == ({"type": "image", "image": "images/00000.png"}, "text")
    assert (first["source"], first["answer"]) == ("scenes/count", "0")
    with Image.open(folder / picture["image"]) as image:
        assert (image.mode, image.size) == ("RGB", (32, 32))
    assert_held_out(folder)


@pytest.mark.parametrize("split, count", [("train", 80), ("test", 40)])
def test_kinds_and_answers_are_balanced(folder, split, count):
    for kind in KINDS:
        answers = Counter(row["answer"] for row in rows(folder, split) if row["source"] == f"scenes/{kind}")
        assert sorted(answers) == ANSWERS[kind]
        assert set(answers.values()) == {count // len(ANSWERS[kind])}


def test_answers_are_true():
    """Every question is read again, and answered from the scene by other code."""
    for number in range(400):
        kind = KINDS[number % 4]
        answer = ANSWERS[kind][number // 4 % len(ANSWERS[kind])]
        question = scenes._draw_question(np.random.RandomState(number), kind, answer, 2, 6)
        assert question.answer == answer
        assert answered(question.text, question.things) == answer, (question.text, question.things)


def answered(text: str, things: tuple[Thing, ...]) -> str:
    if match := re.fullmatch(r"How many (\w+) things are there\?|How many (\w+)s are there\?", text):
        return str(sum(match[1] == thing.colour or match[2] == thing.shape for thing in things))
    if match := re.fullmatch(r"Is there a (\w+) (\w+) (\w+)\?", text):
        return "yes" if match.groups() in {(t.size, t.colour, t.shape) for t in things} else "no"
    if match := re.fullmatch(r"What color is the (\w+) thing\?", text):
        by_x, by_y = (sorted(things, key=key) for key in (lambda t: t.x, lambda t: t.y))
        at = {"leftmost": by_x[0], "rightmost": by_x[-1], "top": by_y[0], "bottom": by_y[-1]}
        return at[match[1]].colour
    match = re.fullmatch(r"Is the (\w+ \w+ \w+) (left|right) of the (\w+ \w+ \w+)\?", text)
    (one,), (other,) = ([t for t in things if t.name == match[group]] for group in (1, 3))
    return "yes" if (one.x < other.x) == (match[2] == "left") else "no"


def test_things_do_not_overlap_and_stay_in_the_picture():
    for seed in range(50):
        things = scenes._draw_things(np.random.RandomState(seed), 1 + seed % scenes.MOST_THINGS)
        assert len(things) == 1 + seed % scenes.MOST_THINGS
        for place, one in enumerate(things):
            reach = 1.3 * SIZES[one.size]
            assert reach < one.x < 1 - reach and reach < one.y < 1 - reach
            for other in things[:place]:
                assert np.hypot(one.x - other.x, one.y - other.y) > 1.4 * (SIZES[one.size] + SIZES[other.size])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_thing_is_seen_where_it_is_in_its_colour(shape, colour):
    """The middle of it is nearer to its colour than to any other, and the corners show the ground."""
    pixels = np.asarray(render([Thing(shape, colour, "large", 0.3, 0.6)], 128), float)
    middle = pixels[74:80, 35:41].mean((0, 1))
    distances = {name: np.linalg.norm(middle - rgb) for name, rgb in COLOURS.items()}
    assert min(distances, key=distances.get) == colour
    assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1]] == pixels[0, 0]).all()
    assert np.abs(pixels - pixels[0, 0]).max(-1)[:, 64:].max() == 0  # nothing on the right


def test_shapes_and_sizes_look_different():
    pictures = {
        (shape, size): np.asarray(render([Thing(shape, "red", size, 0.5, 0.5)], 64), float)
        for shape in SHAPES
        for size in SIZES
    }
    names = list(pictures)
    for place, one in enumerate(names):
        for other in names[:place]:
            different = np.abs(pictures[one] - pictures[other]).max(-1) > 25
            assert different.sum() > 5, (one, other)


def test_the_bytes_are_the_same_every_time(folder, tmp_path):
    write_scenes(tmp_path, train=320, test=160, image_size=32)
    assert digest(tmp_path) == digest(folder)


@pytest.mark.parametrize("least, most", [(1, 4), (5, 4), (2, scenes.MOST_THINGS + 1)])
def test_numbers_of_things_that_cannot_be(tmp_path, least, most):
    with pytest.raises(ValueError, match=f"{least} to {most} things"):
        write_scenes(tmp_path / "scenes", min_things=least, max_things=most)
    assert not list(tmp_path.iterdir())


def test_the_most_things_that_fit(tmp_path):
    most = scenes.MOST_THINGS
    write_scenes(tmp_path / "scenes", train=8, test=4, image_size=16, min_things=most, max_things=most)
    assert len(rows(tmp_path / "scenes", "train")) == 8


def test_too_few_different_examples():
    with pytest.raises(ValueError, match="only 3 of 4 different examples"):
        draw_distinct(1, 4, lambda generator, number: int(generator.randint(3)))
