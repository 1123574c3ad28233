"""A mixture of experts on disk: Hugging Face -> Megatron -> Hugging Face, random weights, and what is refused."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from megarl.errors import UserError
from megarl.models.hf_config import hf_config
from megarl.models.random_checkpoint import write_random_checkpoint
from tests import tiny
from tests.distributed import TP1, Layout, lazy
from tests.models.test_build import _export, same_tensors

policies = lazy("tests.policies")

LAYOUTS = [
    TP1,
    Layout(2, 1, expert_parallel=2),
    Layout(2, 2, sequence_parallel=True, expert_tensor_parallel=2),
    Layout(2, 2, sequence_parallel=True, expert_parallel=2),
    Layout(2, 1, context_parallel=2, expert_parallel=2),
    Layout(4, 1, expert_parallel=2),
]


@pytest.fixture(scope="module")
def published(mixture_checkpoint, tmp_path_factory):
    """The same weights as the published checkpoints store them: each expert's matrices transposed."""
    folder = tmp_path_factory.mktemp("published") / "checkpoint"
    shutil.copytree(mixture_checkpoint, folder)
    file = folder / "model.safetensors"
    weights = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    assert sum(tensor.ndim == 3 for name, tensor in weights.items() if ".experts." in name) == 6
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "layout, stored",
    [(layout, "as published") for layout in LAYOUTS] + [(LAYOUTS[i], "as transformers saves") for i in (0, 1, 3)],
    ids=str,
)
def test_round_trip(ranks, mixture_checkpoint, published, prompts, tmp_path, layout, stored):
    """Every tensor bit for bit under the same name, in the order of its dimensions that was read; transformers
    answers as before."""
    source = published if stored == "as published" else mixture_checkpoint
    ranks.run(_export, source, tmp_path / "out", layout.sequence_parallel, **layout.job)
    same_tensors(tmp_path / "out", source)
    ours, theirs = tiny.Reference(tmp_path / "out"), tiny.Reference(mixture_checkpoint)
    for name in ("text", "both"):
        assert torch.equal(ours.greedy(prompts[name], 6), theirs.greedy(prompts[name], 6))


@pytest.mark.ranks(1)
def test_both_ways_of_storing_are_one_model(mixture_checkpoint, published):
    ours, theirs = (policies.policy(folder).model.state_dict() for folder in (mixture_checkpoint, published))
    tensors = {name: value for name, value in ours.items() if isinstance(value, torch.Tensor)}
    assert len([name for name in tensors if "experts" in name]) == 3 * 4 * 2
    assert all(torch.equal(value, theirs[name]) for name, value in tensors.items())


@pytest.mark.ranks(1)
def test_no_loss_but_the_policys(mixture_checkpoint):
    """Nothing balances the experts and no token is dropped: what is trained is the objective alone, whatever padding
    a row has."""
    config = policies.policy(mixture_checkpoint).model.config
    assert config.moe_router_load_balancing_type == "none"
    assert not config.moe_aux_loss_coeff and not config.moe_z_loss_coeff
    assert config.moe_expert_capacity_factor is None and not config.moe_router_enable_expert_bias
    assert config.moe_router_dtype == "fp32"


def test_random_weights(mixture_checkpoint, prompts, tmp_path):
    """Experts are drawn one like the other and apart, scaled where they write into the residual stream; transformers
    reads them."""
    processor = AutoProcessor.from_pretrained(mixture_checkpoint)
    write_random_checkpoint(tmp_path / "out", tiny.mixture_config(processor), processor, 0.5, True, 3)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    experts = {name: tensor for name, tensor in weights.items() if ".experts." in name}
    assert len(experts) == 6
    for name, tensor in experts.items():
        expected = 0.5 / math.sqrt(6) if name.endswith("down_proj") else 0.5
        for expert in tensor:
            assert float(expert.std()) == pytest.approx(expected, rel=0.1), name
        assert not torch.equal(tensor[0], tensor[1])
    assert all(float(weights[name].std()) > 0.4 for name in weights if name.endswith("mlp.gate.weight"))
    model = tiny.Reference(tmp_path / "out").model
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_parameters())


@pytest.mark.parametrize("key, value", [("mlp_only_layers", [1]), ("decoder_sparse_step", 2)])
def test_dense_layers_are_refused(mixture_checkpoint, tmp_path, key, value):
    """A model some of whose layers have no experts: one line that names the key and its value."""
    values = json.loads((mixture_checkpoint / "config.json").read_text())
    values["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError) as refused:
        hf_config(str(tmp_path), None)
    assert f"text_config.{key} = {value}" in str(refused.value) and "\n" not in str(refused.value)
