"""What is looked at before a run is built.  What a whole run refuses is in tests/test_train.py."""

from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.startup import check_tokens
from tests import tiny


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
