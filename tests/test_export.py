"""`megarl.export`: any checkpoint of a run as transformers takes it."""

import re
import shutil

import pytest
import torch

from megarl.data.generators.digits import write_digits
from megarl.errors import UserError
from megarl.export import _refuse_unloadable
from megarl.models.hf_config import family_of
from megarl.platform import launch
from tests import commands, tiny
from tests.damage import flip
from tests.test_train import DIGITS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step."""
    folder = tmp_path_factory.mktemp("exported")
    write_digits(folder / "digits", scans=200)
    sizes = ["steps=1", "warmup=null", "optimizer.warmup_steps=0", "algorithm.prompts_per_step=4", "evaluation.every=0"]
    overrides = [f"run_dir={folder / 'run'}", f"data.path={folder / 'digits'}", "evaluation.max_prompts=4", *sizes]
    result = commands.fork(folder, DIGITS, *overrides)
    assert result.code == 0, result.err
    return folder / "run"


def _export(arguments: list[str]) -> int:
    from megarl.export import export

    return launch.command(export, arguments)


def export(folder, *arguments) -> commands.Result:
    return commands.fork(folder, *arguments, main=_export)


def test_newest(run, tmp_path):
    """The same weights as the run itself exported at its end."""
    result = export(tmp_path, run, "--to", tmp_path / "hf")
    assert (result.code, result.err) == (0, "")
    assert str(tmp_path / "hf") in result.out.splitlines()[-1]
    ours, theirs = (tiny.Reference(f).model.state_dict() for f in (tmp_path / "hf", run / "checkpoint"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """A run of two commands that trained adapters alone."""
    folder = tmp_path_factory.mktemp("adapted")
    write_digits(folder / "digits", scans=200)
    sizes = ["warmup=null", "optimizer.warmup_steps=0", "algorithm.prompts_per_step=4", "evaluation.every=0"]
    overrides = [f"run_dir={folder / 'run'}", f"data.path={folder / 'digits'}", "evaluation.max_prompts=4", *sizes]
    adapters = ["model.lora.rank=4", "model.freeze=[vision, projector]"]
    for steps in (1, 2):
        result = commands.fork(folder, DIGITS, *overrides, *adapters, f"steps={steps}")
        assert result.code == 0, result.err
    assert "resumed after rl step 1" in result.out
    return folder / "run"


def test_adapters(lora_run, tmp_path):
    """peft adds them to the initial model to what the run exported, merged, at its end."""
    from peft import PeftModel

    result = export(tmp_path, lora_run, "--adapter", "--to", tmp_path / "adapter")
    assert (result.code, result.err) == (0, "")
    base = tiny.Reference(lora_run / "initial").model
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    theirs = tiny.Reference(lora_run / "checkpoint").model.state_dict()
    before = tiny.Reference(lora_run / "initial").model.state_dict()
    assert merged.keys() == theirs.keys()
    assert max((merged[name] - theirs[name]).abs().max() for name in theirs) < 1e-6
    assert any((before[name] - theirs[name]).abs().max() > 1e-4 for name in theirs)


def test_no_adapters(run, tmp_path):
    assert "model.lora = null" in export(tmp_path, run, "--adapter").refusal()


def test_more_than_adapters(lora_run, tmp_path):
    shutil.copytree(lora_run, tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(re.sub(r"freeze:\n( *)- vision\n", r"freeze:\n", recipe.read_text()))
    line = export(tmp_path, tmp_path / "run", "--adapter").refusal()
    assert "trained the vision too" in line and "model.freeze = ['projector']" in line


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--step", "3"], ["does not have rl_000003", "it has rl_000001"]),
        (["--step", "8", "--phase", "warm-up"], ["does not have warm-up_000008"]),
        (["--step", "x"], ["--step", "usage"]),
    ],
    ids=str,
)
def test_refused(run, tmp_path, arguments, words):
    line = export(tmp_path, run, *arguments).refusal()
    assert all(word in line for word in words), line


def test_no_run(tmp_path):
    assert "is not the folder of a run" in export(tmp_path, tmp_path / "nowhere").refusal()


def test_damaged_checkpoint(run, tmp_path):
    """Nothing is exported from it."""
    shard = run / "checkpoints" / "rl_000001" / "__0_0.distcp"
    flip(shard, 4000)
    try:
        line = export(tmp_path, run, "--to", tmp_path / "hf").refusal()
    finally:
        flip(shard, 4000)
    assert "is damaged" in line and "__0_0.distcp" in line
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3"])
def test_each_family_has_its_class(tmp_path, model_type):
    """A weight that is missing is said; else there is nothing to say."""
    from safetensors.torch import load_file, save_file

    folder = tiny.write_family_checkpoint(tmp_path / "hf", model_type)
    _refuse_unloadable(folder, family_of(folder))
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "q_proj" in name)
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="missing_keys: .*q_proj"):
        _refuse_unloadable(folder, family_of(folder))


@pytest.mark.ranks(1)
def test_what_was_written_is_read_back(checkpoint, tmp_path):
    """A disk that does not keep what it is given is caught, and the folder does not appear."""
    from safetensors.torch import save_file

    from megarl.models import build, shard_writer
    from tests import policies

    def forgetful(tensors, path, **options):
        save_file(tensors, path, **options)
        flip(path, -1)

    policy = policies.policy(checkpoint)
    before = shard_writer.save_file
    shard_writer.save_file = forgetful
    try:
        with pytest.raises(UserError, match="model-00001.safetensors is not what was written: .* differs"):
            build.save_checkpoint(policy, tmp_path / "hf", None)
    finally:
        shard_writer.save_file = before
    assert not (tmp_path / "hf").exists()
