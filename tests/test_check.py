"""`megarl.check`: its refusals, and its numbers against numbers worked out by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.check import check_lora, check_reference, main
from megarl.errors import UserError
from megarl.layout import check_context, check_experts, check_heads, check_router_replay
from megarl.memory import count_parameters, estimate_memory
from megarl.models.hf_config import hf_config
from megarl.recipe import ParallelSection, Recipe, load_recipe

DIGITS = str(Path(__file__).parent.parent / "recipes" / "digits.yaml")
LARGEST_DIGIT = str(Path(DIGITS).with_name("largest_digit.yaml"))


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
        "activations, rollout           0.625\n"
        "activations, training          0.073\n"
        "peak, rollout                  0.879\n"
        "peak, training                 0.327\n"
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
    assert main([LARGEST_DIGIT, *overrides, "--world-size", "8"]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == ("", f"megarl: error: {message}\n")


def test_report_of_a_kv_cache_of_what_is_left(capsys):
    assert main([DIGITS, "rollout.kv_cache_gb=null", "model.dtype=bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "KV cache     what all else leaves of a GPU; a request has at most 130\n" in out
    assert "KV cache                       0.000\n" in out


def test_report_of_a_model_without_a_tower(capsys):
    """139,648 parameters: two embeddings of 128 x 64; in each of 2 layers 4 + 2 + 2 heads of 16 and back (64 x 192),
    3 x 64 x 256 in the MLP and norms of 2 x 64 + 2 x 16; a final norm of 64."""
    assert main([LARGEST_DIGIT]) == 0
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


def test_what_has_no_kernels_of_one_order(capsys):
    assert main([DIGITS, "deterministic=true"]) == 2
    assert capsys.readouterr().err.startswith(
        "megarl: error: deterministic = True: should be false, since a qwen3_vl sees"
    )
    assert main([LARGEST_DIGIT, "deterministic=true", "model.config.head_dim=24"]) == 2
    assert capsys.readouterr().err.endswith("since a head of this qwen3 has 24 numbers, which is no power of two\n")
    assert main([LARGEST_DIGIT, "model.config.head_dim=24"]) == 0


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
    values = load_recipe(LARGEST_DIGIT).model.config
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
