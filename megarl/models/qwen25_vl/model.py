"""Qwen2.5-VL: transformers' vision tower, whole on each rank as Bridge has it, before Megatron's GPTModel."""

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.bridge.utils.common_utils import hook_hf_module_setattr_for_tp_grad_sync
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from megarl.models.decoder import language_model
from megarl.models.policy_model import PolicyModel
from megarl.platform.kernels import kernels


class Qwen25VL(PolicyModel, MegatronModule):
    """`config` is Bridge's provider, finalised, its `mrope_section` that of the checkpoint; `groups` are those of its
    layout, by default Megatron's own."""

    def __init__(self, config, groups: ProcessGroupCollection | None = None):
        super().__init__(config)
        self.pg_collection = groups or ProcessGroupCollection.use_mpu_process_groups()
        # In the names of Bridge's mapping.  The ranks of tensor parallelism compute equal features; their gradients
        # are averaged, so that rounding drives no two copies apart.
        self.visual = Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision_config)
        hook_hf_module_setattr_for_tp_grad_sync(self.visual)
        _keep_in_float32(self.visual.rotary_pos_emb)
        self.language_model = language_model(config, self.pg_collection, config.mrope_section)
        self.model_type = ModelType.encoder_or_decoder  # asked for by Megatron's schedules

    @property
    def merge_size(self) -> int:
        return self.config.vision_config.spatial_merge_size

    @property
    def feature_row_bytes(self) -> int:
        return self.config.hidden_size * self.config.params_dtype.itemsize

    @property
    def tower(self) -> torch.nn.Module:
        return self.visual

    @property
    def tower_config(self) -> TransformerConfig:
        vision = self.config.vision_config
        return TransformerConfig(
            num_layers=vision.depth,
            hidden_size=vision.hidden_size,
            num_attention_heads=vision.num_heads,
            ffn_hidden_size=vision.intermediate_size,
            gated_linear_unit=True,
        )

    def freeze(self, language: bool, vision: bool, projector: bool) -> None:
        self.visual.requires_grad_(not vision)
        self.visual.merger.requires_grad_(not projector)
        self.language_model.requires_grad_(not language)

    def set_input_tensor(self, input_tensor) -> None:
        """Asked for by Megatron's schedules; a pipeline has one stage."""

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """`[1, media tokens, hidden]`, see `PolicyModel.encode`."""
        pixels = pixels.to(self.visual.device, self.config.params_dtype)
        out = self.visual(pixels, grid_thw=grids.to(pixels.device), return_dict=True)
        return out.pooler_output[None]


def _keep_in_float32(rotary: torch.nn.Module) -> None:
    """A buffer would be rounded when the model is made bfloat16; transformers' own loading leaves it alone."""
    frequencies = rotary.inv_freq.float()
    del rotary.inv_freq
    rotary.inv_freq = frequencies.to("cuda" if kernels().gpu else "cpu")
