"""The model families that megarl builds.  A further one is a further entry here and a package beside `qwen3_vl`."""

from dataclasses import dataclass
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
    """Rotary positions of a prompt with media, a `megarl.media.expand.PositionRule`."""

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
            positions="megarl.models.qwen3_vl.positions:mrope_positions",
        ),
        Family(
            model_type="qwen3_vl_moe",
            architecture="Qwen3VLMoeForConditionalGeneration",
            model="megarl.models.qwen3_vl.model:Qwen3VL",
            positions="megarl.models.qwen3_vl.positions:mrope_positions",
        ),
    )
}
"""By `model_type`."""
