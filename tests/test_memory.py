"""What `megarl.memory` predicts, against numbers worked out by hand."""

import json
from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.memory import (
    GIB,
    LayerStack,
    ParameterCount,
    count_parameters,
    estimate_memory,
    kv_cache_blocks,
    kv_cache_that_fits,
    layer_activations,
)
from megarl.models.hf_config import hf_config
from megarl.recipe import Recipe, load_recipe

DIGITS = str(Path(__file__).parent.parent / "recipes" / "digits.yaml")
KIB, MIB = 2**10, 2**20


def digits(*overrides: str) -> Recipe:
    return load_recipe(DIGITS, overrides)


@pytest.fixture(scope="module")
def config():
    return hf_config(None, digits().model.config)


@pytest.fixture(scope="module")
def mixture(config):
    from tests.tiny import mixture_config

    class Processor:
        tokenizer = type("Tokenizer", (), {"eos_token_id": 2, "pad_token_id": 0})
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id = 5, 6, 3, 4

    return mixture_config(Processor)


def test_parameters_of_experts(mixture):
    """3 layers of 4 experts, each with two inner projections and an outer one of 64 x 48."""
    assert count_parameters(mixture).experts == 3 * 4 * 3 * 64 * 48


# Parameters


def test_parameters_of_digits(config):
    width, inner, vocabulary, patch = 64, 256, 128, 3 * 2 * 4 * 4

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    block = linear(width, 3 * width) + linear(width, width) + linear(width, inner) + linear(inner, width)
    vision = linear(patch, width) + 16 * width + block + 2 * 2 * width
    merged = 4 * width
    merger = linear(merged, merged) + linear(merged, width)
    projector = 2 * merger + 2 * width + 2 * merged  # the second norm is that of deepstack, after the merge
    layer = 4 * width * width + 3 * width * inner + 2 * width + 2 * 16
    language = 2 * vocabulary * width + 2 * layer + width
    assert count_parameters(config) == ParameterCount(vision, projector, language)


def test_tied_embeddings_count_once(config):
    tied = hf_config(None, digits("model.config.tie_word_embeddings=true").model.config)
    assert count_parameters(config).language - count_parameters(tied).language == 128 * 64


def test_configuration_from_a_folder_and_inline_are_alike(config, tmp_path):
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "qwen3_vl"
    loaded = hf_config(str(tmp_path), None)
    assert count_parameters(loaded) == count_parameters(config)


def test_configuration_leaves_the_recipe_as_it_is():
    recipe = digits()
    hf_config(recipe.model.path, recipe.model.config)
    assert recipe == digits()


# Memory


@pytest.mark.parametrize(
    "tensor_parallel, sequence_parallel, expected",
    [(1, False, 34), (4, False, 10 + 24 / 4), (4, True, 34 / 4)],
)
def test_layer_activations_are_those_of_the_paper(tensor_parallel, sequence_parallel, expected):
    """s b h bytes, less the paper's two dropout masks of a byte, which sequence parallelism splits too."""
    h, tokens = 1024, 512
    stack = LayerStack(layers=1, hidden=h, query=h, key_value=h, ffn=4 * h, gated=False)
    masks = 2 / (tensor_parallel if sequence_parallel else 1)
    measured = layer_activations(stack, tokens, 2, tensor_parallel, sequence_parallel)
    assert measured == tokens * h * (expected - masks)


COUNT = ParameterCount(vision=1_000_000, projector=500_000, language=2_500_000)
# Elements that a token leaves in a layer of the language model (4 h + 3 q + 3 kv + 3 ffn) and of the tower (4 h + 2 q +
# 2 kv + 2 ffn); a row of 4,096 tokens.
LANGUAGE, VISION = 4 * 64 + 3 * 64 + 3 * 64 + 3 * 256, 4 * 64 + 2 * 64 + 2 * 64 + 2 * 256
PIXELS, MERGERS = 3 * 2 * 4 * 4, 2 * 3 * 64
TOWER = (VISION + PIXELS + MERGERS) * 4 * 4096
"""Elements: two mergers keep 3 h of each patch."""
GRADIENTS, HEAD = 3 * 256 * 4096, 128 * 64


