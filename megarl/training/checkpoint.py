"""The state of training on disk: weights, optimizer, schedule and step, in Megatron's sharded format."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors.torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from megarl.errors import UserError
from megarl.observe.files import sync_folder
from megarl.parallel.agreement import gathered
from megarl.training.checkpoint_folder import PARTIAL, Retention, publish, refuse_damaged, seal
from megarl.training.manifest import Entry
from megarl.training.reference import ReferencePolicy
from megarl.training.trainer import Trainer

_PROGRESS, _ROLLOUTS, _SOLVE_RATES = "progress.json", "rollouts.safetensors", "solve_rates.npy"
_REFERENCE = "reference."
"""Begins the names of a moving reference's weights, beside the policy's own."""
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Tensors are named after their weights, whatever the layout.  Given as a copy: Megatron writes process groups into
it."""


class CheckpointWriter:
    """Writes a run's checkpoints, each beside the training that goes on: `save` copies the state, a thread writes it,
    and `poll` or `wait`, which all ranks call together, make a checkpoint of what they have written.

    Megatron's own helpers for this are processes: one that is forked for each save, which a CUDA context and threads
    do not survive unharmed, or one that is spawned and stays, with a second copy of every import.  A thread ends with
    its rank and hears no signal; all collectives stay in the main thread.
    """

    def __init__(self, folder: Path, keep: Retention, newest: Path | None = None, in_background: bool = True):
        """
        Args:
            newest: the checkpoint that the run goes on from: the same step has the same state, and is not written
                again.
        """
        self._folder, self._keep, self._in_background = folder, keep, in_background
        self._newest = newest.name if newest else None
        self._writing: _Writing | None = None

    def save(
        self,
        name: str,
        trainer: Trainer,
        progress: dict,
        score: float | None = None,
        reference: ReferencePolicy | None = None,
        rollouts: dict[str, Tensor] | None = None,
        solve_rates: np.ndarray | None = None,
    ) -> None:
        """Begins to write `name`; nothing is done where it is the newest already.  Collective.

        Args:
            progress: plain values that tell the run where it was; rank 0's are kept.
            score: what the best checkpoints are kept by.
            reference: one that moves, and so is as old as the checkpoint says; its weights are kept with it.
            rollouts: what a step has left in flight, on all ranks; rank 0's are kept.
            solve_rates: of the prompts, an array of numbers; rank 0's is kept.

        Raises:
            UserError: a checkpoint cannot be written; the ones before it stay.
        """
        self.wait()
        if name == self._newest:
            return
        self._newest = name
        with _naming(self._folder / name):
            state = _state(trainer, is_loading=False)
            if reference is not None:
                state["reference"] = _kept(trainer.model, reference)
            self._writing = _Writing(self._folder, name, state, progress, score, rollouts, solve_rates)
            if self._in_background:
                self._writing.start()
            else:
                self._writing.run()
                self.wait()

    def poll(self) -> None:
        """Ends the save that all ranks have written, if there is one.  Collective; raises as `save` does."""
        if self._writing and not any(gathered(self._writing.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Returns when what `save` began is a checkpoint.  Collective; raises as `save` does."""
        if self._writing:
            writing, self._writing = self._writing, None
            with _naming(self._folder / writing.checkpoint):
                writing.finish(self._keep)


class _Writing(threading.Thread):
    """One checkpoint while it is written.  Its constructor and `finish` are collective; the thread writes this rank's
    files."""

    def __init__(
        self,
        folder: Path,
        name: str,
        state: dict,
        progress: dict,
        score: float | None,
        rollouts: dict[str, Tensor] | None,
        solve_rates: np.ndarray | None,
    ):
        super().__init__(name=f"writes {name}", daemon=True)
        self._rollouts = rollouts
        self._folder, self.checkpoint, self._progress, self._score = folder, name, progress, score
        self._solve_rates = None if solve_rates is None else solve_rates.copy()
        self._partial = folder / f"{name}{PARTIAL}"
        self._request = _plan(self._partial, state)
        self._buckets = _copied(self._request)
        self._error: str | None = None
        self._files: dict[str, Entry] = {}

    def run(self) -> None:
        try:
            self._files = _write(self._request, self._buckets)
        except OSError as error:
            self._error = f"{error.filename}: {error.strerror}"
        except BaseException as error:  # of a thread: nobody else would hear of it
            self._error = f"{self._partial}: {type(error).__name__}: {error}"
        finally:
            self._buckets = []

    def finish(self, keep: Retention) -> None:
        if self.ident is not None:
            self.join()
        self._refuse_failed()
        for function in self._request.finalize_fns:
            function()
        files = {name: entry for part in gathered(self._files) for name, entry in part.items()}
        if dist.get_rank() == 0:
            try:
                (self._partial / _PROGRESS).write_text(json.dumps(self._progress))
                if self._rollouts is not None:
                    (self._partial / _ROLLOUTS).write_bytes(safetensors.torch.save(self._rollouts))
                if self._solve_rates is not None:
                    np.save(self._partial / _SOLVE_RATES, self._solve_rates)
                publish(self._folder, self.checkpoint, self._score, files, keep)
            except OSError as error:
                self._error = f"{error.filename or self._partial}: {error.strerror}"
        self._refuse_failed()

    def _refuse_failed(self) -> None:
        error = next(filter(None, gathered(self._error)), None)
        if error is not None:
            if dist.get_rank() == 0:
                shutil.rmtree(self._partial, ignore_errors=True)  # a full disk has room for a last word
            raise UserError(f"checkpoint {self.checkpoint} was not saved: {error}; those before it are whole")


def _refuse_other_state(wanted: dict, checkpoint: Path) -> None:
    saved = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    tensors, *_ = load_preprocess(wanted)
    for tensor in nested_values(tensors):
        if not isinstance(tensor, ShardedTensor):
            continue
        if tensor.key not in saved:
            what = "optimizer state" if tensor.key.startswith("optimizer.") else "weights"
            raise UserError(f"{checkpoint} misses {what}: it has no {tensor.key}")
        shape, here = tuple(saved[tensor.key].global_shape), tuple(tensor.global_shape)
        if shape != here and not tensor.allow_shape_mismatch:
            raise UserError(f"{checkpoint} is of another architecture: {tensor.key} is {shape}, and {here} here")


def _optimizer_state(own: dict | list[dict], loaded: dict) -> dict | list[dict]:
    """What Megatron's optimizers of this layout take: experts that ranks share have an optimizer of their own, so how
    many there are, and how weights are grouped in each, is of the layout, and comes from `own`, the optimizers' present
    state.  The tensors and the number of updates are the checkpoint's."""
    updates = max(_updates(loaded), default=None)

    def filled(part: dict, tensors: dict) -> dict:
        groups = part["optimizer"]["param_groups"]
        if updates is not None:
            groups = [{**group, "step": updates} for group in groups]
        return {
            **part,
            "optimizer": {**part["optimizer"], "param_groups": groups},
            "param_state": tensors["param_state"],
            "param_state_sharding_type": _METADATA["distrib_optim_sharding_type"],
        }

    if isinstance(own, list):
        return [filled(part, loaded[number]) for number, part in enumerate(own)]
    return filled(own, loaded)


def _updates(loaded: dict) -> Iterator[float]:
    """Of each group of weights, in optimizers side by side or in the only one."""
    for key, value in loaded.items():
        if key == "optimizer":
            yield from (group["step"] for group in value["param_groups"] if group.get("step") is not None)
        elif isinstance(key, int):
            yield from _updates(value)


def read_progress(checkpoint: Path) -> dict:
    """What `CheckpointWriter.save` was given."""
    return json.loads((checkpoint / _PROGRESS).read_text())


def read_rollouts(checkpoint: Path) -> dict[str, Tensor]:
    """Likewise: what was in flight; empty where nothing was."""
    path = checkpoint / _ROLLOUTS
    return safetensors.torch.load_file(path) if path.exists() else {}


def read_solve_rates(checkpoint: Path) -> np.ndarray:
    """What `CheckpointWriter.save` was given."""
    return np.load(checkpoint / _SOLVE_RATES, allow_pickle=False)


def load(checkpoint: Path, trainer: Trainer) -> None:
    """Fills weights, optimizer and schedule in place, also where fewer or more ranks saved them, or ranks that shared
    experts otherwise.  Collective.

    Raises:
        UserError: the checkpoint has no state for some weight, or one of another shape.
    """
    wanted = _state(trainer, is_loading=True)
    _refuse_other_state(wanted, checkpoint)
    state = dist_checkpointing.load(wanted, str(checkpoint))
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(_optimizer_state(trainer.optimizer.state_dict(), state["optimizer"]))
    trainer.scheduler.num_steps = 0  # Megatron's scheduler adds the saved steps to those it has made
    trainer.scheduler.load_state_dict(state["scheduler"])


def load_reference(checkpoint: Path, model) -> None:
    """Fills the weights with those of the reference that a `CheckpointWriter` was given.  Collective."""
    state = dist_checkpointing.load({"reference": _reference_state(model)}, str(checkpoint))
    model.load_state_dict(state["reference"])


def dtype(checkpoint: Path) -> str:
    """Of the weights: `float32` or `bfloat16`."""
    tensors = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    weight = next(tensor for name, tensor in tensors.items() if not name.startswith("optimizer."))
    return str(weight.dtype).removeprefix("torch.")


def save_weights(folder: Path, model) -> None:
    """Writes the weights alone, where they are not there yet.  Collective.

    Raises:
        UserError: they cannot be written.
    """
    if folder.exists():
        return
    dist.barrier()  # every rank has looked before rank 0 makes it
    partial = folder.with_name(f"{folder.name}{PARTIAL}")
    with _naming(folder):
        request = _plan(partial, {"model": _model_state(model)})
        files = _write(request, request.preload_fn() if request.preload_fn else [])
        files = {name: entry for part in gathered(files) for name, entry in part.items()}
        for function in request.finalize_fns:
            function()
        if dist.get_rank() == 0:
            seal(partial, files)
            partial.rename(folder)
            sync_folder(folder.parent)
    dist.barrier()


def load_weights(folder: Path, model) -> None:
    """Fills the weights alone, from what `save_weights` or a `CheckpointWriter` wrote.  Collective.

    Raises:
        UserError: the files are damaged.
    """
    refuse_damaged(folder)
    fill_weights(folder, model)


def fill_weights(folder: Path, model) -> None:
    """`load_weights` from files that were compared with their manifest.  Collective."""
    state = dist_checkpointing.load({"model": _model_state(model)}, str(folder))
    model.load_state_dict(state["model"])


def _plan(folder: Path, state: dict) -> AsyncRequest:
    """What each rank writes where, into an empty folder; a folder of that name that was there before goes.
    Collective."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")


def _copied(request: AsyncRequest) -> list[tuple]:
    """The files of this rank, path, key and data each, with tensors on the CPU that training does not write into."""
    if request.preload_fn is None:
        return []
    planned, buckets = request.async_fn_args[1], request.preload_fn()
    live = {id(tensor) for *_, (_, tensors) in planned for _, tensor in tensors}
    copied = [
        (path, key, (objects, [(item, t.clone() if id(t) in live else t) for item, t in tensors]))
        for path, key, (objects, tensors) in buckets
    ]
    planned[:] = [()] * len(planned)  # Megatron counts them; what else they hold need not stay while files are written
    return copied


def _write(request: AsyncRequest, buckets: list[tuple]) -> dict[str, Entry]:
    """Writes this rank's files to disk, and tells Megatron what it needs for its index of them.

    Raises:
        OSError: with the file's name.
    """
    if not buckets:
        return {}
    transforms, results = request.async_fn.args[0], {}
    for number, bucket in enumerate(buckets):
        _, result = FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, None, None, use_fsync=True)
        if isinstance(result, OSError):
            raise OSError(result.errno, result.strerror, bucket[0])
        if isinstance(result, Exception):
            raise result
        results[number] = result
    request.async_fn_args[2].put(results)
    return {Path(path).name: Entry.of(Path(path)) for path, *_ in buckets}


@contextmanager
def _naming(checkpoint: Path):
    """Trouble of the disk is said in one line that names the checkpoint and the file.

    Raises:
        UserError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{checkpoint} was not saved: {where}{error.strerror or error}") from error


def _model_state(model) -> dict:
    return model.sharded_state_dict(metadata=dict(_METADATA))


def _reference_state(model) -> dict:
    state = _model_state(model)
    add_prefix_for_sharding(state, _REFERENCE)
    return state


def _kept(model, reference: ReferencePolicy) -> dict:
    """A copy on the CPU: the model is the reference for the moment of copying only."""
    with reference.swapped_in():
        state = _reference_state(model)
        for part in nested_values(state):
            if isinstance(part, (ShardedTensor, ShardedTensorFactory)):
                part.data = part.data.detach().to("cpu", copy=True)
    return state


def _state(trainer: Trainer, is_loading: bool) -> dict:
    model = _model_state(trainer.model)
    return {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_METADATA)),
        "scheduler": trainer.scheduler.state_dict(),
    }
