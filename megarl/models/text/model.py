"""A language model alone: what Bridge maps onto Megatron's GPTModel itself (Qwen3, Llama)."""

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule

from megarl.models.decoder import language_model
from megarl.models.policy_model import PolicyModel


class TextModel(PolicyModel, MegatronModule):
    """`config` is Bridge's provider, finalised; `groups` are those of its layout, by default Megatron's own."""

    def __init__(self, config, groups: ProcessGroupCollection | None = None):
        super().__init__(config)
        self.pg_collection = groups or ProcessGroupCollection.use_mpu_process_groups()
        self.language_model = language_model(config, self.pg_collection)
        self.model_type = ModelType.encoder_or_decoder  # asked for by Megatron's schedules

    @property
    def bridged(self) -> torch.nn.Module:
        return self.language_model

    def freeze(self, language: bool, vision: bool, projector: bool) -> None:
        assert not (vision or projector)  # refused by `megarl.check`
        self.language_model.requires_grad_(not language)

    def set_input_tensor(self, input_tensor) -> None:
        """Asked for by Megatron's schedules; a pipeline has one stage."""
