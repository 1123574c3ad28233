"""Bridge's Qwen3-VL, one module that the trainer and the dynamic engine share.

Bridge gives the modules, their names and the way to and from Hugging Face.  What is megarl's own is the
way through them: `megarl.models.policy_model`, and the deepstack features, which enter its first layers.
"""

from dataclasses import replace

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import split_deepstack_embs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import ModelType
from torch import Tensor

from megarl.models.decoder import DualSelfAttention, language_block_spec
from megarl.models.policy_model import MergedInput, PolicyModel
from megarl.models.qwen3_vl.tower import Tower
from megarl.parallel import context
from megarl.platform.to_device import to_device


class Qwen3VL(PolicyModel, Qwen3VLModel):
    """`config` is Bridge's provider for a Qwen3-VL, finalised; `groups` are those of its layout, by default
    Megatron's own, in which policies are trained."""

    def __init__(self, config, groups: ProcessGroupCollection | None = None):
        super().__init__(
            config,
            language_block_spec(config),
            config.vision_config,
            pre_process=True,
            post_process=True,
            pg_collection=groups or ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.model_type = ModelType.encoder_or_decoder  # asked for by Megatron's schedules
        # The angles belong to the tokens of the row as it is.  With False, Bridge's rotary module would take the
        # row for a whole unpacked sequence and slice it by context-parallel rank.
        self.language_model.rotary_pos_emb.is_thd_format = True
        # Bridge names the classes of its tower itself.
        self.vision_model.__class__ = Tower
        for layer in self.vision_model.decoder.layers:
            layer.self_attention.__class__ = DualSelfAttention

    @property
    def merge_size(self) -> int:
        return self.vision_transformer_config.spatial_merge_size

    @property
    def feature_row_bytes(self) -> int:
        layers = 1 + len(self.vision_transformer_config.deepstack_visual_indexes)
        return layers * self.config.hidden_size * self.config.params_dtype.itemsize

    @property
    def tower(self) -> torch.nn.Module:
        return self.vision_model

    @property
    def tower_config(self):
        return self.vision_model.config

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """`[1 + deepstack layers, media tokens, hidden]`, see `PolicyModel.encode`."""
        device = self.vision_model.pos_embed.weight.device
        features, deepstack = self.vision_model(
            hidden_states=to_device(pixels, device).to(self.config.params_dtype), grid_thw=grids.cpu()
        )
        return torch.stack([features, *deepstack])

    def merge(self, ids: Tensor, feature_rows: Tensor, features: Tensor | None, shard: bool = False) -> MergedInput:
        """Adds the mask of the media tokens `[1, tokens of this rank]`, and for each deepstack layer their features
        `[media tokens of this rank, hidden]`."""
        merged = super().merge(ids, feature_rows, features, shard)
        if features is None:
            return merged
        places = (feature_rows >= 0).nonzero().flatten()
        mask = (feature_rows >= 0)[None]
        deepstack = list(features[1:, feature_rows[places]].to(merged.embeddings.dtype))
        if shard:
            first, last = context.bounds(ids.numel())
            here = (places >= first) & (places < last)
            mask, deepstack = context.shard(mask, 1), [d[here] for d in deepstack]
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            # Each rank adds its slice of these only, so their gradients are summed over the ranks here; the
            # embeddings' are gathered by the scatter that cuts them.
            deepstack = [copy_to_tensor_model_parallel_region(d, group=tp) for d in deepstack]
            mask, deepstack = split_deepstack_embs(
                mask, deepstack, tp_size=tp.size(), tp_rank=tp.rank(), sequence_parallel=True
            )
        return replace(merged, extra={"visual_pos_masks": mask, "deepstack_visual_embeds": deepstack})
