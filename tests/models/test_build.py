"""Hugging Face -> Megatron -> Hugging Face, and checkpoints with random weights."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor

from megarl.errors import UserError
from megarl.models import shard_writer
from megarl.models.random_checkpoint import write_random_checkpoint
from tests import tiny
from tests.distributed import LAYOUTS, TP1, lazy

policies = lazy("tests.policies")
build = lazy("megarl.models.build")


def _export(checkpoint, folder, sequence_parallel, shard_bytes=None):
    if shard_bytes:
        shard_writer.SHARD_BYTES = shard_bytes
    policy = policies.policy(checkpoint, sequence_parallel=sequence_parallel)
    build.save_checkpoint(policy, folder, AutoProcessor.from_pretrained(checkpoint))


def same_tensors(folder, checkpoint):
    files = sorted(folder.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(checkpoint / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    return files


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_round_trip(ranks, checkpoint, tied_checkpoint, prompts, tmp_path, layout, tied):
    """Every tensor bit for bit under the same name; transformers answers as before; over an old export too."""
    source = tied_checkpoint if tied else checkpoint
    for _ in range(2 if layout == TP1 else 1):
        ranks.run(_export, source, tmp_path / "out", layout.sequence_parallel, **layout.job)
    same_tensors(tmp_path / "out", source)
    assert not list(tmp_path.glob("out.*"))
    ours, theirs = tiny.Reference(tmp_path / "out"), tiny.Reference(source)
    for prompt in prompts.values():
        assert torch.equal(ours.greedy(prompt, 6), theirs.greedy(prompt, 6))
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert processor.tokenizer.get_vocab() == AutoProcessor.from_pretrained(source).tokenizer.get_vocab()


def test_shards(ranks, checkpoint, tmp_path):
    """Files of at most so many bytes, with the index that transformers reads."""
    ranks.run(_export, checkpoint, tmp_path / "out", False, 100_000)
    files = same_tensors(tmp_path / "out", checkpoint)
    assert len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    tiny.Reference(tmp_path / "out")
    ranks.end()  # the bound is the module's, in that process


@pytest.mark.ranks(1)
def test_refusals(checkpoint, tmp_path):
    """One line that names the folder or the family."""
    with pytest.raises(UserError) as refused:
        policies.policy(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    )
    with pytest.raises(UserError) as refused:
        policies.policy(folder)
    assert "'mistral': should be one of qwen3_vl, qwen3_vl_moe, " in str(refused.value) and "\n" not in str(
        refused.value
    )


# Random weights


def _random(folder, checkpoint, std=0.5, scale=True, seed=3, tied=False):
    processor = AutoProcessor.from_pretrained(checkpoint)
    write_random_checkpoint(folder, tiny._config(processor, tied), processor, std, scale, seed)
    return load_file(folder / "model.safetensors")


def test_random_is_a_function_of_the_seed(checkpoint, tmp_path):
    a, b, c = (_random(tmp_path / name, checkpoint, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert all(torch.equal(a[name], b[name]) for name in a)
    matrices = [name for name in a if a[name].ndim > 1]
    assert not any(torch.equal(a[name], c[name]) for name in matrices)
    drawn = [a[name].flatten()[:4] for name in matrices]
    assert len({tuple(values.tolist()) for values in drawn}) == len(matrices)  # no two tensors are drawn alike


@pytest.mark.parametrize("scale", [True, False])
def test_random_spread(checkpoint, tmp_path, scale):
    """`std`, and over sqrt(2 x 3 layers) where a matrix writes into the residual stream."""
    weights = _random(tmp_path / "out", checkpoint, scale=scale)
    outputs = ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")
    seen = set()
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            assert (tensor == (0 if name.endswith("bias") else 1)).all(), name
            continue
        expected = 0.5
        if scale and name.endswith(outputs) and "merger" not in name:
            expected /= math.sqrt(6)
            seen.add(next(end for end in outputs if name.endswith(end)))
        assert float(tensor.std()) == pytest.approx(expected, rel=0.1), name
        assert abs(float(tensor.mean())) < 0.1 * expected
    assert len(seen) == (4 if scale else 0)


def test_random_in_several_files(checkpoint, tmp_path, monkeypatch):
    """The same weights: no more of them than fill a file are held at a time."""
    _random(tmp_path / "whole", checkpoint)
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 100_000)
    processor = AutoProcessor.from_pretrained(checkpoint)
    write_random_checkpoint(tmp_path / "files", tiny._config(processor, False), processor, 0.5, True, 3)
    assert len(same_tensors(tmp_path / "files", tmp_path / "whole")) > 3


def test_random_default_spread(checkpoint, tmp_path):
    weights = _random(tmp_path / "out", checkpoint, std=None)
    assert float(weights["model.language_model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)


def test_random_keeps_what_is_there(checkpoint, tmp_path):
    first = _random(tmp_path / "out", checkpoint, seed=3)
    again = _random(tmp_path / "out", checkpoint, seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_random_weights(checkpoint, prompts, tmp_path, tied):
    weights = _random(tmp_path / "out", checkpoint, std=0.12, tied=tied)
    assert ("lm_head.weight" in weights) == (not tied)
    model = tiny.Reference(tmp_path / "out").model
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_parameters())
    assert (model.config.tie_word_embeddings, model.config.text_config.tie_word_embeddings) == (tied, tied)
