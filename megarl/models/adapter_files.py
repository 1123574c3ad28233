"""Adapters as a folder that `peft.PeftModel.from_pretrained` loads over the checkpoint that they were trained on."""

import json
from pathlib import Path

import megarl.platform.prepare  # noqa: F401

import torch.distributed as dist
from megatron.bridge.models.conversion.peft_bridge import build_adapter_config_dict
from safetensors.torch import save_file

from megarl.data.folder import replaced_folder
from megarl.models.build import Policy, writing
from megarl.models.families import FAMILIES


def save_adapters(policy: Policy, folder: Path, base: str) -> None:
    """Writes the policy's adapters, in the type that they are trained in.  Collective; rank 0 writes, whole or not at
    all.

    Args:
        base: folder or name of the checkpoint, which the files name.

    Raises:
        UserError: a file cannot be written.
    """
    family = FAMILIES[policy.bridge.hf_pretrained.config.model_type]
    weights = {family.name_in_model(name): tensor.contiguous().clone() for name, tensor in policy.adapter_weights()}
    if dist.get_rank() == 0:
        # Whole names, since towers have layers whose names end alike.
        modules = sorted({name.rpartition(".lora_")[0] for name in weights})
        config = build_adapter_config_dict(policy.adapters.options.peft, modules, base_model_name_or_path=base)
        with writing(folder), replaced_folder(folder) as partial:
            state = {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
            save_file(state, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            (partial / "adapter_config.json").write_text(json.dumps(config, indent=2))
    dist.barrier()
