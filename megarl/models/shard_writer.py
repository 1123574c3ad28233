"""The weights of a Hugging Face checkpoint, written tensor by tensor into safetensors files of a bounded size."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.errors import UserError

SHARD_BYTES = 1 << 30


class ShardWriter:
    """Holds the tensors of one file at a time: `SHARD_BYTES`, or a single tensor that is larger."""

    def __init__(self, folder: Path):
        """
        Args:
            folder: is there, and empty.
        """
        self.folder = folder
        self._shard: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0
        self._files: list[tuple[str, dict[str, str]]] = []
        """Each with the digests of its tensors."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor on the CPU, of which it keeps a copy until its file is full.

        Raises:
            UserError: a file is not what was written when it is read.
        """
        if self._shard and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def _flush(self) -> None:
        file = f"model-{len(self._files) + 1:05d}.safetensors"
        save_file(self._shard, self.folder / file, metadata={"format": "pt"})
        self._files.append((file, {name: _digest(tensor) for name, tensor in self._shard.items()}))
        self._shard, self._bytes = {}, 0
        self._read_back(*self._files[-1])

    def _read_back(self, file: str, written: dict[str, str]) -> None:
        with safe_open(self.folder / file, "pt") as tensors:
            found = {name: _digest(tensors.get_tensor(name)) for name in tensors.keys()}
        for name in written.keys() | found.keys():
            if written.get(name) != found.get(name):
                raise UserError(f"{self.folder / file} is not what was written: {name} differs")

    def close(self) -> None:
        """Writes what is left, and the index where there are several files; raises what `add` does."""
        self._flush()
        if len(self._files) == 1:
            (self.folder / self._files[0][0]).rename(self.folder / "model.safetensors")
            return
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: file for file, names in self._files for name in names},
        }
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _digest(tensor: torch.Tensor) -> str:
    """Of type, shape and values."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
