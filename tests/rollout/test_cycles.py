"""An engine that sleeps and wakes for ever keeps nothing: file handles, threads and memory stay as they are."""

import os
import threading

import psutil
import pytest

from tests.distributed import lazy

policies = lazy("tests.policies")

CYCLES = int(os.environ.get("MEGARL_CYCLES", "600"))
WARM = 200
"""Cycles until allocators and caches have what they want."""


@pytest.mark.slow
@pytest.mark.ranks(1, timeout=900)
def test_flat(checkpoint, prompts):
    """A generation is begun, put to sleep after a step, its weights change, and it is ended: `CYCLES` times."""
    policy = policies.policy(checkpoint)
    engine, process = policies.engine(policy.model, enable_prefix_caching=True), psutil.Process()
    batch = [prompts["text"], prompts["image"]]
    seen = []
    for cycle in range(WARM + CYCLES):
        engine.start(batch, policies.sampling(2, ()), keys=[cycle, cycle])
        assert not engine.advance(max_steps=1)
        engine.weights_changed()
        assert engine.advance()
        assert [len(rollout.ids) for (rollout,) in engine.collect()] == [2, 2]
        if cycle >= WARM and cycle % 20 == 0:
            seen.append((cycle, process.num_fds(), threading.active_count(), process.memory_info().rss))
    cycles, handles, threads, memory = zip(*seen, strict=True)
    slope = _slope(cycles, memory)
    print(f"{CYCLES} cycles: handles {handles[-1] - handles[0]:+d}, threads {threads[-1] - threads[0]:+d}, ", end="")
    print(f"{slope:.0f} bytes of memory a cycle, {(memory[-1] - memory[0]) / 2**20:+.1f} MiB in all")
    assert len(set(handles)) == len(set(threads)) == 1
    assert slope < 4096


def _slope(x, y) -> float:
    """Of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)
