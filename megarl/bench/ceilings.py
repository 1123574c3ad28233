"""What this machine can do at best: how fast it copies and how fast it multiplies, measured in the run itself."""

from dataclasses import dataclass

from megarl.bench.lines import Line, timed
from megarl.platform.kernels import kernels

_REPEATS = 5
"""Calls in one measurement, so that their launches are hidden behind the first."""


@dataclass(frozen=True)
class Ceilings:
    """Of one rank."""

    bandwidth: float
    """Bytes a second, read and written ones together, of `torch.Tensor.copy_` between large tensors."""
    peak: float
    """Floating-point operations a second, a multiplication and its addition counting as two, of a large square
    product: bfloat16 on a GPU, float32 on a CPU."""

    def seconds(self, bytes: float = 0.0, operations: float = 0.0) -> float:
        """The least time for work that moves so many bytes and does so many operations, both at once (the roofline of
        Williams et al., 2009)."""
        return max(bytes / self.bandwidth, operations / self.peak)

    @property
    def lines(self) -> list[Line]:
        dtype = "bfloat16" if kernels().gpu else "float32"
        return [
            Line("ceiling: copy, bytes read and written", "GB/s", self.bandwidth / 1e9),
            Line(f"ceiling: matrix product, {dtype}", "TFLOP/s", self.peak / 1e12),
        ]


def measure_ceilings(rounds: int = 3) -> Ceilings:
    """The best of `rounds`, since other work on the machine can only lower them.  On several ranks at once: what each
    of them has beside the others."""
    import torch

    gpu = kernels().gpu
    device, dtype = kernels().device, torch.bfloat16 if gpu else torch.float32
    source = torch.zeros(2**30 if gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 8192 if gpu else 1024
    # Not zeros, with which a GPU takes less power and so clocks higher.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def copy():
        for _ in range(_REPEATS):
            target.copy_(source)

    def multiply():
        for _ in range(_REPEATS):
            torch.mm(left, right, out=product)

    copied, multiplied = (min(timed(call) for _ in range(rounds + 1)) / _REPEATS for call in (copy, multiply))
    return Ceilings(2 * source.nbytes / copied, 2 * size**3 / multiplied)
