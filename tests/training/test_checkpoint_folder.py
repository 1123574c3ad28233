"""Which checkpoint a run goes on from, when they are damaged in every way that a disk or a killed run leaves behind."""

import os
import shutil
import subprocess

import pytest
import torch

from megarl.errors import UserError
from tests.damage import flip
from tests.distributed import lazy

policies = lazy("tests.policies")
checkpoints = lazy("megarl.training.checkpoint")
folders = lazy("megarl.training.checkpoint_folder")


def _save(folder, trainer, step, score=None, **retention):
    writer = checkpoints.CheckpointWriter(folder, folders.Retention(**retention))
    writer.save(folders.name_of("rl", step), trainer, {"step": step}, score)
    writer.wait()


def _three(checkpoint, folder):
    """A trainer and its checkpoints 1, 2 and 3, of which each has another embedding."""
    trainer = policies.trainer(policies.policy(checkpoint).model)
    for step in (1, 2, 3):
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(step)
        _save(folder, trainer, step, last=3)
    return trainer


DAMAGES = {
    "no shard": lambda path: next(path.glob("*.distcp")).unlink(),
    "torn shard": lambda path: os.truncate(next(path.glob("*.distcp")), 1000),
    "flipped bit in a shard": lambda path: flip(next(path.glob("*.distcp")), 5000),
    "no index": lambda path: (path / ".metadata").unlink(),
    "flipped bit in the index": lambda path: flip(path / ".metadata", 100),
    "empty index": lambda path: (path / ".metadata").write_bytes(b""),
    "torn config": lambda path: os.truncate(path / "metadata.json", 3),
    "no progress": lambda path: (path / "progress.json").unlink(),
    "changed progress": lambda path: (path / "progress.json").write_text('{"step": 9}'),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "torn manifest": lambda path: os.truncate(path / "manifest.json", 50),
    "flipped bit in the manifest": lambda path: flip(path / "manifest.json", 20),
    "empty folder": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.mark.ranks(1)
def test_the_one_before_is_used(checkpoint, tmp_path):
    """Of each kind of damage: said with the file's name, and what is loaded is whole."""
    trainer = _three(checkpoint, tmp_path / "whole")
    for kind, damage in DAMAGES.items():
        folder = tmp_path / kind
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "rl_000003")
        newest, (line,) = folders.newest_whole(folder)
        assert newest == folder / "rl_000002", kind
        assert line.startswith(f"checkpoint rl_000003 is damaged and was set aside: {folder}/rl_000003/"), line
        assert checkpoints.read_progress(newest) == {"step": 2}
        checkpoints.load(newest, trainer)
        assert float(next(trainer.model.parameters()).max()) == 2
        # Once: the next start finds a whole one, and the next save forgets the damaged one.
        assert folders.newest_whole(folder) == (newest, [])
        assert (folder / "rl_000003.damaged").is_dir()
        _save(folder, trainer, 3, last=3)
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "rl_000001", "rl_000002", "rl_000003"]
        assert folders.newest_whole(folder) == (folder / "rl_000003", [])


@pytest.mark.ranks(1)
def test_two_are_damaged(checkpoint, tmp_path):
    _three(checkpoint, tmp_path)
    DAMAGES["torn manifest"](tmp_path / "rl_000003")
    DAMAGES["torn shard"](tmp_path / "rl_000002")
    newest, lines = folders.newest_whole(tmp_path)
    assert newest == tmp_path / "rl_000001" and len(lines) == 2


