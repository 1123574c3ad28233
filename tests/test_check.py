"""`megarl.check`: its refusals, and its numbers against numbers worked out by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.check import (
    GIB,
    LayerStack,
    ParameterCount,
    check_lora,
    check_reference,
    count_parameters,
    estimate_memory,
    kv_cache_blocks,
    layer_activations,
    main,
)
from megarl.errors import UserError
from megarl.layout import check_context, check_experts, check_heads, check_router_replay
from megarl.models.hf_config import hf_config
from megarl.recipe import ParallelSection, Recipe, load_recipe

DIGITS = str(Path(__file__).parent.parent / "recipes" / "digits.yaml")
KIB, MIB = 2**10, 2**20


def digits(*overrides: str) -> Recipe:
    return load_recipe(DIGITS, overrides)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture(scope="module")
def config():
    return hf_config(None, digits().model.config)


# The command


def test_report_without_megatron(monkeypatch, capsys):
    """Hand-worked: 32 x 16 rollouts of at most 128 + 2 tokens; parameters and memory are worked out below."""
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    assert main([DIGITS, "--world-size", "2", "model.dtype=bfloat16"]) == 0
    assert capsys.readouterr().out == (
        "processes    2 = tensor parallel 1 x data parallel 2\n"
        "a step       512 rollouts (prompts 32 x group 16)\n"
        "             2 updates (epochs 1 x minibatches 2)\n"
        "             at most 1,024 tokens generated, 66,560 trained\n"
        "the run      120 steps, 240 updates\n"
        "run folder   runs/digits\n"
        "parameters   370,176: vision 57,216, projector 165,120, language 147,840\n"
        "KV cache     tokens on a rank: 524,224 in bfloat16; a request has at most 130\n"
        "\n"
        "GiB on a rank               bfloat16\n"
        "weights                        0.001\n"
        "gradients                      0.001\n"
        "optimizer state                0.002\n"
        "KV cache                       0.250\n"
        "activations, rollout           0.011\n"
        "activations, training          0.055\n"
        "peak, rollout                  0.266\n"
        "peak, training                 0.309\n"
        "on the host: reference         0.001\n"
    )


def test_command_refuses_with_one_line_and_code_2_before_it_imports_torch():
    program = (
        "import sys; from megarl.check import main; code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, DIGITS, "optimizer.learning_rat=1"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "megarl: error: unknown key 'optimizer.learning_rat' in override 'optimizer.learning_rat=1': "
        "did you mean 'optimizer.learning_rate'?\n"
    )


def test_module_runs_as_a_command():
    command = [sys.executable, "-m", "megarl.check", "nowhere.yaml"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "megarl: error: recipe nowhere.yaml does not exist\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["steps=many"], "steps = 'many' in override 'steps=many': should be a valid integer"),
        (
            ["--world-size", "3"],
            "algorithm.prompts_per_step = 32, algorithm.minibatches = 2: a minibatch should",
        ),
        (["--world-size", "0"], "world size = 0: should be at least 1"),
        (
            ["data.generator=null"],
            "data.path = 'runs/data/digits': should be a folder; or set data.generator to create it",
        ),
        (
            ["data.path=half"],
            "data.path = 'half': lacks a file for the split 'test': test.jsonl, test.parquet, test-*.jsonl",
        ),
        (
            ["data.path=twice"],
            "data.path = 'twice': several files for the split 'train': train.jsonl, data/train-0.parquet; keep one",
        ),
        (
            ["data.media_folders=[half, nowhere]"],
            "data.media_folders[1] = 'nowhere': should be a folder",
        ),
        (
            ["model.tiny_processor=null", "model.processor=nowhere"],
            "model.processor = 'nowhere': should be a folder with a Hugging Face processor, or a name on the hub",
        ),
        (
            ["model.path=nowhere", "model.config=null", "model.init_std=null", "model.tiny_processor=null"],
            "model.path = 'nowhere': should be a folder with a config.json, or a name on the hub",
        ),
        (
            ["model.config.text_config.hiden_size=96"],
            "unknown key 'model.config.text_config.hiden_size': transformers reads no such key of qwen3_vl",
        ),
        (
            ["model.config.zzz=1"],
            "unknown key 'model.config.zzz': transformers reads no such key of qwen3_vl",
        ),
        (
            ["model.config.text_config.hidden_size=wide"],
            "model.config: Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected",
        ),
        (["model.config.model_type=nope"], "model.config: Unrecognized model identifier: nope."),
        (
            ["model.config.architectures=[Qwen3VLModel]"],
            "model.config has architectures ['Qwen3VLModel']: should be ['Qwen3VLForConditionalGeneration']",
        ),
        (
            ["model.config.model_type=llava"],
            "model.config has model_type 'llava': should be one of qwen3_vl",
        ),
        (
            ["model.tiny_processor.patch_size=null", "model.tiny_processor.min_pixels=null"]
            + ["model.tiny_processor.max_pixels=null"],
            "model.tiny_processor.patch_size = None: a qwen3_vl needs it for its pictures",
        ),
        (
            ["model.tiny_processor.vocab_size=130", "model.config.text_config={model_type: qwen3_vl_text}"],
            "model.tiny_processor.vocab_size = 130, model.config.text_config.vocab_size = 128: should be equal",
        ),
        (
            ["parallel.tensor_model_parallel_size=8", "--world-size", "8"],
            "parallel.tensor_model_parallel_size = 8: should divide text_config.num_attention_heads = 4",
        ),
        (
            ["parallel.cp_comm_type=p2p", "parallel.context_parallel_size=2", "--world-size", "2"],
            "parallel.cp_comm_type = 'p2p': should be 'a2a' (Ulysses) for a qwen3_vl: a ring is for text alone",
        ),
        (
            ["parallel.cp_comm_type=ulysses"],
            "parallel.cp_comm_type = 'ulysses' in override 'parallel.cp_comm_type=ulysses': should be 'a2a' or 'p2p'",
        ),
        (
            ["environment={name: 'no.such:Reward', format: null, format_reward: 0}"],
            "environment.name = 'no.such:Reward': no.such cannot be imported: ModuleNotFoundError: ",
        ),
        (
            ["rollout.kv_cache_gb=1e-4"],
            "rollout.kv_cache_gb = 0.0001 holds 128 tokens in bfloat16: should hold data.max_prompt_tokens + "
            "rollout.max_new_tokens = 130",
        ),
    ],
)
def test_refusal(capsys, arguments, message):
    Path("half").mkdir()
    Path("half/train.jsonl").touch()
    Path("twice/data").mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl", "data/train-0.parquet"):
        Path("twice", name).touch()
    assert main([DIGITS, *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"megarl: error: {message}")
    assert error.count("\n") == 1 and error.endswith("\n")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["model.freeze=[vision]"],
            "model.freeze has 'vision': a qwen3 has no such part, only 'language'",
        ),
        (
            ["model.tiny_processor={patch_size: 4, min_pixels: 64, max_pixels: 64}"],
            "model.tiny_processor.patch_size = 4: a qwen3 reads text alone, so leave it out",
        ),
        (
            ["model.tiny_processor.vocab_size=130"],
            "model.tiny_processor.vocab_size = 130: should be 128, that of model.config",
        ),
        (
            ["model.config.attention_bias=true"],
            "model.config has attention_bias = True: should be False in a qwen3",
        ),
        (
            ["parallel.tensor_model_parallel_size=8"],
            "parallel.tensor_model_parallel_size = 8: should divide num_attention_heads = 4",
        ),
        (
            ["algorithm.perception.coefficient=0.1"],
            "algorithm.perception.coefficient = 0.1: should be 0, since a qwen3 reads text alone",
        ),
    ],
)
def test_refusal_of_a_model_without_a_tower(capsys, overrides, message):
    assert main([str(Path(DIGITS).with_name("largest_digit.yaml")), *overrides, "--world-size", "8"]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == ("", f"megarl: error: {message}\n")


def test_report_of_a_model_without_a_tower(capsys):
    """139,648 parameters: two embeddings of 128 x 64; in each of 2 layers 4 + 2 + 2 heads of 16 and back (64 x 192),
    3 x 64 x 256 in the MLP and norms of 2 x 64 + 2 x 16; a final norm of 64."""
    assert main([str(Path(DIGITS).with_name("largest_digit.yaml"))]) == 0
    assert "parameters   139,648: vision 0, projector 0, language 139,648\n" in capsys.readouterr().out


def test_world_size_defaults_to_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main([DIGITS]) == 2
    assert "3 data-parallel ranks" in capsys.readouterr().err


def test_heads_that_do_not_divide(config):
    check_heads(config, 4)
    for tensor_parallel, key in (
        (3, "text_config.num_attention_heads"),
        (8, "text_config.num_attention_heads"),
    ):
        with pytest.raises(UserError, match=key):
            check_heads(config, tensor_parallel)


def test_adapters(capsys):
    """Hand-worked, of 2 layers of width 64, queries and two times 64 wide keys and values, an MLP of twice 256 and 256;
    rank 8: 8 x (64 + 192 + 64 + 64 + 64 + 512 + 256 + 64) x 2 parameters.  What they are added to is copied in float32
    (64 x 192 + 64 x 64 + 64 x 512 + 256 x 64) x 2 x 4 bytes."""
    assert main([DIGITS, "model.dtype=float32", "model.lora.rank=8"]) == 0
    out = capsys.readouterr().out
    assert "language 147,840, adapters 20,480\n" in out
    assert "on the host: under LoRA " in out
    recipe = digits("model.lora.rank=8")
    counted = replace(count_parameters(hf_config(None, recipe.model.config)), adapters=20480)
    assert counted.trained(recipe.model).total == counted.vision + counted.projector + 20480
    memory = estimate_memory(recipe, hf_config(None, recipe.model.config), counted, "float32", 1)
    assert memory.gradients == 4 * (57216 + 165120 + 20480)
    assert memory.merge_snapshot == 65536 * 2 * 4


def test_adapters_refused(config):
    def refusal(*overrides, of=config):
        with pytest.raises(UserError) as refused:
            check_lora(digits("model.lora.rank=6", *overrides), of)
        return str(refused.value)

    check_lora(digits("model.lora.rank=6", "parallel.tensor_model_parallel_size=2"), config)
    line = refusal("parallel.tensor_model_parallel_size=4")
    assert line == "model.lora.rank = 6: should be a multiple of parallel.tensor_model_parallel_size = 4"
    line = refusal("rollout.parallel.tensor_model_parallel_size=4")
    assert line.endswith("a multiple of rollout.parallel.tensor_model_parallel_size = 4")
    mixture = hf_config(None, load_recipe(Path(DIGITS).with_name("mixed_experts.yaml")).model.config)
    assert "'linear_fc1'" in refusal(of=mixture)
    check_lora(digits("model.lora.rank=6", "model.lora.modules=[linear_qkv, linear_proj]"), mixture)


def test_heads_that_do_not_divide_over_context_parallel_ranks(config):
    """Of 4 heads and 4 key-value heads."""

    def check(tensor_parallel, context_parallel):
        sizes = dict(tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel)
        check_context(config, ParallelSection(**sizes))

    check(2, 2)
    for tensor_parallel, context_parallel in ((1, 3), (2, 4)):
        with pytest.raises(UserError, match=f"parallel.context_parallel_size = {context_parallel}: should divide"):
            check(tensor_parallel, context_parallel)


# Experts


@pytest.fixture(scope="module")
def mixture(config):
    from tests.tiny import mixture_config

    class Processor:
        tokenizer = type("Tokenizer", (), {"eos_token_id": 2, "pad_token_id": 0})
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id = 5, 6, 3, 4

    return mixture_config(Processor)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["expert_model_parallel_size=3"], "expert_model_parallel_size = 3: should divide text_config.num_experts = 4"),
        (["expert_model_parallel_size=8"], "expert_model_parallel_size = 8: should divide text_config.num_experts = 4"),
        (
            ["expert_tensor_parallel_size=5"],
            "expert_tensor_parallel_size = 5: should divide text_config.moe_intermediate_size = 48",
        ),
        (
            ["tensor_model_parallel_size=2"],
            "sequence_parallel = False: should be true where a mixture of experts has "
            "parallel.tensor_model_parallel_size = 2",
        ),
    ],
)
def test_experts_that_do_not_divide(mixture, overrides, message):
    with pytest.raises(UserError) as refused:
        check_experts(mixture, digits(*(f"parallel.{override}" for override in overrides)).parallel)
    assert str(refused.value) == f"parallel.{message}"


def test_experts_that_divide(mixture, config):
    for overrides in ([], ["expert_model_parallel_size=4"], ["expert_tensor_parallel_size=2"]):
        check_experts(mixture, digits(*(f"parallel.{override}" for override in overrides)).parallel)
    check_experts(config, digits("parallel.tensor_model_parallel_size=2").parallel)


@pytest.mark.parametrize("name", ["expert_model_parallel_size", "expert_tensor_parallel_size"])
def test_a_dense_model_has_no_experts(capsys, name):
    layout = f"parallel.{name}=2", "parallel.tensor_model_parallel_size=2"
    assert main([DIGITS, *layout, "--world-size", "2"]) == 2
    assert capsys.readouterr().err == (
        f"megarl: error: parallel.{name} = 2: should be 1, since a qwen3_vl has no experts\n"
    )


def test_a_dense_model_has_no_routers(capsys, mixture):
    check_router_replay(mixture, True)
    assert main([DIGITS, "algorithm.router_replay=true"]) == 2
    assert capsys.readouterr().err == (
        "megarl: error: algorithm.router_replay = True: should be false, since a qwen3_vl has no experts\n"
    )


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
# Elements that a token leaves in a layer of the language model (4 h + 2 q + 2 kv + q + 2 kv + 3 ffn) and of the tower.
LANGUAGE, VISION = 4 * 64 + 2 * 64 + 2 * 64 + 3 * 64 + 3 * 256, 4 * 64 + 2 * 64 + 2 * 64 + 2 * 256
LOGITS = 4096 * 128 * 2
"""Of all tokens of a row, in bfloat16."""


def test_memory_in_bfloat16(config):
    memory = estimate_memory(digits(), config, COUNT, "bfloat16", world_size=4)
    assert memory.weights == 8_000_000
    assert memory.gradients == 16_000_000
    assert memory.optimizer_state == 12_000_000
    assert memory.reference_snapshot == 8_000_000
    assert memory.kv_cache == GIB // 4
    assert memory.activations_rollout == LANGUAGE * 4096 * 2 + 512 * 128 * 4
    assert memory.activations_training == 2 * LANGUAGE * 4096 * 2 + VISION * 4 * 4096 * 2 + LOGITS
    assert memory.rollout_peak == 36_000_000 + GIB // 4 + memory.activations_rollout
    assert memory.training_peak == 36_000_000 + GIB // 4 + memory.activations_training


def test_memory_in_float32_has_no_masters_and_no_snapshot_without_kl(config):
    memory = estimate_memory(digits("algorithm.kl_coefficient=0"), config, COUNT, "float32", world_size=4)
    assert (memory.weights, memory.gradients) == (16_000_000, 16_000_000)
    assert memory.optimizer_state == 8_000_000  # two moments of 4 bytes, over four data-parallel ranks
    assert memory.reference_snapshot == 0
    assert memory.activations_training == 2 * LANGUAGE * 4096 * 4 + VISION * 4 * 4096 * 4 + 2 * LOGITS


def test_memory_under_tensor_and_sequence_parallelism(config):
    recipe = digits("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    memory = estimate_memory(recipe, config, COUNT, "bfloat16", world_size=4)
    assert (memory.weights, memory.gradients, memory.optimizer_state) == (4_000_000, 8_000_000, 12_000_000)
    language = 2 * (LANGUAGE // 2) * 4096 * 2
    vision = (4 * 64 + (VISION - 4 * 64) // 2) * 4 * 4096 * 2
    assert memory.activations_training == language + vision + LOGITS // 2


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


def test_report_of_rollouts_in_a_layout_of_their_own(capsys):
    assert main([DIGITS, "--world-size", "4", "rollout.parallel.tensor_model_parallel_size=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "rollouts     2 engines of tensor parallel 2; weights resharded after each step"
    assert any(line.startswith("weights of the engine ") for line in lines)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["tensor_model_parallel_size=8"],
            "rollout.parallel.tensor_model_parallel_size = 8: should divide text_config.num_attention_heads = 4",
        ),
        (
            ["expert_model_parallel_size=2"],
            "rollout.parallel.expert_model_parallel_size = 2: should be 1, since a qwen3_vl has no experts",
        ),
    ],
)
def test_engines_that_do_not_divide(capsys, overrides, message):
    overrides = [f"rollout.parallel.{override}" for override in overrides]
    assert main([DIGITS, *overrides, "--world-size", "8"]) == 2
    assert capsys.readouterr().err == f"megarl: error: {message}\n"


def test_memory_with_full_recompute(config):
    memory = estimate_memory(digits("training.recompute=full"), config, COUNT, "bfloat16", world_size=1)
    language = 2 * 64 * 4096 * 2 + LANGUAGE * 4096 * 2
    assert memory.activations_training == language + VISION * 4 * 4096 * 2 + LOGITS


def test_memory_with_selective_recompute(config):
    """All of one layer, and of the other neither the MLP's inner outputs nor what its norm gives."""
    memory = estimate_memory(digits("training.recompute=selective"), config, COUNT, "bfloat16", world_size=1)
    language = (2 * LANGUAGE - 64 - 3 * 256) * 4096 * 2
    assert memory.activations_training == language + VISION * 4 * 4096 * 2 + LOGITS


