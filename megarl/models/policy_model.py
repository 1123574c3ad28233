"""What the trainer and the engine ask of a policy, whatever its family: docs/adding-a-model.md."""

from dataclasses import dataclass, field
from typing import Any

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from megarl.packing.cost import StackCost
from megarl.parallel import context
from megarl.parallel.frames import encode_spread


@dataclass(frozen=True, eq=False)
class MergedInput:
    """What the language model takes: text and media in one row, already cut for context and sequence parallelism."""

    embeddings: Tensor
    """`[tokens (/ cp when training) (/ tp under sequence parallelism), 1, hidden]`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the family's language model, for this row."""


class PolicyModel:
    """Mixed into the Megatron module of a family; as it is, it fits a family that reads text alone.

    A family with media gives `encode`, `merge_size`, `feature_row_bytes`, `tower` and `tower_config`; one whose media
    enters more than the embeddings adds to `merge`.  All have `freeze(language, vision, projector)`, which takes parts
    out of training.  Nothing here ever looks for a media token in the ids.
    """

    language_model: GPTModel
    """The engine steps it, and reads sizes off its `config`."""
    merge_size: int = 1
    """Side of the square of patches that becomes one media token."""
    feature_row_bytes: int = 0
    """Bytes of what `encode` returns for one media token."""
    tower: torch.nn.Module | None = None
    """What `encode` runs; its frames do not see each other."""
    tower_config: Any = None
    """Shape of the vision tower, in the names of Megatron's TransformerConfig; None without a tower."""

    @property
    def bridged(self) -> torch.nn.Module:
        """The module at which the weight names of Bridge's mapping begin."""
        return self

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Runs the vision tower.

        Args:
            pixels: `[patches, patch features]` of the items one after another, on any device.
            grids: int64 `[items, 3]`, (t, h, w) in patches.

        Returns:
            `[layers, media tokens, hidden]`; index 0 goes into the embeddings.
        """
        raise NotImplementedError(f"{type(self).__name__} has no vision tower")

    def encode_row(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """`encode` for a row that the context-parallel ranks share.  Collective over them with `vision_dp_when_cp`:
        each then encodes a part of the frames.  Without, each encodes all, and has the gradient of its own tokens
        only, as for every weight.  `grids` is on the CPU."""
        if not self.config.vision_dp_when_cp or context.group().size() == 1:
            return self.encode(pixels, grids)
        stack, hidden, weights = StackCost.of(self.tower_config), self.config.hidden_size, list(self.tower.parameters())
        nothing = torch.empty(
            self.feature_row_bytes // (hidden * self.config.params_dtype.itemsize),
            0,
            hidden,
            dtype=self.config.params_dtype,
            device=weights[0].device,
            requires_grad=any(p.requires_grad for p in weights),
        )
        return encode_spread(
            self.encode, pixels, grids, self.merge_size, lambda patches: stack.operations(patches, patches), nothing
        )

    def merge(self, ids: Tensor, feature_rows: Tensor, features: Tensor | None, shard: bool = False) -> MergedInput:
        """Puts media features into the whole row, then cuts the row for context and sequence parallelism.

        Args:
            ids: int64 `[tokens]`.
            feature_rows: int64 `[tokens]`: the feature of each media token, -1 for text.
            features: what `encode` returned, or None where the row has no media.
            shard: cut the row over the context-parallel ranks, which hold the same row when training and rows of
                their own in the engine.
        """
        embeddings = self.language_model.embedding(input_ids=ids[None], position_ids=None)
        if features is not None:
            places = (feature_rows >= 0).nonzero().flatten()
            chosen = features[0, feature_rows[places]].to(embeddings.dtype)
            embeddings = embeddings.index_put((places,), chosen[:, None])
        if shard:
            embeddings = context.shard(embeddings, 0)
        if self.language_model.config.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=self.language_model.pg_collection.tp)
        return MergedInput(embeddings)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        packed_seq_params: PackedSeqParams,
        feature_rows: Tensor,
        pixels: Tensor | None,
        grids: Tensor | None,
        output_processor=None,
        output_processor_context=None,
    ) -> Tensor:
        """One packed row through the whole model, for training and scoring.

        Args:
            ids: int64 `[tokens]`, the same on all context-parallel ranks; a multiple of context-parallel size times,
                under sequence parallelism, tensor-parallel size.
            positions: int64 `[3, tokens]`, rotary positions (time, height, width), from 0 in each segment.
            packed_seq_params: bounds of the row's segments (`thd`).
            feature_rows: int64 `[tokens]`, see `merge`.
            pixels, grids: the row's distinct media items, see `encode`, the grids on the CPU; None without
                media.
            output_processor, output_processor_context: Megatron's hook in place of the logits.

        Returns:
            What the hook returns; without one, logits `[1, tokens / cp, vocabulary / tp]`.
        """
        features = None if pixels is None else self.encode_row(pixels, grids)
        merged = self.merge(ids, feature_rows, features, shard=True)
        return self.language_model(
            input_ids=context.shard(ids, 0)[None],
            position_ids=context.shard(positions, 1)[:, None],
            attention_mask=None,
            decoder_input=merged.embeddings,
            packed_seq_params=packed_seq_params,
            output_processor=output_processor,
            output_processor_context=output_processor_context,
            **merged.extra,
        )
