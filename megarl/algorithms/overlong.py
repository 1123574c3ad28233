"""A penalty for completions that come close to the longest that they may be."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """0 up to `longest - buffer` tokens, from there falling in a line to -1 at `longest`.

    The soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13).

    Args:
        lengths: `[completions]`, in tokens.
        buffer: in tokens, from 1 to `longest`.

    Returns:
        float32 `[completions]`.
    """
    return -((lengths.float() - (longest - buffer)) / buffer).clamp(0, 1)
