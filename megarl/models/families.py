"""The model families that megarl builds.  A further one is a further entry here and a package beside `qwen3_vl`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Family:
    """What is named `module:name` is imported when it is asked for: it brings torch and Megatron along."""

    model_type: str
    """As a Hugging Face config names it."""
    architecture: str
    """Likewise: the class in transformers whose weights it has."""
    model: str
    """The model's class; constructed with Bridge's finalised provider and the process groups of its layout."""
    positions: str
    """Rotary positions of a prompt: a function of the config that gives a `megarl.media.expand.PositionRule`."""
    processor: str | None = None
    """The class in transformers that prepares its pictures and videos; None where it reads text alone."""
    split_tower: bool = True
    """Tensor-parallel ranks share the matrices of its vision tower; else each has the whole tower."""
    qk_norm: bool = False
    """The language model normalises queries and keys."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of parameter names in transformers' model, and what a checkpoint has in their place."""
    rope_types: tuple[str, ...] = ("default",)
    """Of a config's `rope_parameters`, those that Bridge carries over."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the language model's config for which Bridge has one value only."""

    @property
    def media(self) -> bool:
        """Whether it reads pictures and videos."""
        return self.processor is not None

    @property
    def hf_class(self) -> Any:
        """The class in transformers."""
        return getattr(import_module("transformers"), self.architecture)

    def name_in_checkpoint(self, parameter: str) -> str:
        """Of a parameter of transformers' model."""
        for here, there in self.renamed.items():
            if parameter.startswith(here):
                return there + parameter.removeprefix(here)
        return parameter

    def name_in_model(self, weight: str) -> str:
        """The reverse: of a weight in a checkpoint."""
        for here, there in self.renamed.items():
            if weight.startswith(there):
                return here + weight.removeprefix(there)
        return weight

    def load(self, part: str) -> Any:
        """The object that the field `part` names."""
        module, name = getattr(self, part).split(":")
        return getattr(import_module(module), name)


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen3_vl",
            architecture="Qwen3VLForConditionalGeneration",
            model="megarl.models.qwen3_vl.model:Qwen3VL",
            positions="megarl.models.qwen3_vl.positions:position_rule",
            qk_norm=True,
            processor="Qwen3VLProcessor",
        ),
        Family(
            model_type="qwen3_vl_moe",
            architecture="Qwen3VLMoeForConditionalGeneration",
            model="megarl.models.qwen3_vl.model:Qwen3VL",
            positions="megarl.models.qwen3_vl.positions:position_rule",
            qk_norm=True,
            processor="Qwen3VLProcessor",
        ),
        Family(
            model_type="qwen2_5_vl",
            architecture="Qwen2_5_VLForConditionalGeneration",
            model="megarl.models.qwen25_vl.model:Qwen25VL",
            positions="megarl.models.qwen25_vl.positions:position_rule",
            processor="Qwen2_5_VLProcessor",
            split_tower=False,
            renamed={"model.visual.": "visual.", "model.language_model.": "model."},
            fixed={"hidden_act": "silu", "use_sliding_window": False},
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            model="megarl.models.text.model:TextModel",
            positions="megarl.models.text.positions:position_rule",
            qk_norm=True,
            fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        ),
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            model="megarl.models.text.model:TextModel",
            positions="megarl.models.text.positions:position_rule",
            rope_types=("default", "linear", "llama3"),
            fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        ),
    )
}
"""By `model_type`."""
