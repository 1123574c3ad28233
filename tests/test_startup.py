"""What is looked at before a run is built.  What a whole run refuses is in tests/test_train.py."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import UserError
from megarl.models.families import FAMILIES
from megarl.models.hf_config import family_of, hf_config
from megarl.models.weight_files import stored_shapes
from megarl.recipe import load_recipe
from megarl.startup import check_tokens
from tests import tiny
from tests.distributed import lazy
from tests.test_train import DIGITS

startup = lazy("megarl.startup")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return tiny.write_family_checkpoint(tmp_path_factory.mktemp("family") / "checkpoint", request.param)


@pytest.fixture
def parts(folder):
    """The config and the processor."""
    config = hf_config(str(folder), None)
    return config, tiny.load_processor(folder, FAMILIES[config.model_type])


def test_tokens_without_an_embedding(parts):
    """The vocabulary may be smaller than the embedding, and not larger."""
    config, processor = parts
    check_tokens(config, processor)
    largest = len(processor.tokenizer) - 1
    config.get_text_config().vocab_size = largest + 1
    check_tokens(config, processor)
    config.get_text_config().vocab_size = largest
    with pytest.raises(UserError) as refused:
        check_tokens(config, processor)
    assert str(refused.value) == (
        f"the tokenizer gives '~' the id {largest}: the model's embedding has {largest} rows "
        "(vocab_size in config.json)"
    )


def test_added_tokens_count(parts):
    config, processor = parts
    processor.tokenizer.add_tokens([f"<added {number}>" for number in range(tiny.VOCABULARY)])
    with pytest.raises(UserError, match="gives '<added 127>' the id"):
        check_tokens(config, processor)


@pytest.mark.parametrize("folder", [name for name, family in FAMILIES.items() if family.media], indirect=True)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_media_tokens_of_another_config(parts, kind):
    config, processor = parts
    token = getattr(processor, f"{kind}_token_id")
    setattr(config, f"{kind}_token_id", token + 9)
    with pytest.raises(UserError) as refused:
        check_tokens(config, processor)
    assert str(refused.value) == (
        f"the tokenizer gives '<|{kind}_pad|>' the id {token}: config.json has {kind}_token_id = {token + 9}"
    )


def _prepared(folder: Path, recipe) -> str:
    return str(startup.prepare_checkpoint(recipe, folder))


def test_random_weights_of_a_configuration(ranks, folder, tmp_path):
    """Of a folder, with weights or without, its configuration and processor are taken; the weights are others."""
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    for source in (bare, folder):
        recipe = load_recipe(DIGITS, [*_OF_A_FOLDER, f"model.path={source}", "model.init=random", "model.init_std=0.3"])
        run = tmp_path / source.name
        (made,) = ranks.run(_prepared, run, recipe)
        assert made == str(run / "initial")
    weights, given = load_file(tmp_path / "bare" / "initial" / "model.safetensors"), stored_shapes(folder)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == given
    again = load_file(Path(made) / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    theirs = load_file(folder / "model.safetensors")
    assert not any(torch.equal(tensor, theirs[name]) for name, tensor in weights.items() if tensor.ndim > 1)
    vocabulary = tiny.load_processor(Path(made), family_of(folder)).tokenizer.get_vocab()
    assert vocabulary == tiny.load_processor(folder, family_of(folder)).tokenizer.get_vocab()


_OF_A_FOLDER = ["model.config=null", "model.tiny_processor=null"]
