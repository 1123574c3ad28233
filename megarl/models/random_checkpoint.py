"""A Hugging Face checkpoint with random weights, for runs that start from nothing.

Starting from nothing then differs from starting from a checkpoint in nothing but the folder: every layout
loads the same weights, and transformers can read what the run began with.
"""

import math
from pathlib import Path

import torch
from transformers import PretrainedConfig

from megarl.data.folder import whole_folder
from megarl.models.named_generator import named_generator
from megarl.models.shard_writer import ShardWriter
from megarl.models.weight_files import Shape, parameter_shapes

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
    tensor is drawn from its own generator, seeded by `seed` and its name, and written before all are drawn.
    """
    if folder.exists():
        return
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    std = text.initializer_range if std is None else std
    with whole_folder(folder) as partial:
        writer = ShardWriter(partial)
        for name, shape in parameter_shapes(config).items():
            scale = std
            if scale_output and name.endswith(_RESIDUAL_OUTPUTS):
                scale /= math.sqrt(2 * (vision.depth if "visual." in name else text.num_hidden_layers))
            writer.add(name, _draw(name, shape, scale, seed))
        writer.close()
        config.save_pretrained(partial)
        processor.save_pretrained(partial)


def _draw(name: str, shape: Shape, std: float, seed: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return torch.randn(shape, generator=named_generator(seed, name)) * std
