"""megarl.verify with something of the job broken on purpose.  The reference processes stay whole.

Imports Megatron where it is called: on the ranks of a pool, or in a process of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial


def media_blind_prefixes() -> None:
    """The prefix cache takes equal ids over different pictures for the same prefix."""
    from megarl.rollout import engine

    whole = engine.prefix_hashes

    def blind(prompt, *sizes):
        return whole(replace(prompt, items=(), media_mask=prompt.media_mask & False), *sizes)

    engine.prefix_hashes = blind


def louder_features() -> None:
    """Engine and trainer agree on vision features that are a thousandth too large."""
    from megarl.models.qwen3_vl.model import Qwen3VL

    whole = Qwen3VL.encode
    Qwen3VL.encode = lambda *arguments, **named: 1.001 * whole(*arguments, **named)


def one_segment() -> None:
    """The sequences of a row see each other."""
    from megarl.verify import job

    whole = job.pack
    job.pack = lambda *arguments: [replace(row, bounds=(0, row.bounds[-1])) for row in whole(*arguments)]


def no_hook() -> None:
    """The engine keeps what it computed from the old weights."""
    from megarl.rollout.engine import RolloutEngine

    RolloutEngine.weights_changed = lambda engine: None


def no_step() -> None:
    """The weights stay as they are."""
    from megarl.verify.job import Training

    Training.step = lambda *arguments: None


def _main(breakage: Callable[[], None], arguments: list[str]) -> int:
    import megarl.platform.prepare  # noqa: F401

    from megarl.verify.__main__ import main

    breakage()
    return main(arguments)


def main(breakage: str) -> Callable[[list[str]], int]:
    """The command, broken; for `tests.commands.fork`."""
    return partial(_main, globals()[breakage])


def prove(arguments: list[str], deepstack_summed: bool = True) -> list:
    """The checks of a command line, on the ranks of a job that has started in the layout that it names.

    Args:
        deepstack_summed: False leaves out the sum of the deepstack features' gradients over tensor-parallel ranks,
            which log-probabilities do not show.
    """
    from megarl.models.qwen3_vl import model
    from megarl.recipe import load_recipe
    from megarl.verify.__main__ import parse, prove

    options = parse(arguments)
    whole = model.copy_to_tensor_model_parallel_region
    if not deepstack_summed:
        model.copy_to_tensor_model_parallel_region = lambda features, group: features
    try:
        return prove(load_recipe(options.recipe, options.overrides), options, lambda text: None)[0]
    finally:
        model.copy_to_tensor_model_parallel_region = whole
