"""Checkpoints are read without unpickling what is not on a list: a file must not be able to run code."""

import pickle

from megarl.platform.kernels import Kernels
from megarl.platform.patches import Patch

TORCH = "torch==2.11.0"
_PLACE = "torch/distributed/checkpoint"

_INDEX_TYPES = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    ("torch", "float32"),
    ("torch", "float64"),
    ("torch", "int64"),
    ("torch", "int32"),
    ("torch", "uint8"),
    ("torch", "bool"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
}
"""What torch's index of a checkpoint is made of, with the plans of all ranks, which Megatron puts into it."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) not in _INDEX_TYPES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's index")
        return super().find_class(module, name)


def _always(kernels: Kernels) -> bool:
    return True


def _index_of_listed_types() -> None:
    from types import SimpleNamespace

    from torch.distributed.checkpoint import filesystem

    filesystem.pickle = SimpleNamespace(dump=pickle.dump, load=lambda file: _IndexUnpickler(file).load())


def _objects_of_listed_types() -> None:
    import torch
    from torch.distributed.checkpoint import default_planner

    def load_bytes(self, read_item, value):
        name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            default_planner.set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    default_planner.DefaultLoadPlanner.load_bytes = load_bytes


PATCHES = [
    Patch(
        "checkpoint-index-of-listed-types",
        "the index of a checkpoint is unpickled, whatever it contains",
        TORCH,
        f"{_PLACE}/filesystem.py",
        "metadata = pickle.load(metadata_file)",
        _always,
        _index_of_listed_types,
    ),
    Patch(
        "checkpoint-objects-of-listed-types",
        "what is no tensor in a checkpoint is unpickled, whatever it contains",
        TORCH,
        f"{_PLACE}/default_planner.py",
        "torch.load(value, weights_only=False),",
        _always,
        _objects_of_listed_types,
    ),
]
