from typing import get_args

import pytest

from megarl.data.generators.registry import GENERATORS, check_options, generate
from megarl.errors import UserError
from megarl.recipe import DataSection
from tests.data.generators.folders import rows


def test_recipes_know_every_generator():
    accepted, none = get_args(DataSection.model_fields["generator"].annotation)
    assert get_args(accepted) == tuple(sorted(GENERATORS)) and none is type(None)


@pytest.mark.parametrize("name, options", [("digits", {}), ("scenes", {"train": 8, "image_size": 16}), ("mixed", {})])
def test_accepted_options(name, options):
    check_options(name, options)


@pytest.mark.parametrize("key", ["trian", "folder", "question"])
def test_unknown_options_are_named(key):
    with pytest.raises(UserError, match=f"data.generator_options.{key} = 3: digits takes only image_size, scans$"):
        check_options("digits", {key: 3})


def test_options_reach_the_generator(tmp_path):
    generate("color_codeword", tmp_path / "data", {"train": 8, "test": 16})
    assert (len(rows(tmp_path / "data", "train")), len(rows(tmp_path / "data", "test"))) == (8, 16)


def test_an_option_out_of_range_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"data.generator_options = \{'min_things': 1\} of scenes: 1 to 6 things"):
        generate("scenes", tmp_path / "data", {"min_things": 1})
