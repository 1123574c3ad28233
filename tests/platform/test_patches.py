"""Each patch still mends what stands there, in the release it was written for, and only where it should."""

from importlib.metadata import version

import pytest

from megarl.platform.kernels import Kernels
from megarl.platform.patches import all_patches

CPU = Kernels("cpu", "torch", "torch")
BARE_GPU = Kernels("cuda", "torch", "torch")
FULL_GPU = Kernels("cuda", "transformer_engine", "flash-attn-4")

PATCHES = all_patches()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_needed(patch):
    """A new release, or a place that has changed, asks whether the patch can go."""
    name, _, pinned = patch.package.partition("==")
    assert version(name) == pinned, f"{patch.name} was written for {patch.package}"
    assert patch.still_needed(), f"{patch.text!r} is no longer in {patch.place}"
    assert patch.reason and "\n" not in patch.reason


def test_still_needed_can_fail():
    import dataclasses

    assert not dataclasses.replace(PATCHES[0], text="this is nowhere in the file").still_needed()


def test_names_are_unique():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


def names(kernels):
    return {patch.name for patch in PATCHES if patch.when(kernels)}


def test_cpu_mode_is_for_the_cpu():
    """Nothing of `torch.cuda` is touched where there is a GPU."""
    from megarl.platform.patches import cuda_on_cpu

    cpu_only = {patch.name for patch in cuda_on_cpu.PATCHES} | {"kv-append"}
    assert cpu_only <= names(CPU)
    assert not cpu_only & names(BARE_GPU)
    assert not cpu_only & names(FULL_GPU)


def test_stand_ins_follow_the_kernels():
    without_te = {"bridge-import", "torch-vision-layers", "torch-norm-names", "torch-adam-state"}
    assert without_te <= names(CPU) and without_te <= names(BARE_GPU) and not without_te & names(FULL_GPU)
    torch_attention = {"paged-attention", "finite-kv-memory"}
    assert torch_attention <= names(CPU) and torch_attention <= names(BARE_GPU)
    assert not torch_attention & names(FULL_GPU)
    assert "fa4-splits" in names(FULL_GPU) and "fa4-splits" not in names(BARE_GPU) | names(CPU)
    assert {"exact-gelu", "vision-recompute", "evict-parents-of-live-blocks"} <= names(CPU) & names(FULL_GPU)


@pytest.mark.ranks(1)
def test_applied_here():
    """A rank of the test jobs has what its kernels need, and no stand-in module is left behind."""
    import sys

    from megarl.platform import kernels, prepare

    assert [patch.name for patch in prepare.applied] == [
        patch.name for patch in all_patches() if patch.when(kernels.kernels())
    ]
    if not kernels.kernels().te:
        assert not any(name.startswith("transformer_engine") and module for name, module in sys.modules.items())


@pytest.mark.ranks(1)
def test_a_checkpoint_cannot_run_code(tmp_path):
    """Neither its index nor what it holds beside tensors; what Megatron writes is read."""
    import io
    import os
    import pickle

    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'done'}",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="posix.system is no part of a checkpoint's index"):
        FileSystemReader(tmp_path).read_metadata()

    index = MetadataIndex("thing")
    item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size((0,)), index, torch.Size((0,)), torch.Size((0,)))
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    for value in (Evil(), {"step": 3}):
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        planner.state_dict = {}
        if isinstance(value, dict):
            planner.load_bytes(item, stream)
            assert planner.state_dict == {"thing": {"step": 3}}
        else:
            with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
                planner.load_bytes(item, stream)
    assert not (tmp_path / "done").exists()


@pytest.mark.ranks(1)
def test_the_meta_device_takes_no_memory():
    """What has no device of its own goes where torch was told, as it does where nothing is patched."""
    import torch

    with torch.device("meta"):
        made = [torch.nn.Linear(2, 2).weight, torch.zeros(2), torch.empty(2, pin_memory=False), torch.arange(3)]
    assert {tensor.device.type for tensor in made} == {"meta"}
