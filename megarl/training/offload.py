"""Tensors leave the GPU for page-locked memory of the host while nobody needs them, beside what it computes.

Megarl's own, since Megatron's `optimizer.offload_to_cpu` waits for each copy, into memory that is not page-locked, and
replaces tensors: float32 weights, which are their own masters, would not be views into DDP's buffers any more.
"""

import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megarl.errors import UserError

_ALIGNMENT = 512
"""Bytes, that of torch's allocator on a GPU."""


class Offload:
    """Of tensors that stay what they are, so that all views of them and all references to them stay valid: only their
    storage is empty in between.  Without a GPU the copies are the same, from main memory to main memory.

    Copies run on a stream of their own.  Freed memory is reused as soon as its copy is done, and nobody waits for that
    (`torch.Tensor.record_stream`).
    """

    def __init__(self, device: torch.device):
        self._gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream()
        self._host = _HostMemory(self._gpu)
        self._away: list[tuple[Tensor, Tensor]] = []
        """uint8 views of whole storages, and where their bytes are meanwhile."""
        self._returned: torch.cuda.Event | None = None
        self.bytes = 0
        """That left at the last time."""

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Begins the way out, behind what the current stream has to do; of tensors that share storage, once.  Nothing
        is done where some are away."""
        if self._away:
            return
        self.wait()
        storages = {storage.data_ptr(): storage for t in tensors if (storage := t.untyped_storage()).nbytes()}
        whole = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages.values()
        ]
        away = list(zip(whole, self._host.places([t.nbytes for t in whole]), strict=True))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for here, there in away:
                there.copy_(here, non_blocking=True)
        for here, _ in away:
            if self._gpu:
                here.record_stream(self._stream)
            here.untyped_storage().resize_(0)
        self._away, self.bytes = away, sum(there.nbytes for _, there in away)

    def begin_return(self) -> None:
        """Allocates what is away and begins the way back; `wait` must follow before anybody looks."""
        if not self._away:
            return
        for here, there in self._away:
            here.untyped_storage().resize_(there.nbytes)
        # What the current stream still does with this memory comes first.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for here, there in self._away:
                here.copy_(there, non_blocking=True)
        self._returned, self._away = self._stream.record_event(), []

    def wait(self) -> None:
        """What the current stream is given from now on finds everything in its place; the CPU does not wait."""
        self.begin_return()
        if self._returned is not None:
            torch.cuda.current_stream().wait_event(self._returned)
            self._returned = None


class _HostMemory:
    """Page-locked where there is a GPU, and kept: locking pages takes far longer than a copy.  torch's own pinned
    memory comes in powers of two bytes, up to twice what is asked for."""

    def __init__(self, locked: bool):
        self._locked = locked
        self._blocks: list[Tensor] = []

    def places(self, sizes: Sequence[int]) -> list[Tensor]:
        """uint8, one for each size in bytes; valid until the next call.

        Raises:
            UserError: the host does not have as much.
        """
        rooms = [block[:] for block in self._blocks]
        found: list[Tensor | None] = []
        for size in sizes:
            fitting = next((n for n, room in enumerate(rooms) if room.numel() >= size), None)
            found.append(None if fitting is None else rooms[fitting][:size])
            if fitting is not None:
                rooms[fitting] = rooms[fitting][_aligned(size) :]
        missing = sum(_aligned(size) for size, place in zip(sizes, found, strict=True) if place is None)
        if not missing:
            return found
        self._blocks.append(self._block(missing))
        return self.places(sizes)

    def _block(self, size: int) -> Tensor:
        # Whole pages that are nobody else's, since a page can be locked only once.
        block = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        if self._locked:
            runtime = torch.cuda.cudart()
            error = runtime.cudaHostRegister(block.data_ptr(), size, 0)
            if error != runtime.cudaError.success:
                raise UserError(
                    f"training.offload = optimizer: {size / 2**30:.1f} GiB of the host's memory cannot be locked "
                    f"({error}): free as much, or set none"
                )
        return block


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
