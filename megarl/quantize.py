"""`python -m megarl.quantize RUN`: the Hugging Face checkpoint of a run in eight bits, by nvidia-modelopt.

The model is transformers', in this process alone and without Megatron; calibrated, as rollouts are, on the first
training prompts.
"""

import argparse
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

from megarl.data.folder import replaced_folder
from megarl.errors import UserError
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.models.weight_files import check_weights
from megarl.recipe import QuantizationSection, Recipe, recipe_of_run


def quantize(arguments: list[str]) -> Path:
    """The command; returns the folder that it wrote.

    Raises:
        UserError: no such run or checkpoint, one that cannot be quantised, or nvidia-modelopt is not installed.
    """
    options = _options(arguments)
    recipe = recipe_of_run(options.run)
    source = options.checkpoint or options.run / "checkpoint"
    if not source.is_dir():
        raise UserError(f"{source} is not there: python -m megarl.export {options.run} writes a checkpoint of the run")
    config = hf_config(str(source), None, "checkpoint")
    if getattr(config.get_text_config(), "num_experts", None):
        raise UserError(f"{source}: a {config.model_type} is a mixture of experts, which are not quantised")
    check_weights(source)
    asked = recipe.rollout.quantization or QuantizationSection()
    format = options.format or asked.format
    folder = options.to or source.with_name(f"{source.name}-{format}")
    _write(recipe, source, folder, format, asked.calibration_prompts)
    print(f"{source} in {format}: {folder}")
    return folder


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megarl.quantize", description=__doc__, exit_on_error=False)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--checkpoint", type=Path, help="what megarl.export wrote; default: RUN/checkpoint")
    parser.add_argument("--format", choices=["fp8", "int8"], help="default: that of rollout.quantization, or fp8")
    parser.add_argument("--to", type=Path, help="folder to write; default: beside the checkpoint, with -FORMAT")
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        usage = "python -m megarl.quantize RUN [--checkpoint FOLDER] [--format fp8] [--to FOLDER]"
        raise UserError(f"{error}; usage: {usage}") from None


def _write(recipe: Recipe, source: Path, folder: Path, format: str, prompts: int) -> None:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of plugins for what is not installed
            from modelopt.torch import quantization
            from modelopt.torch.export import export_hf_checkpoint
    except ImportError as error:
        raise UserError(f"nvidia-modelopt cannot be imported ({error}): pip install 'megarl[quant]'") from None
    from megarl.media.encoder import Encoder
    from megarl.startup import load_processor, media_options
    from megarl.verify.cases import Case, first_prompts
    from megarl.verify.transformers_peer import Transformers

    config = hf_config(str(source), None)
    family = FAMILIES[config.model_type]
    processor = load_processor(source, family)
    rule = family.load("positions")(config)
    with Encoder(processor, rule, recipe.data.max_prompt_tokens, media_options(recipe)) as encoder:
        found = first_prompts(recipe.data, encoder, folder.with_name("downloads"), prompts)[:prompts]
    dtype = getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
    peer = Transformers(source, dtype, dtype)

    @torch.no_grad()
    def calibrate(_) -> None:
        for prompt in found:
            peer.logits(Case(prompt, torch.zeros(0, dtype=torch.long), torch.zeros(0), 0.0))

    preset = {"fp8": quantization.FP8_DEFAULT_CFG, "int8": quantization.INT8_DEFAULT_CFG}[format]
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        quantization.quantize(peer.model, preset, calibrate)
        with replaced_folder(folder) as partial:
            export_hf_checkpoint(peer.model, export_dir=partial)
            processor.save_pretrained(partial)


def main(arguments: list[str]) -> int:
    """The exit code."""
    try:
        quantize(arguments)
    except UserError as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