def test_memory_in_bfloat16(config):
    memory = estimate_memory(digits(), config, COUNT, "bfloat16", world_size=4)
    assert memory.weights == 8_000_000
    assert memory.gradients == 16_000_000
    assert memory.optimizer_state == 12_000_000
    assert memory.reference_snapshot == 8_000_000
    assert memory.kv_cache == GIB // 4
    assert memory.activations_rollout == VISION * 65536 * 2 + GIB // 2  # a pass of the tower, and the features kept
    assert memory.activations_training == 2 * (2 * LANGUAGE * 4096 + TOWER + GRADIENTS + HEAD)
    assert memory.rollout_peak == 36_000_000 + GIB // 4 + memory.activations_rollout
    assert memory.training_peak == 36_000_000 + GIB // 4 + memory.activations_training


def test_memory_in_float32_has_no_masters_and_no_snapshot_without_kl(config):
    memory = estimate_memory(digits("algorithm.kl_coefficient=0"), config, COUNT, "float32", world_size=4)
    assert (memory.weights, memory.gradients) == (16_000_000, 16_000_000)
    assert memory.optimizer_state == 8_000_000  # two moments of 4 bytes, over four data-parallel ranks
    assert memory.reference_snapshot == 0
    assert memory.activations_training == 4 * (2 * LANGUAGE * 4096 + TOWER + GRADIENTS + HEAD)


