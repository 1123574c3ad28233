"""`megarl.export`: any checkpoint of a run as transformers takes it."""

import pytest
import torch

from megarl.platform import launch
from tests import commands, tiny
from tests.test_train import digits, finished, recipe  # noqa: F401
from tests.training.test_manifest import flip


def _export(arguments: list[str]) -> int:
    from megarl.export import export

    return launch.command(export, arguments)


def export(folder, *arguments) -> commands.Result:
    return commands.fork(folder, *arguments, main=_export)


def test_newest(finished, tmp_path):  # noqa: F811
    """The same weights as the run itself exported at its end."""
    folder = finished[0]
    result = export(tmp_path, folder, "--to", tmp_path / "hf")
    assert result.code == 0, result.err
    assert str(tmp_path / "hf") in result.out.splitlines()[-1]
    ours, theirs = (tiny.Reference(f).model.state_dict() for f in (tmp_path / "hf", folder / "checkpoint"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--step", "3"], ["does not have rl_000003", "it has rl_000016"]),
        (["--step", "8", "--phase", "warm-up"], ["does not have warm-up_000008"]),
        (["--step", "x"], ["--step", "usage"]),
    ],
    ids=str,
)
def test_refused(finished, tmp_path, arguments, words):  # noqa: F811
    line = export(tmp_path, finished[0], *arguments).refusal()
    assert all(word in line for word in words), line


def test_no_run(tmp_path):
    assert "is not the folder of a run" in export(tmp_path, tmp_path / "nowhere").refusal()


def test_damaged_checkpoint(finished, tmp_path):  # noqa: F811
    """Nothing is exported from it."""
    shard = finished[0] / "checkpoints" / "rl_000016" / "__0_0.distcp"
    flip(shard, 4000)
    try:
        line = export(tmp_path, finished[0], "--to", tmp_path / "hf").refusal()
    finally:
        flip(shard, 4000)
    assert "is damaged" in line and "__0_0.distcp" in line
    assert not (tmp_path / "hf").exists()


@pytest.mark.ranks(1)
def test_what_was_written_is_read_back(checkpoint, tmp_path):
    """A disk that does not keep what it is given is caught, and the folder does not appear."""
    from safetensors.torch import save_file

    from megarl.errors import UserError
    from megarl.models import build
    from tests import policies

    def forgetful(tensors, path, **options):
        save_file(tensors, path, **options)
        flip(path, -1)

    policy = policies.policy(checkpoint)
    before = build.save_file
    build.save_file = forgetful
    try:
        with pytest.raises(UserError, match="model-00001.safetensors is not what was written: .* differs"):
            build.save_checkpoint(policy, tmp_path / "hf", None)
    finally:
        build.save_file = before
    assert not (tmp_path / "hf").exists()
