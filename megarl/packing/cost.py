"""What a sequence or a media item costs to train on, in floating-point operations of a forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarl.media.item import MediaItem
from megarl.packing.rows import TokenSequence


@dataclass(frozen=True)
class StackCost:
    """A stack of transformer layers."""

    matrices: float
    """Weights that one token meets: of attention and of the MLP, or of the experts that it is sent to."""
    attention: float
    """Width of all heads, summed over the layers."""

    @classmethod
    def of(cls, config: Any) -> "StackCost":
        """`config` has the names of Megatron's TransformerConfig."""
        query = config.num_attention_heads * config.kv_channels
        key_value = 2 * (config.num_query_groups or config.num_attention_heads) * config.kv_channels
        ffn = config.ffn_hidden_size
        if config.num_moe_experts:
            ffn = config.moe_ffn_hidden_size * config.moe_router_topk
        mlp = (3 if config.gated_linear_unit else 2) * ffn
        layer = config.hidden_size * (2 * query + key_value + mlp)
        return cls(config.num_layers * layer, config.num_layers * query)

    def operations(self, tokens: int, seen: float) -> float:
        """Of `tokens` tokens, each of which attends to `seen` others on average.  Two operations for each weight
        and, in attention, four for each pair and unit of width: scores and weighted values."""
        return tokens * (2 * self.matrices + 4 * self.attention * seen)


@dataclass(frozen=True)
class CostModel:
    language: StackCost
    vision: StackCost | None
    """None where the model reads text alone."""

    @classmethod
    def of(cls, language: Any, tower: Any | None) -> "CostModel":
        """From the two configs, in the names of Megatron's TransformerConfig."""
        return cls(StackCost.of(language), None if tower is None else StackCost.of(tower))

    def sequence(self, sequence: TokenSequence) -> float:
        """Language model alone; causal, so a token sees half of the sequence."""
        return self.language.operations(len(sequence), len(sequence) / 2)

    def item(self, item: MediaItem) -> float:
        """Vision tower; patches attend to those of their own frame."""
        t, h, w = item.grid
        return self.vision.operations(t * h * w, h * w)

    def row(self, sequences: Iterable[TokenSequence]) -> float:
        """Sequences that share a row, in which equal items are encoded once."""
        sequences = list(sequences)
        items = {item.digest: item for sequence in sequences for item in sequence.prompt.items}
        return sum(map(self.sequence, sequences)) + sum(map(self.item, items.values()))
