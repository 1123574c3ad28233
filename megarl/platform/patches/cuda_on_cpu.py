"""CPU mode: the parts of `torch.cuda` that Megatron calls unconditionally, answered by the CPU.

Active only where there is no GPU.  All of it must be in place before Megatron is imported.
"""

import contextlib
import functools
import logging
import sys
import time
from collections import defaultdict

import torch
from torch.utils._device import _device_constructors

from megarl.platform.kernels import Kernels
from megarl.platform.patches import CORE, Patch

_CPU = torch.device("cpu")


def _without_gpu(kernels: Kernels) -> bool:
    return not kernels.gpu


def _hide_transformer_engine() -> None:
    sys.modules["transformer_engine"] = None


def _on_cpu(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if kwargs:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _factories() -> None:
    # `torch.device("meta")` acts on the functions that torch has when this list is first asked for.
    _device_constructors()
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.cuda.current_device = _answer(_CPU)  # Megatron only ever passes it on as a device


class _Event:
    def __init__(self, *args, **kwargs):
        self.seconds = 0.0

    def record(self, *args):
        self.seconds = time.perf_counter()

    def wait(self, *args): ...

    def synchronize(self): ...

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.seconds - self.seconds) * 1e3


class _Stream:
    def __init__(self, *args, **kwargs): ...

    def wait_stream(self, *args): ...

    def wait_event(self, *args): ...

    def synchronize(self): ...

    def record_event(self, event=None):
        return event or _Event()


def _answer(value=None):
    # A new function each time: torch._dynamo refuses one object under two names.
    return lambda *args, **kwargs: value


def _streams() -> None:
    cuda = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = _answer(_Stream())
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize, cuda.empty_cache = _answer(), _answer()
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _answer(), _answer()


def _generators() -> None:
    cuda, seed = torch.cuda, torch.default_generator.manual_seed
    cuda.manual_seed, cuda.manual_seed_all = lambda s: seed(s), _answer()
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.default_generators = defaultdict(lambda: torch.default_generator)
    cuda._lazy_call = lambda call, **kwargs: call()
    # The tracker warns that the CPU generator moved inside a fork: here that is the one it tracks.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _tensor_type() -> None:
    plain = torch.Tensor.type

    def tensor_type(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.") if isinstance(out, str) else out

    torch.Tensor.type = tensor_type


def _compile() -> None:
    torch.compile = lambda function=None, **kwargs: function if function is not None else (lambda f: f)


PATCHES = [
    Patch(
        "hidden transformer-engine",
        "one that is installed for the GPUs of other machines, as on a login node, would be imported, and then "
        "no layer runs",
        CORE,
        "megatron/core/extensions/transformer_engine.py",
        "    import transformer_engine as te\n",
        _without_gpu,
        _hide_transformer_engine,
    ),
    Patch(
        "factories",
        "tensors are made with device=torch.cuda.current_device() and pin_memory=True",
        CORE,
        "megatron/core/inference/contexts/dynamic_context.py",
        "device=torch.cuda.current_device()",
        _without_gpu,
        _factories,
    ),
    Patch(
        "streams",
        "the engine records events and synchronises streams around each step",
        CORE,
        "megatron/core/inference/engines/dynamic_engine.py",
        "self.step_start_event = torch.cuda.Event(enable_timing=True)",
        _without_gpu,
        _streams,
    ),
    Patch(
        "generators",
        "the tensor-parallel RNG tracker keeps CUDA generators",
        CORE,
        "megatron/core/tensor_parallel/random.py",
        "torch.cuda.manual_seed",
        _without_gpu,
        _generators,
    ),
    Patch(
        "tensor-type",
        "the optimizers and gradient clipping compare Tensor.type() with CUDA's names",
        CORE,
        "megatron/core/optimizer/clip_grads.py",
        "torch.cuda.FloatTensor",
        _without_gpu,
        _tensor_type,
    ),
    Patch(
        "compile",
        "Megatron compiles small functions at import; on a CPU that costs minutes of C++ and gains nothing",
        CORE,
        "megatron/core/jit.py",
        "torch.compile",
        _without_gpu,
        _compile,
    ),
]
