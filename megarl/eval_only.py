"""`megarl.train RECIPE eval_only=true`: the policy that a run folder holds is evaluated, and nothing else is done."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.data.checked import Ranks
from megarl.evaluate import Accuracy, Evaluation, evaluate
from megarl.observe.files import replacing
from megarl.platform.watchdog import Watchdog
from megarl.recipe import Recipe
from megarl.run import HeldOut, build_held_out, start_ranks
from megarl.startup import fetch_models, prepare_data, refuse_other_recipe
from megarl.training import checkpoint_folder

_INITIAL = "initial"
"""In place of a checkpoint's name: the model that the run begins with."""


def evaluate_only(recipe: Recipe) -> None:
    """Evaluates the newest whole checkpoint of the run folder, or the initial model where there is none, with its
    weights as they are trained; prints a table and writes `evaluations/CHECKPOINT.json`.  Collective.

    Raises:
        UserError: the folder holds a run of another recipe, no whole checkpoint, or something in it does not fit.
    """
    folder, ranks = Path(recipe.run_dir), start_ranks()
    if dist.get_rank() == 0:
        refuse_other_recipe(recipe, folder)
        prepare_data(recipe)
    ranks.broadcast(None)  # the others wait for rank 0
    recipe = fetch_models(recipe, ranks).unquantized
    newest, said = checkpoint_folder.newest_whole(folder / "checkpoints", set_aside=False)
    minutes = recipe.limits.no_progress_minutes
    watchdog = Watchdog(minutes and 60 * minutes)
    with _initial_model(recipe, folder, ranks) as initial:
        held_out = build_held_out(recipe, folder, initial, newest, ranks, watchdog.alive)
    watchdog.start()
    found = evaluate(held_out, watchdog.alive)
    watchdog.stop()
    held_out.judges.close()
    if dist.get_rank() == 0:
        name = newest.name if newest else _INITIAL
        path = folder / "evaluations" / f"{name}.json"
        _write(path, name, held_out, found)
        console = Console()
        console = console if console.is_terminal else Console(width=160)
        for part in (*said, _heading(name, held_out, found), _table(found), f"written to {path}"):
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


@contextmanager
def _initial_model(recipe: Recipe, folder: Path, ranks: Ranks) -> Iterator[Path]:
    """The folder where the run's initial model lies or is to be made.  A folder in which no run has begun keeps
    nothing: a run of another recipe may begin there later."""
    begun = ranks.broadcast((folder / _INITIAL).exists())
    where = folder if begun or not recipe.model.random else folder / "eval_only.partial"
    if where != folder and dist.get_rank() == 0:
        shutil.rmtree(where, ignore_errors=True)  # of a command that was killed, and perhaps of another recipe
    dist.barrier()
    try:
        yield where
        dist.barrier()  # all ranks have read it
    finally:
        if where != folder and dist.get_rank() == 0:
            shutil.rmtree(where, ignore_errors=True)


def _write(path: Path, name: str, held_out: HeldOut, found: Evaluation) -> None:
    settings = held_out.recipe.evaluation
    values = {
        "checkpoint": name,
        "samples": settings.samples,
        "temperature": settings.temperature,
        "chance": held_out.chance,
        **asdict(found),
    }
    with replacing(path) as file:
        file.write(json.dumps(values, indent=1, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


def _heading(name: str, held_out: HeldOut, found: Evaluation) -> str:
    settings = held_out.recipe.evaluation
    how = f"{settings.samples} sample(s) of each at temperature {settings.temperature:g}"
    return f"{name}: {found.prompts} held-out prompts, {how} (chance {held_out.chance:.3f})"


def _table(found: Evaluation) -> Table:
    table = Table()
    table.add_column("prompts", overflow="fold")
    for column in found.overall:
        table.add_column(column, justify="right")

    def rows(kinds: dict[str, Accuracy]) -> None:
        table.add_section()
        for kind, accuracy in kinds.items():
            table.add_row(Text(kind), *(f"{value:.3f}" for value in accuracy.values()))

    rows({"all": found.overall})
    rows({f"source {source}": accuracy for source, accuracy in found.by_source.items()})
    rows({f"modality {modality}": accuracy for modality, accuracy in found.by_modality.items()})
    return table
