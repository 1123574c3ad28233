"""A Hugging Face checkpoint with random weights, for runs that start from nothing.

Starting from nothing then differs from starting from a checkpoint in nothing but the folder: every layout
loads the same weights, and transformers can read what the run began with.
"""

import hashlib
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from megarl.data.folder import whole_folder
from megarl.models.weight_files import parameter_shapes

_RESIDUAL_OUTPUTS = (
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
    "mlp.experts.down_proj",
    "attn.proj.weight",
    "mlp.linear_fc2.weight",
)


def write_random_checkpoint(folder: Path, config: PretrainedConfig, processor, std, scale_output: bool, seed: int):
    """Writes weights, config and processor; does nothing where `folder` exists.

    Matrices and embeddings are normal with standard deviation `std` (the config's `initializer_range` where
    it is None); those that write into the residual stream are divided by sqrt(2 x layers) of their tower if
    `scale_output` (GPT-2's rule; Radford et al. 2019, section 2.3).  Norm weights are 1, biases 0.  Each
    tensor is drawn from its own generator, seeded by `seed` and its name.
    """
    if folder.exists():
        return
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    std = text.initializer_range if std is None else std
    weights = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            weights[name] = fill(shape)
            continue
        scale = std
        if scale_output and name.endswith(_RESIDUAL_OUTPUTS):
            scale /= math.sqrt(2 * (vision.depth if "visual." in name else text.num_hidden_layers))
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        weights[name] = torch.randn(shape, generator=generator) * scale
    with whole_folder(folder) as partial:
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(partial)
        processor.save_pretrained(partial)
