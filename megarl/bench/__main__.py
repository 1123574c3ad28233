"""`python -m megarl.bench RECIPE [key=value ...]`: speed beside a floor and a peer, all measured in this run.

The floor is what the machine's ceilings allow, the bandwidth of a copy and the peak of a matrix product, which are
measured first; the gap is how many times the floor's cost megarl's is.  Peers: transformers' `generate` for the
engine, a plain PyTorch step (the same Hugging Face model, padded batch, torch's AdamW) for training, transformers'
processor for media, a plain copy of as many bytes for the weights' way to the engine; for parallelism one process, and
the same without the means that is measured.  Same weights, prompts, lengths and threads; each figure is the median of
several rounds in which the two take turns.  For the memory of loading a checkpoint the peer is the rank's weights
themselves, for that of a GPU in rollout and training (`--only memory`) what `megarl.check` predicts, and for a whole
GRPO step TRL's GRPOTrainer (`--only grpo`).  `--only sync` and `--only load` run on as many ranks as torchrun starts,
in the recipe's layouts; everything else on one.
"""

import argparse
import sys
from pathlib import Path

from megarl.bench.ceilings import measure_ceilings
from megarl.bench.report import as_json, print_table
from megarl.check import refuse
from megarl.errors import UserError
from megarl.platform import launch
from megarl.platform.kernels import kernels
from megarl.recipe import load_recipe

PARTS = ("policy", "media", "scaling", "grpo", "memory", "sync", "load")
_ON_ALL_RANKS = ("sync", "load")


def bench(arguments: list[str]) -> None:
    """Prints the table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="megarl.bench", description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--only", choices=PARTS, help="measure one part; default: all but grpo, memory, sync and load")
    parser.add_argument("--requests", default="1,16,64,512", help="concurrent requests, comma separated")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--prefill-tokens", type=int, help="tokens of prompts that are read; default: the recipe's step of the engine"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        help="made-up prompts of a GRPO step, of --prompt-tokens, each with --group completions of --new-tokens; "
        "default: the recipe's own prompts, group size and longest answer",
    )
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--train-tokens", type=int, default=4096, help="tokens of a training step")
    parser.add_argument("--pictures", type=int, default=32, help="files that are decoded and expanded")
    parser.add_argument("--videos", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="write traces of a generation and a training step, with summaries"
    )
    parser.add_argument("--json", action="store_true", help="with versions and the command")
    options = parser.parse_intermixed_args(arguments)
    recipe = load_recipe(options.recipe, options.overrides)
    if options.only in _ON_ALL_RANKS:
        refuse(recipe, launch.world_size())
    elif launch.world_size() > 1:
        raise UserError("megarl.bench measures one rank: start it without torchrun, or with --only sync or load")
    spread = []
    if options.only in (None, "scaling"):
        from megarl.bench import scaling  # while nothing else has the GPUs

        spread = scaling.measure(options)
    sizes = recipe.parallel.sizes if options.only in _ON_ALL_RANKS else {}
    launch.start(sizes, recipe.seed, recipe.rollout.cuda_graphs and kernels().gpu)
    ceilings = measure_ceilings(options.rounds)
    lines = [*ceilings.lines, *spread]
    if options.only == "sync":
        from megarl.bench import sync

        lines += sync.measure(recipe, options, ceilings)
    if options.only == "load":
        from megarl.bench import load

        lines += load.measure(recipe, options)
    if options.only in (None, "policy"):
        from megarl.bench import policy

        lines += policy.measure(recipe, options, ceilings)
    if options.only == "grpo":
        from megarl.bench import grpo

        lines += grpo.measure(recipe, options, ceilings)
    if options.only == "memory":
        from megarl.bench import memory

        lines += memory.measure(recipe, options)
    if options.only in (None, "media"):
        from megarl.bench import media

        lines += media.measure(recipe, options)
    if launch.rank():
        return
    print(as_json(lines, arguments)) if options.json else print_table(lines)


if __name__ == "__main__":
    sys.exit(launch.command(bench, sys.argv[1:]))
