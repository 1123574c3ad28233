"""Which kernels this machine has, decided once and printed at start."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from megarl.errors import UserError


@dataclass(frozen=True)
class Kernels:
    """What a run is built from on this machine."""

    device: str
    """`cuda` or `cpu`."""
    layers: str
    """`transformer_engine`, or `torch` for Megatron's local layers with torch norms."""
    attention: str
    """`flash-attn-4`, or `torch` for `megarl.platform.attention`."""

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def te(self) -> bool:
        return self.layers == "transformer_engine"

    @property
    def collectives(self) -> str:
        """Backend of torch.distributed."""
        return "nccl" if self.gpu else "gloo"

    def __str__(self) -> str:
        where = torch.cuda.get_device_name() if self.gpu else f"CPU, {torch.get_num_threads()} thread(s) a rank"
        return f"{where}; layers: {self.layers}; attention: {self.attention}; collectives: {self.collectives}"


@cache
def kernels() -> Kernels:
    """The fastest kernels that can be used here.  Without a GPU everything is torch's."""
    if not torch.cuda.is_available():
        return Kernels("cpu", "torch", "torch")
    te = _version("transformer-engine") and _version("transformer-engine-torch")
    fa4 = _version("flash-attn-4")
    return Kernels("cuda", "transformer_engine" if te else "torch", "flash-attn-4" if fa4 else "torch")


def refuse_foreign_apex() -> None:
    """PyPI's `apex` is a toolkit for the Pyramid web framework.  Megatron takes whatever `apex` is
    importable for NVIDIA's and then fails inside its first LayerNorm.

    Raises:
        UserError: an `apex` is installed that is not NVIDIA's.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return
    places = [Path(p) for p in spec.submodule_search_locations or ()]
    if not any((p / "normalization").is_dir() for p in places):
        where = places[0] if places else spec.origin
        raise UserError(
            f"the package 'apex' in {where} is not NVIDIA's (PyPI's apex is a web toolkit that breaks Megatron): "
            "run 'pip uninstall apex'; megarl works without it, NVIDIA's is built from source"
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
