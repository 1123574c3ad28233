"""The host memory of this process at its peak, as another process sees it.

Counted are anonymous and shared pages (`RssAnon`, `RssShmem` of /proc/PID/status).  Pages of files that are mapped,
as safetensors maps a checkpoint, are left out: they are the system's cache, which gives them up when memory is short.
That rules out `VmHWM` and `ru_maxrss`, which the kernel keeps without sampling.  A thread would not see the peaks of
calls that keep the interpreter's lock.
"""

import ctypes
import gc
import os
import select
import subprocess
import sys

_SAMPLE_SECONDS = 0.001


class PeakHostMemory:
    """Of what happens in its block, over what the process had before."""

    def __enter__(self) -> "PeakHostMemory":
        # Memory that was freed before and is used again would be missed.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = resident(os.getpid())
        self._sampler = subprocess.Popen(
            [sys.executable, "-I", __file__, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._sampler.stdout.readline()  # it samples
        return self

    def __exit__(self, *exception: object) -> None:
        last = resident(os.getpid())
        said, _ = self._sampler.communicate()
        self.bytes = max(last, int(said)) - self._before


def resident(pid: int) -> int:
    """Bytes of a process that are in memory and in no file."""
    with open(f"/proc/{pid}/status") as file:
        values = dict(line.split(":", 1) for line in file)
    return sum(int(values[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _sample(pid: int) -> None:
    """Until the standard input ends."""
    peak = resident(pid)
    print(flush=True)
    while not select.select([sys.stdin], [], [], _SAMPLE_SECONDS)[0]:
        peak = max(peak, resident(pid))
    print(peak)


if __name__ == "__main__":
    _sample(int(sys.argv[1]))
