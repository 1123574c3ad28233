"""The weights that a Hugging Face folder holds, against those that its config asks for.

Bridge leaves a parameter for which it finds no weight as it was found in memory, and says so in a warning at most.
Only headers are read here: names, shapes and the ends of files.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import UserError, one_line
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Shape = tuple[int, ...]
_INDEX = "model.safetensors.index.json"
_SHOWN = 3
_COMPUTED = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb)\.inv_freq$")
"""Frequencies that older releases of transformers saved; they follow from the config."""
_ONE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


def check_weights(folder: Path) -> None:
    """Refuses a folder whose weights are not exactly those of its config.

    Bridge takes experts in any of three forms: all of a layer in one tensor, as transformers' model has them; that with
    its matrices transposed, as Qwen published them; one by one.  Not compared are rotary frequencies, and an output
    layer under tied embeddings, which transformers does not read either.

    Raises:
        UserError: weights are missing, have another shape or belong to no part of the model; a file of them is not
            there or damaged.
    """
    config = hf_config(str(folder), None)
    expected, found = parameter_shapes(config), stored_shapes(folder)
    if any(_ONE_EXPERT.search(name) for name in found):
        expected = _expert_by_expert(expected)
    extra = [name for name in found.keys() - expected.keys() - {"lm_head.weight"} if not _COMPUTED.search(name)]
    shared = found.keys() & expected.keys()
    other = [f"{n} {found[n]} for {expected[n]}" for n in shared if not _fits(n, found[n], expected[n])]
    kinds = {
        "are missing": list(expected.keys() - found.keys()),
        "have another shape": other,
        "are in no such model": extra,
    }
    said = [f"{len(names):,} {kind} ({_a_few(names)})" for kind, names in kinds.items() if names]
    if said:
        raise UserError(f"{folder}: of the weights of the {config.model_type} in config.json, {'; '.join(said)}")


def _fits(name: str, found: Shape, expected: Shape) -> bool:
    transposed = ".mlp.experts." in name and len(found) == 3 and (found[0], found[2], found[1]) == expected
    return found == expected or transposed


def _expert_by_expert(shapes: dict[str, Shape]) -> dict[str, Shape]:
    split = {}
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".")
        if not layer.endswith(".mlp.experts"):
            split[name] = shape
            continue
        experts, rows, columns = shape
        parts = {"down_proj": ["down_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}[part]
        for expert in range(experts):
            split |= {f"{layer}.{expert}.{one}.weight": (rows // len(parts), columns) for one in parts}
    return split


def _a_few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more


def parameter_shapes(config: "PreTrainedConfig") -> dict[str, Shape]:
    """Name in a checkpoint and shape of every weight that transformers' model of this config has; of tied ones one."""
    import torch

    family = FAMILIES[config.model_type]
    with torch.device("meta"):
        model = family.hf_class._from_config(config)
    return {family.name_in_checkpoint(name): tuple(weight.shape) for name, weight in model.named_parameters()}


def stored_shapes(folder: Path) -> dict[str, Shape]:
    """Name and shape of every weight in a folder: of the files that its index names, else of all safetensors files.

    Raises:
        UserError: there is none; the index cannot be read, or names a file that is not there or does not hold what the
            index says; a file is cut short or of another format; two files have the same weight.
    """
    index = _index(folder)
    files = {folder / name for name in index.values()} if index else set(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: has no weights (*.safetensors)")
    shapes: dict[str, Shape] = {}
    place: dict[str, str] = {}
    for file in sorted(files):
        for name, shape in _shapes(file).items():
            if index and index.get(name) != file.name:
                continue  # read by nobody
            if name in place:
                raise UserError(f"{folder}: both {place[name]} and {file.name} hold {name}, and there is no {_INDEX}")
            shapes[name], place[name] = shape, file.name
    if lost := sorted(index.keys() - shapes.keys()):
        raise UserError(f"{folder / index[lost[0]]}: does not hold {lost[0]}, which {_INDEX} says is there")
    return shapes


def _index(folder: Path) -> dict[str, str]:
    """File by weight; empty where the folder has no index."""
    file = folder / _INDEX
    if not file.exists():
        return {}
    try:
        files = json.loads(file.read_text())["weight_map"]
        good = bool(files) and all(Path(name).name == name for name in files.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        good = False
    if not good:
        raise UserError(f"{file}: should have a weight_map with the name of a file for each weight")
    for name in sorted(set(files.values())):
        if not (folder / name).is_file():
            raise UserError(f"{file}: names {name}, which is not there")
    return files


def _shapes(file: Path) -> dict[str, Shape]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cut short, or no safetensors file: {one_line(error)}") from None
