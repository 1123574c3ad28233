"""The pool of ranks that other tests run on."""

import os
import time

import pytest

from tests.distributed import RankFailed


def _who():
    import torch.distributed as dist
    from megatron.core import parallel_state

    return dist.get_rank(), dist.get_world_size(), parallel_state.get_tensor_model_parallel_world_size()


def _fail(rank: int):
    import torch.distributed as dist

    assert dist.get_rank() != rank, "on purpose"
    dist.barrier()


def _sleep():
    time.sleep(60)


def _end(code: int):
    os._exit(code)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 1])
def test_layouts(ranks, tensor_parallel):
    answers = ranks.run(_who, world_size=2, tensor_parallel=tensor_parallel)
    assert answers == [(0, 2, tensor_parallel), (1, 2, tensor_parallel)]


@pytest.mark.ranks(2, tensor_parallel=2)
def test_body_on_ranks(tmp_path):
    assert _who()[1:] == (2, 2)
    assert tmp_path.is_dir()


def test_failures(ranks):
    """A failed assert, a rank that hangs, one that dies; and afterwards the pool works again."""
    with pytest.raises(RankFailed, match="rank 0: (.|\n)*on purpose"):
        ranks.run(_fail, 0)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank\(s\) \[0\] did not answer within 1 s"):
        ranks.run(_sleep, timeout=1)
    assert time.monotonic() - start < 60
    with pytest.raises(RankFailed, match="rank 0: the process ended"):
        ranks.run(_end, 3)
    assert ranks.run(_who) == [(0, 1, 1)]
