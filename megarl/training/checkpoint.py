"""The state of training on disk: weights, optimizer, schedule and step, in Megatron's sharded format."""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megarl.training.reference import ReferencePolicy
from megarl.training.trainer import Trainer

_LATEST, _PROGRESS, _REFERENCE = "latest", "progress.json", "reference"
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Given as a copy: Megatron writes process groups into it."""


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    pointer = folder / _LATEST
    named = folder / pointer.read_text().strip() if pointer.is_file() else None
    return named if named and (named / _PROGRESS).is_file() else None


def save(folder: Path, name: str, trainer: Trainer, progress: dict, reference: ReferencePolicy | None = None) -> None:
    """Writes `folder/name` and then points `latest` to it; older ones go.  Collective.

    Nothing is done where `latest` is `name` already: the same step has the same state.

    Args:
        progress: plain values that tell the run where it was; rank 0's are kept.
        reference: one that moves, and so is as old as the checkpoint says; its weights are kept with it.
    """
    there = latest(folder)
    dist.barrier()  # every rank has looked before rank 0 writes
    if there == folder / name:
        return
    partial = folder / f"{name}.partial"
    _write(partial, _state(trainer, is_loading=False))
    if reference is not None:
        with reference.swapped_in():
            _write(partial / _REFERENCE, {"model": _model_state(trainer)})
    if dist.get_rank() == 0:
        (partial / _PROGRESS).write_text(json.dumps(progress))
        shutil.rmtree(folder / name, ignore_errors=True)
        partial.rename(folder / name)
        pointer = folder / f"{_LATEST}.partial"
        pointer.write_text(name)
        pointer.replace(folder / _LATEST)
        for old in folder.iterdir():
            if old.is_dir() and old.name != name:
                shutil.rmtree(old)
    dist.barrier()


def reference_weights(checkpoint: Path) -> Path | None:
    """For `load_weights`: those of the reference policy that `save` was given, or None."""
    folder = checkpoint / _REFERENCE
    return folder if folder.is_dir() else None


def read_progress(checkpoint: Path) -> dict:
    """What `save` was given."""
    return json.loads((checkpoint / _PROGRESS).read_text())


def load(checkpoint: Path, trainer: Trainer) -> None:
    """Fills weights, optimizer and schedule in place, also where fewer or more ranks saved them.  Experts that ranks
    share have an optimizer of their own in Megatron, so a state saved with them is none for whole experts, and the
    other way round.  Collective."""
    state = dist_checkpointing.load(_state(trainer, is_loading=True), str(checkpoint))
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.num_steps = 0  # Megatron's scheduler adds the saved steps to those it has made
    trainer.scheduler.load_state_dict(state["scheduler"])


def save_weights(folder: Path, trainer: Trainer) -> None:
    """Writes the weights alone, where they are not there yet.  Collective."""
    if folder.exists():
        return
    dist.barrier()  # every rank has looked before rank 0 makes it
    partial = folder.with_name(f"{folder.name}.partial")
    _write(partial, {"model": _model_state(trainer)})
    if dist.get_rank() == 0:
        partial.rename(folder)
    dist.barrier()


def load_weights(folder: Path, trainer: Trainer) -> None:
    """Fills the weights alone.  Collective."""
    state = dist_checkpointing.load({"model": _model_state(trainer)}, str(folder))
    trainer.model.load_state_dict(state["model"])


def _write(folder: Path, state: dict) -> None:
    """A folder of that name that was there before goes.  Collective; on return every rank has written."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    dist.barrier()


def _model_state(trainer: Trainer) -> dict:
    return trainer.model.sharded_state_dict(metadata=dict(_METADATA))


def _state(trainer: Trainer, is_loading: bool) -> dict:
    model = _model_state(trainer)
    return {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_METADATA)),
        "scheduler": trainer.scheduler.state_dict(),
    }
