"""Bridge's vision tower of a Qwen3-VL, with what depends on the grids alone made on the host.

Bridge asks the GPU for each side of each grid, and each layer for the longest frame: the host then waits for the GPU,
and the GPU for the host.
"""

from functools import lru_cache

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.platform.to_device import to_device


class Tower(Qwen3VLVisionModel):
    """`forward` takes `grid_thw` int64 `[items, 3]` on the CPU.  Patches lie in the order of the squares that become
    media tokens."""

    def rot_pos_emb(self, grid_thw: Tensor) -> Tensor:
        """Angles `[patches, head size / 2]` of row and column."""
        places = torch.cat([_places(h, w, self.spatial_merge_size).repeat(t, 1) for t, h, w in grid_thw.tolist()])
        table = self.rotary_pos_emb(int(grid_thw[:, 1:].max()))
        return table[to_device(places, table.device)].flatten(1)

    def fast_pos_embed_interpolate(self, grid_thw: Tensor) -> Tensor:
        """`[patches, hidden]`: the learned square of embeddings, bilinearly at each patch."""
        table, side = self.pos_embed.weight, self.num_grid_per_side
        parts = [
            [part.repeat(1, t) for part in _corners(h, w, side, self.spatial_merge_size)]
            for t, h, w in grid_thw.tolist()
        ]
        indices, weights = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        corners = self.pos_embed(to_device(indices, table.device))
        a, b, c, d = corners * to_device(weights.to(table.dtype), table.device)[..., None]
        return a + b + c + d

    def build_packed_seq_params(self, grid_thw: Tensor) -> PackedSeqParams:
        """Each frame is a segment."""
        lengths = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
        bounds = to_device(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(), self.pos_embed.weight.device)
        longest = int(lengths.max())
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )


def _in_squares(values: Tensor, merge: int) -> Tensor:
    """`[..., height, width]` to `[..., patches]`."""
    *rest, height, width = values.shape
    squares = values.view(*rest, height // merge, merge, width // merge, merge)
    return squares.transpose(-2, -3).flatten(-4)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept must serve a training forward too
def _places(height: int, width: int, merge: int) -> Tensor:
    """int64 `[patches, 2]`: row and column."""
    grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return _in_squares(torch.stack(grid), merge).t()


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _corners(height: int, width: int, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Of each patch the nearest of `side` x `side` embeddings, int64 `[4, patches]`, and their weights, float32."""
    rows, columns = (torch.linspace(0, side - 1, n) for n in (height, width))
    (top, bottom, down), (left, right, across) = (
        (x.int(), (x.int() + 1).clip(max=side - 1), x - x.int()) for x in (rows, columns)
    )
    indices = [r[:, None].long() * side + c[None] for r in (top, bottom) for c in (left, right)]
    weights = [r[:, None] * c[None] for r in (1 - down, down) for c in (1 - across, across)]
    return _in_squares(torch.stack(indices), merge), _in_squares(torch.stack(weights), merge)
