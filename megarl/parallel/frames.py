"""The vision tower under context parallelism: each rank encodes a part of a row's frames.

A picture is one frame, a video one for each of its temporal patches.  The tower does not mix frames, so they can be
dealt out one by one; whole videos would leave ranks idle in a row that holds one long video, which is what context
parallelism is for.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.packing.balance import even_parts
from megarl.parallel import context


def encode_spread(
    encode: Callable[[Tensor, Tensor], Tensor],
    pixels: Tensor,
    grids: Tensor,
    merge_size: int,
    cost: Callable[[int], float],
    nothing: Tensor,
) -> Tensor:
    """Features of a row's media in the row's order, on all context-parallel ranks, which hold the same row.

    Collective over these ranks, in the backward pass too: the rank that encoded a frame receives the sum of what all
    ranks' tokens say about its features.

    Args:
        encode: `(pixels, grids) -> [layers, media tokens, hidden]`, called on a rank that has frames.
        pixels: `[patches, patch features]` of the items one after another.
        grids: int64 `[items, 3]` on the CPU, (t, h, w) in patches; at least one.
        merge_size: side of the square of patches that becomes one media token.
        cost: of a frame by its number of patches; shares of even cost are made.
        nothing: `[layers, 0, hidden]`, what a rank without a frame gives.  Requires a gradient where the result of
            `encode` does, so that this rank takes part in the backward pass.
    """
    group = context.group()
    shapes = grids[:, 1:].repeat_interleave(grids[:, 0], 0)
    patches = shapes.prod(1).tolist()
    parts = even_parts([cost(n) for n in patches], group.size())
    mine = parts[group.rank()]
    if mine:
        frames = pixels.split(patches)
        # Frames of one shape in a row go as one video, whichever items they are of.
        kinds, counts = shapes[mine].unique_consecutive(dim=0, return_counts=True)
        features = encode(torch.cat([frames[i] for i in mine]), torch.cat([counts[:, None], kinds], 1))
    else:
        features = nothing
    tokens = [n // merge_size**2 for n in patches]
    gathered = context.gather_uneven(features, [sum(tokens[i] for i in part) for part in parts], 1, sum_gradients=True)
    places = torch.arange(sum(tokens)).split(tokens)
    order = torch.cat([places[i] for part in parts for i in part]).argsort()
    return gathered.index_select(1, order.to(gathered.device))
