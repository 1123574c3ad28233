"""Floors, worked out by hand for two layers of width 8, one head of 8 for queries, keys and values, an MLP of twice 16
and 16, ten words, in float32: 4 x 64 + 3 x 128 = 640 weights in a layer, 80 in the output layer."""

from types import SimpleNamespace

import pytest
import torch

from megarl.bench.ceilings import Ceilings
from megarl.bench.floors import Floors

LAYERS, HEAD = 2 * 640, 80
KV = 2 * 2 * 8 * 4
"""Bytes of a token's keys and values."""


@pytest.fixture
def model():
    config = SimpleNamespace(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=1,
        num_query_groups=None,
        kv_channels=8,
        ffn_hidden_size=16,
        num_moe_experts=None,
        gated_linear_unit=True,
        params_dtype=torch.float32,
    )
    return SimpleNamespace(language_model=SimpleNamespace(config=config, vocab_size=10), tower_config=None)


def operations(tokens, seen):
    """Of the layers; attention multiplies 8 wide queries with keys, and weights with values, in two layers."""
    return tokens * (2 * LAYERS + 2 * 2 * 2 * 8 * seen)


def test_decode_reads_weights_and_cache(model):
    floors = Floors(Ceilings(bandwidth=1.0, peak=1e9), model)
    assert floors.decode_step(3, 50.0) == 4 * (LAYERS + HEAD) + 3 * 50 * KV
    assert Floors(Ceilings(1e9, 1.0), model).decode_step(3, 50.0) == operations(3, 50) + 3 * 2 * HEAD


def test_prompts_attend_to_half_of_themselves(model):
    floors = Floors(Ceilings(bandwidth=1e9, peak=1.0), model)
    assert floors.prefill([10, 20]) == operations(10, 5) + operations(20, 10) + 2 * 2 * HEAD
    assert floors.prefill([10], tokens=16) - floors.prefill([10]) == 15 * 2 * HEAD


def test_generation_reads_the_prompt_once(model):
    floors = Floors(Ceilings(bandwidth=1.0, peak=1.0), model)
    assert floors.generation(3, 10, 5) == floors.prefill([10] * 3) + 4 * floors.decode_step(3, 12.5)


def test_training_is_three_forward_passes(model):
    floors = Floors(Ceilings(bandwidth=1e9, peak=1.0), model)
    assert floors.training_step(2, 10, 5) == 3 * 2 * (operations(15, 7.5) + 5 * 2 * HEAD)
