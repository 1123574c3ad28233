"""Rendered scenes of simple solids with questions about them, in the manner of CLEVR (arXiv 1612.06890)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from megarl.data.folder import whole_folder
from megarl.data.generators.rows import draw_distinct, row, write_rows

COLOURS = {
    "gray": (120, 120, 120),
    "red": (200, 50, 50),
    "blue": (50, 80, 210),
    "green": (40, 150, 60),
    "brown": (130, 80, 40),
    "purple": (140, 60, 180),
    "cyan": (50, 190, 190),
    "yellow": (230, 210, 60),
}
SHAPES = ("cube", "sphere", "cylinder")
SIZES = {"small": 0.055, "large": 0.1}
"""Half of a thing's width, as a share of the picture's side."""
PLACES = ("leftmost", "rightmost", "top", "bottom")
KINDS = ("count", "exist", "color", "relation")
"""Kinds of question."""

MOST_THINGS = 10
"""Large ones still fit beside each other without overlapping."""

_GROUND = (205, 205, 200)
_GAP = 0.06
"""Least distance, as a share of the side, by which the things that a question tells apart differ in place."""
_SUPERSAMPLING = 2


@dataclass(frozen=True)
class Thing:
    shape: str
    colour: str
    size: str
    x: float
    y: float
    """Centre, as shares of the picture's side from the upper left corner; kept to 3 digits."""

    @property
    def name(self) -> str:
        return f"{self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Question:
    things: tuple[Thing, ...]
    kind: str
    text: str
    answer: str


def write_scenes(
    folder: Path, train: int = 2048, test: int = 256, image_size: int = 128, min_things: int = 2, max_things: int = 6
) -> None:
    """Write the data set: `images/NNNNN.png`, `train.jsonl` and `test.jsonl`.

    A row asks one question about a scene of its own, `image_size` x `image_size` pixels with `min_things` to
    `max_things` things that do not overlap.  Its `source` is `scenes/KIND`, in turn:

    - `count`: how many things are of a colour or shape; a number from 0 to 4;
    - `exist`: whether there is a thing of a size, colour and shape; yes or no;
    - `color`: of the thing at a place (`PLACES`);
    - `relation`: whether one thing is left (right) of another; yes or no.

    Within a kind the answers come in turn, so that the best constant answer is worth no more than one in so
    many.  No question is asked twice about the same scene.  The bytes are the same on every run.

    Raises:
        UserError: `folder` is there already and is not empty.
        ValueError: not 2 <= `min_things` <= `max_things` <= `MOST_THINGS`.
    """
    if not 2 <= min_things <= max_things <= MOST_THINGS:
        raise ValueError(f"{min_things} to {max_things} things: should be 2 to {MOST_THINGS} (two for a relation)")

    def draw(generator: np.random.RandomState, number: int) -> Question:
        kind, turn = KINDS[number % len(KINDS)], number // len(KINDS)
        answers = _answers(kind, max_things)
        return _draw_question(generator, kind, answers[turn % len(answers)], min_things, max_things)

    with whole_folder(folder) as temporary:
        (temporary / "images").mkdir()
        rows = []
        for number, question in enumerate(draw_distinct(19, train + test, draw)):
            name = f"images/{number:05d}.png"
            render(question.things, image_size).save(temporary / name)
            rows.append(row([("image", name), question.text], question.answer, f"scenes/{question.kind}"))
        write_rows(temporary, rows[:train], rows[train:])


def _answers(kind: str, max_things: int) -> Sequence[str]:
    """The answers of a kind of question, all equally frequent."""
    if kind == "count":
        return [str(count) for count in range(min(4, max_things) + 1)]
    return list(COLOURS) if kind == "color" else ("yes", "no")


def _draw_question(generator: np.random.RandomState, kind: str, answer: str, least: int, most: int) -> Question:
    """Draws scenes and questions until one has the answer."""
    ask = {"count": _ask_count, "exist": _ask_exist, "color": _ask_color, "relation": _ask_relation}[kind]
    while True:
        things = _draw_things(generator, int(generator.randint(least, most + 1)))
        asked = ask(generator, things)
        if asked is not None and asked[1] == answer:
            return Question(things, kind, *asked)


def _draw_things(generator: np.random.RandomState, count: int) -> tuple[Thing, ...]:
    """Things that do not overlap, from the back of the scene to its front.  A scene in which one finds no place
    is begun again."""
    things: list[Thing] = []
    tries = 0
    while len(things) < count:
        tries += 1
        if tries % 200 == 0:
            things = []
        shape, colour, size = (_choose(generator, words) for words in (SHAPES, list(COLOURS), list(SIZES)))
        reach = 1.5 * SIZES[size]
        x, y = (round(float(value), 3) for value in generator.uniform(reach, 1 - reach, 2))
        clear = (np.hypot(x - t.x, y - t.y) > 1.5 * (SIZES[size] + SIZES[t.size]) for t in things)
        if all(clear):
            things.append(Thing(shape, colour, size, x, y))
    return tuple(sorted(things, key=lambda thing: thing.y))


