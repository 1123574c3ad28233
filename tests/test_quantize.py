"""`megarl.quantize`: checkpoints in eight bits, as modelopt writes them."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor

from megarl.data.generators.digits import write_digits
from megarl.quantize import main
from megarl.recipe import load_recipe, save_recipe
from tests.test_train import DIGITS


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint):
    """A run folder as far as the command reads it."""
    folder = tmp_path_factory.mktemp("runs")
    write_digits(folder / "digits", scans=200)
    (folder / "run").mkdir()
    settings = [f"data.path={folder / 'digits'}", "rollout.quantization.calibration_prompts=3"]
    save_recipe(load_recipe(DIGITS, settings), folder / "run" / "recipe.yaml")
    (folder / "run" / "checkpoint").symlink_to(checkpoint)
    return folder / "run"


def test_fp8(run, checkpoint, tmp_path):
    """Weights of the language model's layers in E4M3 with a scale each, the rest as it was; the scales of inputs are
    those of the calibration; the processor travels.  A process of its own: modelopt changes transformers' classes."""
    command = [sys.executable, "-m", "megarl.quantize", str(run), "--to", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    quantised = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(quantised) == 3 * 7 and all(".language_model.layers." in name for name in quantised)
    for name, tensor in before.items():
        if name not in quantised:
            assert torch.equal(after[name], tensor), name
            continue
        scale = after[f"{name}_scale"]
        assert scale == tensor.abs().max() / 448
        expected = (tensor / scale).to(torch.float8_e4m3fn)
        assert (after[name].float() - expected.float()).abs().max() <= 32  # at most one step, where two are as near
        assert after[name].float().ne(expected.float()).float().mean() < 1e-2
        assert after[name.replace("weight", "input_scale")] > 0
    layer = "model.language_model.layers.0.self_attn"
    assert after[f"{layer}.q_proj.input_scale"] == after[f"{layer}.k_proj.input_scale"]
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "FP8"
    vocabulary = AutoProcessor.from_pretrained(tmp_path / "out").tokenizer.get_vocab()
    assert vocabulary == AutoProcessor.from_pretrained(checkpoint).tokenizer.get_vocab()


def refusal(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("megarl: error: ") and err.count("\n") == 1
    return err


def test_refused(run, tmp_path, capsys, mixture_checkpoint, monkeypatch):
    assert "is not the folder of a run" in refusal(capsys, tmp_path)
    assert "python -m megarl.export" in refusal(capsys, run, "--checkpoint", tmp_path / "nowhere")
    assert "should be a folder with a config.json" in refusal(capsys, run, "--checkpoint", tmp_path)
    assert "mixture of experts" in refusal(capsys, run, "--checkpoint", mixture_checkpoint)
    assert "--format" in refusal(capsys, run, "--format", "int4")
    monkeypatch.setitem(sys.modules, "modelopt", None)
    assert "megarl[quant]" in refusal(capsys, run)
