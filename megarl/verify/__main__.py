"""`torchrun --nproc-per-node N -m megarl.verify RECIPE [key=value ...]`: proves a recipe's numbers on this machine.

- engine = trainer: log-probabilities of the tokens that the engine sampled, for each modality of the data;
- trainer = transformers: the same tokens, scored and differentiated by transformers from the same checkpoint;
- this layout = one rank: log-probabilities, loss and every gradient against one process alone;
- packed = unpacked: the recipe's rows against one sequence a row;
- before and after a sync: an optimizer step, and engine = trainer again.

Exit code 0: all passed; 1: one failed; 2: a mistake in the arguments.  Nothing is written to the recipe's run folder.
`megarl.verify.compare` says what is allowed and why.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from megarl.check import refuse
from megarl.errors import UserError
from megarl.platform import launch
from megarl.platform.kernels import kernels
from megarl.recipe import Recipe, load_recipe
from megarl.verify.compare import CHECKS, Check
from megarl.verify.table import as_json, failed, print_table


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message} (see python -m megarl.verify --help)")


def verify(arguments: list[str]) -> list[Check]:
    """Prints the table, or JSON with `--json`, on rank 0, and returns its lines on all ranks."""
    options = parse(arguments)
    recipe = load_recipe(options.recipe, options.overrides).unquantized  # what is rounded is not the same
    refuse(recipe, launch.world_size())
    launch.start(recipe.parallel.sizes, recipe.seed, recipe.rollout.cuda_graphs and kernels().gpu)

    import torch.distributed as dist

    main = launch.rank() == 0
    # Where a program reads what is printed, Bridge's progress bar goes to the other stream.
    aside = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with aside, _saying(main and not options.json) as say:
        checks, dtype = prove(recipe, options, say)
    if main:
        sizes = recipe.parallel.model_dump(exclude_defaults=True)
        if recipe.rollout.parallel is not None:
            sizes |= {f"rollout.{name}": value for name, value in recipe.rollout.parallel.model_dump().items()}
        about = {
            "recipe": options.recipe,
            "machine": str(kernels()),
            "ranks": launch.world_size(),
            "parallel": sizes,
            "dtype": dtype,
        }
        if options.json:
            print(as_json(checks, **about), flush=True)
        else:
            layout = ", ".join([f"{about['ranks']} rank(s)", *(f"{name} = {size}" for name, size in sizes.items())])
            print_table(checks, f"{options.recipe}: {layout}; {about['dtype']}; {about['machine']}")
    dist.barrier()  # the first rank that ends with a failure ends the others: not before all is printed
    return checks


def prove(recipe: Recipe, options: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Check], str]:
    """The checks, and the type that was computed in, on all ranks of a job that has started."""
    from megarl.verify.checks import Verification
    from megarl.verify.job import Job

    with _working_folder(recipe) as folder:
        say("building the policy")
        job = Job(recipe, folder, options.prompts, options.rollouts, options.new_tokens)
        checks = Verification(job, folder, options.only, say).run()
    return checks, str(job.dtype).removeprefix("torch.")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Recipe, overrides and options of a command line."""
    parser = _Parser(prog="megarl.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--prompts", type=int, default=2, help="of each modality; default: 2")
    parser.add_argument("--rollouts", type=int, default=4, help="of each prompt; default: 4")
    parser.add_argument("--new-tokens", type=int, default=32, help="bound of a rollout's length; default: 32")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"some of {','.join(CHECKS)}; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_intermixed_args(arguments)
    for name in ("prompts", "rollouts", "new_tokens"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} = {getattr(options, name)}: should be at least 1")
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in CHECKS]:
        raise UserError(f"--only = {unknown[0]!r}: should be some of {','.join(CHECKS)}, separated by commas")
    options.only = tuple(name for name in CHECKS if name in chosen)
    return options


@contextmanager
def _working_folder(recipe: Recipe):
    """A folder that all ranks see and that is gone afterwards: a temporary one, or, where the job has several nodes,
    one beside the run folder, which they share."""
    import torch.distributed as dist

    from megarl.parallel.agreement import from_first

    def make() -> str:
        parent = None if launch.world_size() == int(os.environ["LOCAL_WORLD_SIZE"]) else Path(recipe.run_dir).parent
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="megarl-verify-", dir=parent)

    folder = Path(from_first(make))
    try:
        yield folder
        dist.barrier()  # nobody reads it any more
    finally:
        if launch.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _saying(aloud: bool):
    """Yields what shows the user on a terminal that the command is at work, and at what."""
    from rich.console import Console

    console = Console(quiet=not aloud)
    with console.status("") as status:
        yield status.update


def main(arguments: list[str]) -> int:
    """The exit code of this rank."""
    checks: list[Check] = []
    code = launch.command(lambda given: checks.extend(verify(given)), arguments)
    return code or int(failed(checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
