"""Hugging Face configurations, checked: transformers itself carries misspelt keys along without reading them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import UserError, one_line
from megarl.models.families import FAMILIES, Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def hf_config(path: str | None, inline: dict | None, key: str = "model.path") -> "PreTrainedConfig":
    """The Hugging Face configuration of a model, from a checkpoint folder, which the recipe's `key` names, or given
    inline (`model_type` and its keys).

    Raises:
        UserError: no such folder, another family, an unknown key or a wrong type inside the configuration, a mixture
            of experts with layers that have none.
    """
    if path is not None and not Path(path, "config.json").is_file():
        raise UserError(f"{key} = {path!r}: should be a folder with a config.json")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    source = "model.config" if path is None else f"{key} = {path!r}"
    try:
        if path is not None:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
        else:
            values = copy.deepcopy(inline)  # transformers rewrites the dictionaries that it is given
            config = AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"{source}: {one_line(error)[:200]}") from None
    if config.model_type not in FAMILIES:
        raise UserError(f"{source} has model_type {config.model_type!r}: should be one of {', '.join(FAMILIES)}")
    expected = FAMILIES[config.model_type].architecture
    if config.architectures != [expected]:
        raise UserError(f"{source} has architectures {config.architectures!r}: should be [{expected!r}]")
    text = config.get_text_config()
    for key, every_layer in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        value = getattr(text, key, every_layer)
        if value != every_layer:
            raise UserError(
                f"{source} has text_config.{key} = {value}: should be {every_layer}, experts in every layer"
            )
    for key in _unknown_keys(inline or {}, config):
        raise UserError(f"unknown key 'model.config.{key}': transformers reads no such key of {config.model_type}")
    return config


def family_of(folder: Path) -> Family:
    """The family of a checkpoint folder; refuses what `hf_config` does."""
    return FAMILIES[hf_config(str(folder), None).model_type]


def _unknown_keys(values: dict, config: "PreTrainedConfig") -> Iterator[str]:
    """Dotted keys that the configuration would carry along without reading them."""
    common = {"model_type", *config.__dataclass_fields__}
    for key, value in values.items():
        if key in config.sub_configs and isinstance(value, dict):
            known = common | config.sub_configs[key].__dataclass_fields__.keys()
            yield from (f"{key}.{inner}" for inner in value if inner not in known)
        elif key not in common:
            yield key