@pytest.mark.ranks(1)
def test_none_is_whole(checkpoint, tmp_path):
    """A run is never begun anew without a word; nothing is touched."""
    _three(checkpoint, tmp_path)
    for step in (1, 2, 3):
        DAMAGES["flipped bit in a shard"](tmp_path / f"rl_00000{step}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="no checkpoint in .* is whole: .*rl_000003/__0_0.distcp is not what was"):
        folders.newest_whole(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / f"rl_00000{step}")
    with pytest.raises(UserError, match="latest is all that is left"):
        folders.newest_whole(tmp_path)


@pytest.mark.ranks(1)
def test_nothing_was_saved(tmp_path):
    """Also where the very first save was cut off."""
    assert folders.newest_whole(tmp_path / "nowhere") == (None, [])
    (tmp_path / "rl_000001.partial").mkdir()
    assert folders.newest_whole(tmp_path) == (None, [])
    assert folders.latest(tmp_path) is None


@pytest.mark.ranks(1)
def test_cut_off_anywhere(checkpoint, tmp_path):
    """A save that ends before `latest` moves, or before its folder has its name, costs nothing but itself."""
    _three(checkpoint, tmp_path)
    (tmp_path / "latest").write_text("rl_000002")
    assert folders.newest_whole(tmp_path)[0] == tmp_path / "rl_000003"
    (tmp_path / "rl_000003").rename(tmp_path / "rl_000003.partial")
    assert folders.newest_whole(tmp_path)[0] == tmp_path / "rl_000002"
    (tmp_path / "latest").unlink()
    assert folders.newest_whole(tmp_path) == (tmp_path / "rl_000002", [])


@pytest.mark.ranks(1)
def test_clocks_and_names_order_nothing(checkpoint, tmp_path):
    """A clock that was set back, and the phase that comes first by name."""
    trainer = _three(checkpoint, tmp_path)
    for path in tmp_path.rglob("*"):
        os.utime(path, (4e9, 4e9))
    writer = checkpoints.CheckpointWriter(tmp_path, folders.Retention())
    writer.save("a_000001", trainer, {"step": 4})
    writer.wait()
    assert folders.newest_whole(tmp_path)[0] == tmp_path / "a_000001"
    assert (tmp_path / "latest").read_text() == "a_000001"
    assert folders.names(tmp_path) == ["rl_000003", "a_000001"]


@pytest.mark.ranks(1)
def test_last_and_best(checkpoint, tmp_path):
    """Of equal scores the newer; one without a score is kept as one of the last only."""
    trainer = policies.trainer(policies.policy(checkpoint).model)
    kept = {}
    for step, score in enumerate([0.5, 0.9, None, 0.9, 0.1, 0.2], start=1):
        _save(tmp_path, trainer, step, score, last=1, best=2)
        kept[step] = [int(name.rpartition("_")[2]) for name in folders.names(tmp_path)]
    assert kept == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [2, 4], 5: [2, 4, 5], 6: [2, 4, 6]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "rl_000002", "rl_000004", "rl_000006"]


@pytest.mark.ranks(1)
def test_the_newest_is_not_written_again(checkpoint, tmp_path):
    trainer = _three(checkpoint, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rl_000003").iterdir()}
    writer = checkpoints.CheckpointWriter(tmp_path, folders.Retention(), newest=tmp_path / "rl_000003")
    writer.save("rl_000003", trainer, {"step": 3, "again": True})
    writer.wait()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rl_000003").iterdir()} == before


def _two_ranks(checkpoint, folder):
    """On both: a shard of the second rank is damaged, which its reader and all others hear of."""
    trainer = policies.trainer(policies.policy(checkpoint).model)
    for step in (1, 2):
        _save(folder, trainer, step)
    if torch.distributed.get_rank() == 0:
        flip(folder / "rl_000002" / "__1_0.distcp", 3000)
    torch.distributed.barrier()
    newest, lines = folders.newest_whole(folder)
    return newest.name, lines


def test_ranks_agree(ranks, checkpoint, tmp_path):
    (first, said), second = ranks.run(_two_ranks, checkpoint, tmp_path, world_size=2, tensor_parallel=2)
    assert (first, said) == second
    assert first == "rl_000001" and "rl_000002/__1_0.distcp" in said[0]


# Trouble of the machine


@pytest.fixture
def small_disk(tmp_path):
    """Of 12 MB, which are a few checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def _fill(checkpoint, folder, in_background):
    trainer = policies.trainer(policies.policy(checkpoint).model)
    writer = checkpoints.CheckpointWriter(folder, folders.Retention(100), in_background=in_background)
    said = []
    for step in range(1, 100):
        try:
            writer.save(folders.name_of("rl", step), trainer, {"step": step})
            writer.wait()
        except UserError as error:
            said.append(str(error))
            break
    return step, said, folders.newest_whole(folder)


@pytest.mark.parametrize("in_background", [True, False])
def test_full_disk(ranks, checkpoint, small_disk, in_background):
    """The message names the file; what was there before is whole, and the rest gives its room back."""
    for step, (message,), (newest, lines) in ranks.run(_fill, checkpoint, small_disk, in_background, world_size=2):
        assert step > 1 and newest == small_disk / f"rl_{step - 1:06d}" and lines == []
        assert "No space left on device" in message and f"rl_{step:06d}.partial/__" in message, message
    assert not list(small_disk.glob("*.partial"))


@pytest.mark.ranks(1)
def test_a_folder_that_cannot_be_made(checkpoint, tmp_path):
    trainer = policies.trainer(policies.policy(checkpoint).model)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=f"rl_000001 was not saved: .*{tmp_path}/checkpoints"):
        _save(tmp_path / "checkpoints", trainer, 1)