@pytest.mark.parametrize("chunk, places", [(1024, 1024), (5000, 4096)])
def test_memory_of_logits(config, chunk, places):
    recipes = digits(), digits(f"training.log_prob_chunk={chunk}")
    whole, bounded = (estimate_memory(r, config, COUNT, "bfloat16", world_size=1) for r in recipes)
    assert whole.activations_training - bounded.activations_training == LOGITS - places * 128 * 2


def test_memory_with_a_frozen_tower(config):
    memory = estimate_memory(digits("model.freeze=[vision]"), config, COUNT, "bfloat16", world_size=1)
    assert memory.weights == 8_000_000
    assert (memory.gradients, memory.optimizer_state) == (12_000_000, 36_000_000)
    assert memory.activations_training == 2 * LANGUAGE * 4096 * 2 + LOGITS


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


# The reference policy


def _teacher(folder: Path, **text) -> str:
    """A checkpoint folder's configuration: the digits recipe's, with these values of its language model."""
    values = {**digits().model.config}
    values["text_config"] = {**values["text_config"], **text}
    hf_config(None, values).save_pretrained(folder)
    return str(folder)


def test_a_reference_of_other_sizes_is_refused(tmp_path, config):
    check_reference(_teacher(tmp_path / "same", max_position_embeddings=512), config)
    wide = _teacher(tmp_path / "wide", intermediate_size=512)
    with pytest.raises(UserError) as caught:
        check_reference(wide, config)
    assert str(caught.value) == (
        f"algorithm.reference = {wide!r} has text_config.intermediate_size = 512: should be 256, as the policy's"
    )
    assert main([DIGITS, f"algorithm.reference={wide}"]) == 2


@pytest.mark.parametrize(
    "key, value", [("num_hidden_layers", 3), ("rms_norm_eps", 1e-3), ("tie_word_embeddings", True)]
)
def test_a_reference_that_reads_text_alone(tmp_path, key, value):
    """Its sizes stand at the top of its configuration."""
    values = load_recipe(str(Path(DIGITS).with_name("largest_digit.yaml"))).model.config
    ours = hf_config(None, values)
    hf_config(None, {**values, key: value}).save_pretrained(tmp_path)
    assert getattr(ours, key) != value
    with pytest.raises(UserError, match=f"has {key} = {value}: should be {getattr(ours, key)}, as the policy's"):
        check_reference(str(tmp_path), ours)


def test_a_reference_that_is_no_checkpoint_is_refused(config):
    with pytest.raises(
        UserError, match="^algorithm.reference = 'nowhere': should be a folder with a config.json, or a name "
    ):
        check_reference("nowhere", config)
