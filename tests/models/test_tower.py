"""What megarl's tower makes on the host, against Bridge's own."""

import pytest
import torch

from tests.distributed import lazy

policies = lazy("tests.policies")
bridge = lazy("megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model")

GRIDS = torch.tensor([[1, 4, 6], [3, 2, 8], [1, 4, 6], [2, 10, 2]])


@pytest.mark.ranks(1)
def test_as_bridge(checkpoint):
    """Angles, embeddings and segments of pictures and videos, bit for bit."""
    tower = policies.policy(checkpoint).model.vision_model
    stock = bridge.Qwen3VLVisionModel
    for method in ("rot_pos_emb", "fast_pos_embed_interpolate"):
        found, expected = getattr(tower, method)(GRIDS), getattr(stock, method)(tower, GRIDS)
        assert torch.equal(found, expected) and len(found) == int(GRIDS.prod(1).sum())
    found, expected = tower.build_packed_seq_params(GRIDS), stock.build_packed_seq_params(tower, GRIDS)
    assert torch.equal(found.cu_seqlens_q, expected.cu_seqlens_q) and found.cu_seqlens_q.dtype == torch.int32
    assert found.max_seqlen_q == 24 == int(expected.max_seqlen_q)
