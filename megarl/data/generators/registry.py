"""Generators by name, and the sizes that each takes."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.data.generators.color_codeword import write_color_codeword
from megarl.data.generators.digits import write_digits
from megarl.data.generators.largest_digit import write_largest_digit
from megarl.data.generators.mixed import write_mixed
from megarl.data.generators.motion_video import write_motion_video
from megarl.data.generators.scenes import write_scenes
from megarl.errors import UserError

GENERATORS: dict[str, Callable[..., None]] = {
    "color_codeword": write_color_codeword,
    "digits": write_digits,
    "largest_digit": write_largest_digit,
    "mixed": write_mixed,
    "motion_video": write_motion_video,
    "scenes": write_scenes,
}
"""What makes a data folder, by `data.generator`."""


def check_options(name: str, options: Mapping[str, int]) -> None:
    """Refuses sizes that the generator does not take.

    Raises:
        UserError: names the key and those that are accepted.
    """
    parameters = inspect.signature(GENERATORS[name]).parameters.values()
    accepted = [parameter.name for parameter in parameters if parameter.annotation is int]
    for key, value in options.items():
        if key not in accepted:
            raise UserError(
                f"data.generator_options.{key} = {value}: {name} takes only {', '.join(accepted) or 'no options'}"
            )


def generate(name: str, folder: Path, options: Mapping[str, int]) -> None:
    """Makes the data set.

    Raises:
        UserError: an option is unknown or out of range, or `folder` is there already and is not empty.
    """
    check_options(name, options)
    try:
        GENERATORS[name](folder, **options)
    except ValueError as error:
        raise UserError(f"data.generator_options = {dict(options)} of {name}: {error}") from None
