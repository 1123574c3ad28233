"""`python -m megarl.export RUN [--step N]`: a checkpoint of a run as a Hugging Face checkpoint, read back once written;
with `--adapter` what its LoRA has learned alone, for peft.

One process holds the whole model; under torchrun the ranks share it as the run's recipe says.
"""

import argparse
import sys
from pathlib import Path

from megarl.errors import UserError
from megarl.models.families import FAMILIES, Family
from megarl.models.hf_config import family_of, hf_config
from megarl.platform import launch
from megarl.recipe import Recipe, check_world, recipe_of_run


def export(arguments: list[str]) -> None:
    """The command.

    Raises:
        UserError: no such run or checkpoint, a damaged one, or what was written does not load.
    """
    options = _options(arguments)
    run = options.run
    recipe = recipe_of_run(run, _ALONE if launch.world_size() == 1 else [])
    if options.adapter:
        _refuse_more_than_adapters(recipe)
    check_world(recipe, launch.world_size())
    launch.start(recipe.parallel.sizes, recipe.seed, cuda_graphs=False)

    import torch.distributed as dist

    from megarl.models.adapter_files import save_adapters
    from megarl.models.build import load_policy, save_checkpoint
    from megarl.options import model_options
    from megarl.run import start_ranks
    from megarl.startup import fetch_models, load_processor, prepare_checkpoint
    from megarl.training import checkpoint

    saved = _checkpoint(run / "checkpoints", options.phase, options.step)
    recipe = fetch_models(_of_type(recipe, checkpoint.dtype(saved)), start_ranks())
    initial = prepare_checkpoint(recipe, run)
    policy = load_policy(initial, model_options(recipe))
    checkpoint.load_weights(saved, policy.model)
    folder = options.to or run / "exports" / (saved.name + "-adapter" * options.adapter)
    if options.adapter:
        save_adapters(policy, folder, str(initial.absolute()))
        if dist.get_rank() == 0:
            print(f"{saved} as an adapter for peft: {folder}")
        return
    family = family_of(initial)
    processor = load_processor(Path(recipe.model.processor) if recipe.model.processor else initial, family)
    save_checkpoint(policy, folder, processor)
    if dist.get_rank() == 0:
        _refuse_unloadable(folder, family)
        print(f"{saved} as a Hugging Face checkpoint: {folder}")


_ALONE = [f"parallel.{name}=1" for name in ("tensor_model_parallel_size", "context_parallel_size")]
_ALONE += [f"parallel.{name}=1" for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")]
_ALONE += ["parallel.sequence_parallel=false", "rollout.parallel=null"]


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megarl.export", description=__doc__, exit_on_error=False)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--phase", choices=["rl", "warm-up"], default="rl")
    parser.add_argument("--to", type=Path, help="folder to write; default: RUN/exports/CHECKPOINT")
    parser.add_argument("--adapter", action="store_true", help="write the LoRA adapters alone, for peft")
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        usage = "python -m megarl.export RUN [--step N] [--phase rl] [--to FOLDER] [--adapter]"
        raise UserError(f"{error}; usage: {usage}") from None


def _refuse_more_than_adapters(recipe: Recipe) -> None:
    if recipe.model.lora is None:
        raise UserError("--adapter: the run trained no adapters (model.lora = null): export it without")
    media = FAMILIES[hf_config(recipe.model.path, recipe.model.config).model_type].media
    for part in ("vision", "projector"):
        if media and part not in recipe.model.freeze:
            raise UserError(
                f"--adapter: the run trained the {part} too (model.freeze = {recipe.model.freeze}), which is in no "
                "adapter: export it without"
            )


def _checkpoint(folder: Path, phase: str, step: int | None) -> Path:
    from megarl.training.checkpoint_folder import latest, name_of, names

    found = latest(folder) if step is None else folder / name_of(phase, step)
    if found is None or not found.is_dir():
        have = ", ".join(names(folder)) or "none"
        asked = "a checkpoint" if step is None else name_of(phase, step)
        raise UserError(f"{folder} does not have {asked}; it has {have}")
    return found


def _of_type(recipe: Recipe, dtype: str) -> Recipe:
    """As the run trained it, whatever machine exports it."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def _refuse_unloadable(folder: Path, family: Family) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    _, found = family.hf_class.from_pretrained(folder, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found.get(kind):
            raise UserError(f"transformers does not load {folder}: {kind}: {sorted(map(str, found[kind]))[:3]}")


if __name__ == "__main__":
    sys.exit(launch.command(export, sys.argv[1:]))