def test_memory_under_tensor_and_sequence_parallelism(config):
    recipe = digits("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    memory = estimate_memory(recipe, config, COUNT, "bfloat16", world_size=4)
    assert (memory.weights, memory.gradients, memory.optimizer_state) == (4_000_000, 8_000_000, 12_000_000)
    language = 2 * (LANGUAGE // 2) * 4096 * 2
    vision = (4 * 64 + (VISION - 4 * 64) // 2 + PIXELS + MERGERS) * 4 * 4096 * 2
    assert memory.activations_training == language + vision + 2 * (GRADIENTS + HEAD) // 2


def test_memory_under_context_parallelism(config):
    """Half of a row, and of its frames where these are spread."""
    spread, whole = (
        estimate_memory(digits("parallel.context_parallel_size=2", *more), config, COUNT, "bfloat16", world_size=2)
        for more in ([], ["parallel.vision_dp_when_cp=false"])
    )
    assert spread.activations_training == 2 * (LANGUAGE * 4096 + (TOWER + GRADIENTS) // 2 + HEAD)
    assert whole.activations_training == 2 * (LANGUAGE * 4096 + TOWER + GRADIENTS // 2 + HEAD)


def test_memory_under_expert_parallelism(mixture):
    """Half of the experts on a rank, which two of the four ranks hold; the rest is on all of them."""
    count = ParameterCount(vision=1_000_000, projector=500_000, language=2_500_000, experts=2_000_000)
    recipe = digits("parallel.expert_model_parallel_size=2")
    memory = estimate_memory(recipe, mixture, count, "bfloat16", world_size=4)
    assert (memory.weights, memory.gradients) == (6_000_000, 12_000_000)
    assert memory.optimizer_state == 12 * (2_000_000 // 4 + 1_000_000 // 2)


def test_memory_of_recorded_experts(mixture):
    """2 experts of one byte in each of 3 layers, for each token that the KV cache holds."""
    count = ParameterCount(vision=1_000_000, projector=500_000, language=2_500_000, experts=2_000_000)
    recipes = digits(), digits("algorithm.router_replay=true")
    without, held = (estimate_memory(r, mixture, count, "bfloat16", world_size=1).kv_cache for r in recipes)
    blocks = kv_cache_blocks(recipes[0], mixture, "bfloat16") + 1
    assert held - without == blocks * recipes[0].rollout.block_size_tokens * 3 * 2


def test_memory_of_rollouts_in_a_layout_of_their_own(config, mixture):
    """The engine's copy beside the trainer's half, and its whole heads in the KV cache and in a step."""
    trained = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
    recipe, shared = digits(*trained, "rollout.parallel={}"), digits(*trained)
    memory, one = (estimate_memory(r, config, COUNT, "bfloat16", world_size=4) for r in (recipe, shared))
    assert (memory.weights, memory.engine_weights) == (4_000_000, 8_000_000)
    assert one.engine_weights == 0 and memory.held - one.held == 8_000_000
    assert memory.activations_training == one.activations_training
    alone = estimate_memory(digits(), config, COUNT, "bfloat16", world_size=4)
    assert memory.activations_rollout == alone.activations_rollout > one.activations_rollout
    assert kv_cache_blocks(recipe, config, "bfloat16") == kv_cache_blocks(digits(), config, "bfloat16")
    count = ParameterCount(vision=1_000_000, projector=500_000, language=2_500_000, experts=2_000_000)
    recipe = digits("rollout.parallel.expert_model_parallel_size=2")
    assert estimate_memory(recipe, mixture, count, "bfloat16", world_size=4).engine_weights == 6_000_000


def test_memory_with_full_recompute(config):
    memory = estimate_memory(digits("training.recompute=full"), config, COUNT, "bfloat16", world_size=1)
    language = 2 * 64 * 4096 + LANGUAGE * 4096
    assert memory.activations_training == 2 * (language + TOWER + GRADIENTS + HEAD)


def test_memory_with_selective_recompute(config):
    """All of one layer, and of the other neither the MLP's inner outputs nor what its norm gives."""
    memory = estimate_memory(digits("training.recompute=selective"), config, COUNT, "bfloat16", world_size=1)
    language = (2 * LANGUAGE - 64 - 3 * 256) * 4096
    assert memory.activations_training == 2 * (language + TOWER + GRADIENTS + HEAD)


@pytest.mark.parametrize("chunk, places", [(1024, 1024), (10000, 8192)])
def test_a_bound_of_logits(chunk, places):
    path = Path(DIGITS).with_name("bench_1.7b.yaml")
    recipes = load_recipe(path), load_recipe(path, [f"training.log_prob_chunk={chunk}"])
    config = hf_config(None, recipes[0].model.config)
    whole, bounded = (estimate_memory(r, config, COUNT, "bfloat16", world_size=1) for r in recipes)
    backward = 3 * 6144 * 8192  # of the last layer, which takes more than few logits
    logits = max(places * 151_936, backward)
    assert whole.activations_training - bounded.activations_training == 2 * (8192 * 151_936 - logits)


def test_memory_with_a_frozen_tower(config):
    memory = estimate_memory(digits("model.freeze=[vision]"), config, COUNT, "bfloat16", world_size=1)
    assert memory.weights == 8_000_000
    assert (memory.gradients, memory.optimizer_state) == (12_000_000, 36_000_000)
    assert memory.activations_training == 2 * (2 * LANGUAGE * 4096 + GRADIENTS + HEAD)


def test_logits_of_a_large_vocabulary(config):
    """Those of a whole row in bfloat16; the output layer's gradient.  In the engine, 512 in bfloat16, twice in float32
    and once in float64."""
    recipe = load_recipe(Path(DIGITS).with_name("bench_1.7b.yaml"))
    config = hf_config(None, recipe.model.config)
    layer = 4 * 2048 + 3 * 2048 + 3 * 1024 + 3 * 6144
    memory = estimate_memory(recipe, config, ParameterCount(0, 0, 1_720_574_976), "bfloat16", world_size=1)
    logits = 151_936 * (2 * 8192 + 2 * 2048)
    assert memory.activations_training == 28 * 8192 * 2 * layer + logits
    assert memory.activations_rollout == 512 * 151_936 * (2 + 4 + 4 + 8)


# A cache that takes what is left


def test_offload(config):
    """While rollouts are sampled masters, moments and gradients are away; the cache may take their place as far as
    training, with all of it, leaves it."""
    stays, away = (
        estimate_memory(digits(f"training.offload={what}"), config, COUNT, "bfloat16", 4)
        for what in ("none", "optimizer")
    )
    assert (stays.state_snapshot, away.state_snapshot) == (0, 12_000_000)
    assert away.rollout_peak == stays.rollout_peak - 12_000_000 - 16_000_000
    assert away.training_peak == stays.training_peak
    recipe = digits("rollout.kv_cache_gb=null", "model.dtype=bfloat16", "training.offload=optimizer")
    counted = count_parameters(config)
    rest = estimate_memory(recipe, config, counted, "bfloat16", 1)
    size = kv_cache_that_fits(recipe, config, "bfloat16", 1, 2 * GIB)
    assert size == pytest.approx(0.92 * 2 - max(rest.rollout_peak, rest.training_peak) / GIB, abs=1e-6)


def test_a_kv_cache_of_what_is_left(config):
    """Of 2 GiB, 0.92 less the larger peak; the check knows no size."""
    recipe = digits("rollout.kv_cache_gb=null", "model.dtype=bfloat16")
    rest = estimate_memory(recipe, config, count_parameters(config), "bfloat16", 1)
    assert rest.kv_cache == 0 and rest.rollout_peak > rest.training_peak
    size = kv_cache_that_fits(recipe, config, "bfloat16", 1, 2 * GIB)
    assert size == pytest.approx(0.92 * 2 - rest.rollout_peak / GIB, abs=1e-6)
    filled = digits(f"rollout.kv_cache_gb={size}")
    assert estimate_memory(filled, config, count_parameters(config), "bfloat16", 1).rollout_peak <= 0.92 * 2 * GIB


def test_recorded_experts_share_what_is_left(mixture):
    """4 heads of 16 twice in 3 layers of 2 bytes are 768 bytes a token, its experts 6."""
    without, with_routing = (
        kv_cache_that_fits(digits("rollout.kv_cache_gb=null", *more), mixture, "bfloat16", 1, 4 * GIB)
        for more in ([], ["algorithm.router_replay=true"])
    )
    text = mixture.get_text_config()
    token = 2 * 3 * text.num_key_value_heads * text.head_dim * 2
    assert with_routing / without == pytest.approx(token / (token + 3 * 2))


def test_nothing_is_left(config):
    recipe = digits("rollout.kv_cache_gb=null")
    with pytest.raises(UserError, match="^rollout.kv_cache_gb = null: of 0.5 GiB on a rank all else takes .* hold 130"):
        kv_cache_that_fits(recipe, config, "bfloat16", 1, GIB // 2)


def test_a_tower_that_is_not_split():
    count = ParameterCount(vision=800, projector=200, language=5000, experts=1000)
    parallel = digits("parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=2").parallel
    assert count.on_a_rank(parallel, split_tower=True) == (500 + 2000, 500)
    assert count.on_a_rank(parallel, split_tower=False) == (1000 + 2000, 500)
    frozen = digits("model.freeze=[vision, language]").model
    assert count.trained(frozen) == ParameterCount(0, 200, 0)


def test_kv_cache_blocks(config):
    """64 tokens x 2 layers x (key and value) x 64 x 2 bytes = 32 KiB; one block is the engine's."""
    assert kv_cache_blocks(digits(), config, "bfloat16") == 256 * MIB // (32 * KIB) - 1
    assert kv_cache_blocks(digits(), config, "float32") == 256 * MIB // (64 * KIB) - 1
    halved = digits("parallel.tensor_model_parallel_size=2")
    assert kv_cache_blocks(halved, config, "bfloat16") == 256 * MIB // (16 * KIB) - 1
