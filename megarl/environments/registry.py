"""Environments by the names and options that a recipe gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from megarl.environments.boxes import BoxIoU, PointInBox
from megarl.environments.dialogue import Dialogue
from megarl.environments.environment import BySource, Graded, Weighed
from megarl.environments.exact_match import ExactMatch
from megarl.environments.extraction import Extraction, Format
from megarl.environments.math_answer import MathAnswer
from megarl.environments.multiple_choice import MultipleChoice
from megarl.environments.numeric import Numeric
from megarl.environments.own import load_own, make_own
from megarl.environments.visual_answer import VisualAnswer
from megarl.environments.zoom import Zoom

GRADERS: dict[str, type] = {
    "exact_match": ExactMatch,
    "visual_answer": VisualAnswer,
    "multiple_choice": MultipleChoice,
    "numeric": Numeric,
    "math": MathAnswer,
    "box_iou": BoxIoU,
    "point_in_box": PointInBox,
}
DIALOGUES: dict[str, type] = {"zoom": Zoom}
_UNBOUNDED = {"math"}
"""Graders whose time nothing bounds."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment, as plain values that go to another process."""

    key: str
    """Of the recipe, for messages."""
    name: str
    """One of `GRADERS`, or `package.module:Name`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    extract: str | None = None
    format: str | None = None
    format_reward: float = 0.0
    weight: float = 1.0

    @property
    def bounded(self) -> bool:
        """Whether it may run in the process of the rank: it neither hangs nor ends it."""
        return self.name in GRADERS and self.name not in _UNBOUNDED

    def build(self) -> Weighed:
        """
        Raises:
            UserError: a user's own cannot be made.
        """
        if self.name not in GRADERS:
            return Weighed(load_own(self.name, self.options, self.key), self.weight)
        grader = GRADERS[self.name](**self.options)
        graded = Graded(grader, Extraction(self.extract), Format(self.format), self.format_reward)
        return Weighed(graded, self.weight)


@dataclass(frozen=True)
class EnvironmentSpecs:
    """What judges the rows of a data set, by their sources."""

    default: EnvironmentSpec | None
    """Of sources that have none of their own; None: there is none for them."""
    sources: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    dialogue: "DialogueSpec | None" = None
    """Built too, where it is only asked whether all can be."""

    @property
    def bounded(self) -> bool:
        return all(spec.bounded for spec in (self.default, *self.sources.values()) if spec)

    def of(self, source: str) -> EnvironmentSpec | None:
        return self.sources.get(source, self.default)

    def build(self) -> BySource:
        """
        Raises:
            UserError: a user's own cannot be made.
        """
        if self.dialogue is not None:
            self.dialogue.build()
        sources = {source: spec.build() for source, spec in self.sources.items()}
        return BySource(self.default and self.default.build(), sources)


@dataclass(frozen=True)
class DialogueSpec:
    """Who replies to completions."""

    key: str
    """Of the recipe, for messages."""
    name: str
    """One of `DIALOGUES`, or `package.module:Name`."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Dialogue:
        """
        Raises:
            UserError: a user's own cannot be made.
        """
        if self.name in DIALOGUES:
            return DIALOGUES[self.name](**self.options)
        return make_own(self.name, self.options, self.key, {"reset": 2, "step": 3})


def wrong_option(name: str, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first option that a grader or dialogue does not take, or not with this value, and what it would accept."""
    from pydantic import ConfigDict, ValidationError, create_model  # for the recipe, not for each process that judges

    kind = {**GRADERS, **DIALOGUES}[name]
    known = {option.name: option.default for option in fields(kind)}
    for option in options:
        if option not in known:
            return option, f"{name} has {', '.join(known)}" if known else f"{name} has no options"
    kinds = get_type_hints(kind, include_extras=True)
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    accepted = create_model(name, __config__=strict, **{key: (kinds[key], default) for key, default in known.items()})
    try:
        accepted.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        return str(first["loc"][0]), first["msg"].removeprefix("Input ")
    return None


def refusal_of_answer(spec: EnvironmentSpec, answer: str) -> str | None:
    """What a grader has against a ground truth, where it can tell without a completion."""
    check = getattr(GRADERS.get(spec.name), "check", None)
    if check is None:
        return None
    try:
        GRADERS[spec.name](**spec.options).check(answer)
    except ValueError as error:
        return str(error)
    return None
