"""Folders whose weights are not those of their config, and files that are damaged: one line each."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import UserError
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.models.weight_files import check_weights, parameter_shapes, stored_shapes
from tests import tiny
from tests.distributed import TP1, TP2_SP, Layout, lazy

policies = lazy("tests.policies")
build = lazy("megarl.models.build")

TIED = "qwen3, tied"
KINDS = [*FAMILIES, TIED]
MATRIX = {"llama": "model.layers.1.mlp.up_proj.weight", "qwen3": "model.layers.1.mlp.up_proj.weight"} | {
    "qwen2_5_vl": "visual.blocks.1.attn.qkv.weight",
    "qwen3_vl": "model.visual.blocks.1.attn.qkv.weight",
    "qwen3_vl_moe": "model.language_model.layers.1.mlp.experts.gate_up_proj",
    TIED: "model.embed_tokens.weight",
}
"""A weight that faults are made in: of a tower, of experts, of an embedding that two layers share."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family."""
    made = tmp_path_factory.mktemp("families")
    return {
        kind: tiny.write_family_checkpoint(made / str(number), kind.partition(",")[0], tied=kind == TIED)
        for number, kind in enumerate(KINDS)
    }


@pytest.fixture
def copy(folders, tmp_path):
    """A family's folder, to be damaged."""

    def copied(kind):
        return shutil.copytree(folders[kind], tmp_path / "damaged")

    return copied