def _choose[T](generator: np.random.RandomState, options: Sequence[T]) -> T:
    return options[generator.randint(len(options))]


def _ask_count(generator: np.random.RandomState, things: tuple[Thing, ...]) -> tuple[str, str]:
    by, words = _choose(generator, (("colour", list(COLOURS)), ("shape", SHAPES)))
    word = _choose(generator, words)
    what = f"{word} things" if by == "colour" else f"{word}s"
    return f"How many {what} are there?", str(sum(getattr(thing, by) == word for thing in things))


def _ask_exist(generator: np.random.RandomState, things: tuple[Thing, ...]) -> tuple[str, str]:
    """Half of the time about a thing that is there, else about one that may not be: one with a part changed, so
    that "no" cannot be told by one word of the question."""
    shown = _choose(generator, things)
    size, colour, shape = shown.size, shown.colour, shown.shape
    changed = generator.randint(6)
    if changed == 0:
        size = _choose(generator, list(SIZES))
    elif changed == 1:
        colour = _choose(generator, list(COLOURS))
    elif changed == 2:
        shape = _choose(generator, SHAPES)
    name = f"{size} {colour} {shape}"
    return f"Is there a {name}?", "yes" if any(thing.name == name for thing in things) else "no"


def _ask_color(generator: np.random.RandomState, things: tuple[Thing, ...]) -> tuple[str, str] | None:
    place = _choose(generator, PLACES)
    sign = 1 if place in ("leftmost", "top") else -1
    first, *others = sorted(things, key=lambda thing: sign * _along(thing, place))
    if others and abs(_along(others[0], place) - _along(first, place)) < _GAP:
        return None  # too close to call
    return f"What color is the {place} thing?", first.colour


def _along(thing: Thing, place: str) -> float:
    return thing.x if place in ("leftmost", "rightmost") else thing.y


def _ask_relation(generator: np.random.RandomState, things: tuple[Thing, ...]) -> tuple[str, str] | None:
    one, other = (things[place] for place in generator.permutation(len(things))[:2])
    names = [thing.name for thing in things]
    if names.count(one.name) > 1 or names.count(other.name) > 1 or abs(one.x - other.x) < _GAP:
        return None
    side = _choose(generator, ("left", "right"))
    holds = (one.x < other.x) == (side == "left")
    return f"Is the {one.name} {side} of the {other.name}?", "yes" if holds else "no"


def render(things: Sequence[Thing], size: int) -> Image.Image:
    """The scene as an RGB picture of `size` x `size` pixels, lit from the upper left."""
    side = size * _SUPERSAMPLING
    image = Image.new("RGB", (side, side), _GROUND)
    draw = ImageDraw.Draw(image)
    for thing in things:
        x, y, half = (value * side for value in (thing.x, thing.y, SIZES[thing.size]))
        colour = COLOURS[thing.colour]
        draw.ellipse((x - half, y + 0.6 * half, x + 1.3 * half, y + 1.3 * half), fill=_shade(_GROUND, 0.85))
        _SOLIDS[thing.shape](draw, x, y, half, colour)
    return image.resize((size, size), Image.Resampling.BOX)


def _shade(colour: tuple[int, int, int], light: float) -> tuple[int, int, int]:
    """Darker below 1; above it, mixed with white."""
    if light <= 1:
        return tuple(round(light * value) for value in colour)
    return tuple(round(value + (light - 1) * (255 - value)) for value in colour)


def _cube(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, colour: tuple[int, int, int]) -> None:
    back, front = 0.35 * half, 0.85 * half
    left, right, top, bottom = x - half, x + front - back, y - front + back, y + half
    draw.rectangle((left, top, right, bottom), fill=colour)
    draw.polygon(
        [(left, top), (left + back, top - back), (right + back, top - back), (right, top)], fill=_shade(colour, 1.35)
    )
    draw.polygon(
        [(right, top), (right + back, top - back), (right + back, bottom - back), (right, bottom)],
        fill=_shade(colour, 0.65),
    )


def _sphere(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, colour: tuple[int, int, int]) -> None:
    rings = 8
    for ring in range(rings):
        share = 1 - ring / rings
        radius, shift = half * share, 0.35 * half * (1 - share)
        light = 0.75 + 0.6 * ring / rings
        box = (x - shift - radius, y - shift - radius, x - shift + radius, y - shift + radius)
        draw.ellipse(box, fill=_shade(colour, light))


def _cylinder(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, colour: tuple[int, int, int]) -> None:
    width, lid, steps = 0.8 * half, 0.3 * half, 12
    top, bottom = y - half + lid, y + half - lid
    draw.ellipse((x - width, bottom - lid, x + width, bottom + lid), fill=_shade(colour, 0.7))
    for step in range(steps):
        left = x - width + 2 * width * step / steps
        light = 1.1 - 0.5 * step / steps
        draw.rectangle((left, top, left + 2 * width / steps, bottom), fill=_shade(colour, light))
    draw.ellipse((x - width, top - lid, x + width, top + lid), fill=_shade(colour, 1.35))


_SOLIDS = {"cube": _cube, "sphere": _sphere, "cylinder": _cylinder}
