"""Hugging Face configurations, checked: transformers itself carries misspelt keys along without reading them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import UserError, one_line
from megarl.models.families import FAMILIES, Family
from megarl.models.hub import folder_with

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def hf_config(path: str | None, inline: dict | None, key: str = "model.path") -> "PreTrainedConfig":
    """The Hugging Face configuration of a model: that of a checkpoint, the folder or name on the hub that the recipe's
    `key` gives, or one given inline (`model_type` and its keys).

    Raises:
        UserError: no such folder, another family, an unknown key or a wrong type inside the configuration, a mixture
            of experts with layers that have none.
    """
    folder = None if path is None else folder_with("config.json", path, key)
    if folder is not None and not (folder / "config.json").is_file():
        raise UserError(f"{key} = {path!r}: should be a folder with a config.json, or a name on the hub")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    source = "model.config" if path is None else f"{key} = {path!r}"
    try:
        if folder is not None:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        else:
            values = copy.deepcopy(inline)  # transformers rewrites the dictionaries that it is given
            config = AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"{source}: {one_line(error)[:200]}") from None
    if config.model_type not in FAMILIES:
        raise UserError(f"{source} has model_type {config.model_type!r}: should be one of {', '.join(FAMILIES)}")
    family = FAMILIES[config.model_type]
    expected = family.architecture
    if config.architectures != [expected]:
        raise UserError(f"{source} has architectures {config.architectures!r}: should be [{expected!r}]")
    text = config.get_text_config()
    for key, every_layer in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        value = getattr(text, key, every_layer)
        if value != every_layer:
            raise UserError(
                f"{source} has text_config.{key} = {value}: should be {every_layer}, experts in every layer"
            )
    for key, only in family.fixed.items():
        if (value := getattr(text, key, only)) != only:
            raise UserError(
                f"{source} has {key_of(config, key)} = {value!r}: should be {only!r} in a {config.model_type}"
            )
    _check_rope(source, config, family)
    for key in _unknown_keys(inline or {}, config):
        raise UserError(f"unknown key 'model.config.{key}': transformers reads no such key of {config.model_type}")
    return config


def key_of(config: "PreTrainedConfig", key: str) -> str:
    """Where the language model's `key` stands in the configuration."""
    return key if config.get_text_config() is config else f"text_config.{key}"


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron has built in, beside a factor that is free."""


def _check_rope(source: str, config: "PreTrainedConfig", family: Family) -> None:
    """Refuses rotary embeddings that would come out different in Megatron."""
    rope = config.get_text_config().rope_parameters
    kind, key = rope.get("rope_type", "default"), key_of(config, "rope_parameters")
    if kind not in family.rope_types:
        raise UserError(
            f"{source} has {key}.rope_type = {kind!r}: should be one of {', '.join(family.rope_types)} "
            f"in a {config.model_type}"
        )
    only = {"partial_rotary_factor": 1.0, **(_LLAMA3 if kind == "llama3" else {})}
    for name, value in only.items():
        if rope.get(name, value) != value:
            raise UserError(f"{source} has {key}.{name} = {rope[name]}: should be {value:g}, as Megatron has it")


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
