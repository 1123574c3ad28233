"""The CUDA graphs of this process.

NCCL does not let go of a communicator while a graph holds its collectives, as those of tensor-parallel ranks do.  Who
owned the graphs may be kept alive by whatever was left undone, so they are named here.
"""

from weakref import WeakSet

import torch

captured: "WeakSet[torch.cuda.CUDAGraph]" = WeakSet()


def drop_graphs() -> None:
    """None of them can be replayed any more."""
    for graph in captured:
        graph.reset()
