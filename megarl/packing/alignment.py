"""What the ranks that share a row ask of its shape."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    row: int = 1
    """A row's tokens are a multiple of this."""
    ring: int = 1
    """Ranks of a ring.  With more than one, each segment is a multiple of twice as many tokens, and the row has the
    order of `megarl.packing.rows.zigzag`."""

    @classmethod
    def of(cls, tensor_parallel: int, context_parallel: int, cp_comm_type: str) -> "Alignment":
        """For a layout by Megatron's names, with sequence parallelism or without."""
        return cls(tensor_parallel * context_parallel, context_parallel if cp_comm_type == "p2p" else 1)

    @property
    def segment(self) -> int:
        """What a segment's tokens are a multiple of."""
        return 2 * self.ring if self.ring > 1 else 1

    @property
    def multiple(self) -> int:
        """What a row's tokens are a multiple of."""
        return math.lcm(self.row, self.segment)


ANY_LENGTH = Alignment()