def change(folder, function):
    weights = load_file(folder / "model.safetensors")
    function(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def refusal(folder) -> str:
    with pytest.raises(UserError) as refused:
        check_weights(folder)
    said = str(refused.value)
    assert "\n" not in said and len(said) < 600
    return said


def split(folder, files: int = 3) -> dict[str, str]:
    """The folder's weights in several files with an index; gives file by weight."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {name: f"model-{number % files}.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(place.values()):
        save_file({name: weights[name] for name in place if place[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_whole_folders_pass(folders, copy, kind):
    check_weights(folders[kind])
    folder = copy(kind)
    split(folder)
    check_weights(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_missing(copy, kind):
    folder = copy(kind)
    change(folder, lambda weights: weights.pop(MATRIX[kind]))
    assert refusal(folder).endswith(f"1 are missing ({MATRIX[kind]})")


@pytest.mark.parametrize("kind", KINDS)
def test_misshapen(copy, kind):
    folder = copy(kind)

    def cut(weights):
        weights[MATRIX[kind]] = weights[MATRIX[kind]][1:]

    change(folder, cut)
    whole = parameter_shapes(hf_config(str(folder), None))[MATRIX[kind]]
    assert f"1 have another shape ({MATRIX[kind]} {(whole[0] - 1, *whole[1:])} for {whole})" in refusal(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_extra(copy, kind):
    """Such as the heads of multi-token prediction."""
    folder = copy(kind)
    change(folder, lambda weights: weights.update({"mtp.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}))
    assert refusal(folder).endswith("1 are in no such model (mtp.layers.0.mlp.up_proj.weight)")


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_another_kind(copy, kind):
    """With a prefix, as adapters and wrappers write them: all are missing and all are too many; a few are named."""
    folder = copy(kind)
    weights = load_file(folder / "model.safetensors")
    save_file({f"base_model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    said = refusal(folder)
    assert f"{len(weights)} are missing (" in said and f"{len(weights)} are in no such model (base_model." in said
    assert said.count(f"and {len(weights) - 3} more") == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_reads_is_left_alone(copy, kind):
    """Frequencies that old releases saved, and the other end of tied embeddings."""
    folder = copy(kind)
    change(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    check_weights(folder)
    change(folder, lambda w: w.update({"lm_head.weight": torch.zeros(tiny.VOCABULARY, 64)}))
    check_weights(folder)


def test_no_output_layer(copy):
    """Where embeddings are not tied it is a weight like any other."""
    folder = copy("qwen3")
    change(folder, lambda weights: weights.pop("lm_head.weight"))
    assert refusal(folder).endswith("1 are missing (lm_head.weight)")


@pytest.mark.parametrize("indexed", [False, True])
def test_cut_short(copy, indexed):
    folder = copy("qwen3_vl")
    file = folder / (next(iter(split(folder).values())) if indexed else "model.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    assert refusal(folder).startswith(f"{file}: cut short, or no safetensors file: ")


def test_missing_file(copy):
    folder = copy("qwen3_vl")
    file = min(split(folder).values())
    (folder / file).unlink()
    assert refusal(folder) == f"{folder / 'model.safetensors.index.json'}: names {file}, which is not there"


def test_a_file_of_another_index(copy):
    folder = copy("qwen3_vl")
    place = split(folder)
    name = min(place)
    file = folder / place[name]
    save_file({n: t for n, t in load_file(file).items() if n != name}, file)
    expected = f"{file}: does not hold {name}, which model.safetensors.index.json says is there"
    assert refusal(folder) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b"}}',
    ],
)
def test_bad_index(copy, text):
    folder = copy("qwen3_vl")
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json: should have a weight_map" in refusal(folder)


def test_no_weights(copy):
    folder = copy("qwen3_vl")
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"{folder}: has no weights (*.safetensors)"


def test_a_weight_in_two_files(copy):
    folder = copy("qwen3_vl")
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    assert "both model.safetensors and other.safetensors hold " in refusal(folder)


# Against Bridge


def transposed(weights):
    """As Qwen published them."""
    for name in [name for name in weights if ".mlp.experts." in name]:
        weights[name] = weights[name].transpose(1, 2)


def one_by_one(weights):
    for name in [name for name in weights if ".mlp.experts." in name]:
        layer, _, part = name.rpartition(".")
        for number, matrix in enumerate(weights.pop(name)):
            halves = (
                {"down_proj": matrix}
                if part == "down_proj"
                else {half: rows for half, rows in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)}
            )
            weights |= {f"{layer}.{number}.{half}.weight": rows for half, rows in halves.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [TP1, TP2_SP], ids=str)
def test_bridge_reads_what_is_compared(ranks, folders, kind, layout):
    """Every weight that a folder has to have, and no other, is written into a parameter: what passes here leaves none
    as it was found in memory."""
    _reads(ranks, folders[kind], layout)


@pytest.mark.parametrize(
    "layout", [Layout(2, 1, expert_parallel=2), Layout(2, 2, True, expert_tensor_parallel=2)], ids=str
)
def test_bridge_reads_every_expert(ranks, folders, layout):
    _reads(ranks, folders["qwen3_vl_moe"], layout)


@pytest.mark.parametrize("form", [transposed, one_by_one])
def test_bridge_reads_other_forms_of_experts(ranks, copy, form):
    folder = copy("qwen3_vl_moe")
    change(folder, form)
    check_weights(folder)
    _reads(ranks, folder, TP1)


def test_an_expert_is_missing(copy):
    folder = copy("qwen3_vl_moe")
    change(folder, one_by_one)
    name = "model.language_model.layers.1.mlp.experts.2.up_proj.weight"
    change(folder, lambda weights: weights.pop(name))
    assert refusal(folder).endswith(f"1 are missing ({name})")


def _reads(ranks, folder, layout):
    answers = ranks.run(_read_by_bridge, folder, layout.sequence_parallel, **layout.job)
    assert set().union(*(names for names, _ in answers)) == set(stored_shapes(folder))
    assert all(left == [] for _, left in answers)


def _read_by_bridge(folder, sequence_parallel):
    """The names that Bridge reads on this rank, and the parameters that it writes nothing into."""
    policy = policies.policy(folder, sequence_parallel=sequence_parallel)
    for parameter in policy.model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    build.fill(policy, folder)
    left = [name for name, parameter in policy.model.named_parameters() if parameter.isnan().any()]
    names = set()
    for task in policy.bridge._model_bridge.build_conversion_tasks(policy.bridge.hf_pretrained, [policy.model.bridged]):
        read = task.mapping.hf_param
        names |= {read} if isinstance(read, str) else set(read.values())
    return names, left


@pytest.fixture
def broken(copy):
    folder = copy("qwen3_vl")
    change(folder, lambda weights: weights.pop(MATRIX["qwen3_vl"]))
    return folder


@pytest.mark.ranks(2, tensor_parallel=2)
def test_loading_refuses(checkpoint, broken):
    """On every rank, before anything is written: the policy's folder, and a reference's."""
    with pytest.raises(UserError, match="1 are missing"):
        policies.policy(broken)
    policy = policies.policy(checkpoint)
    kept = policies.weights(policy)
    with pytest.raises(UserError, match="1 are missing"):
        build.fill(policy, broken)
    assert all(torch.equal(weight, kept[name]) for name, weight in policies.weights(policy).items())
