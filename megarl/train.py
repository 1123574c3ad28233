"""`torchrun --nproc-per-node N -m megarl.train RECIPE [key=value ...]`: the command and the loop."""

import sys

from megarl.check import refuse
from megarl.errors import UserError
from megarl.platform import launch
from megarl.platform.kernels import kernels
from megarl.recipe import load_recipe


def train(arguments: list[str]) -> None:
    """Runs a recipe from where its run folder stands to its end, or evaluates what the folder holds."""
    recipe = load_recipe(*_recipe_and_overrides(arguments))
    refuse(recipe, launch.world_size())
    launch.start(recipe.parallel.sizes, recipe.seed, recipe.rollout.cuda_graphs and kernels().gpu)

    if recipe.eval_only:
        from megarl.eval_only import evaluate_only

        return evaluate_only(recipe)

    from megarl.session import Session

    hours = recipe.limits.wall_clock_hours
    with launch.StopSignal(hours and 3600 * hours).caught() as stop, Session(recipe, stop) as session:
        run, timer = session.run, session.timer
        session.warm_up()
        for step in session.steps():
            with timer("rollout"):
                groups = session.sample(step)
                if groups is None:
                    session.stop()
                    break
                groups = run.balance(groups)
            with timer("reward"):
                batch = run.judge(groups)
                session.record(step, batch)
            with timer("score"):
                scored = session.policy_step.score(batch.samples)
                credit = session.policy_step.credit(batch.samples, scored)
            with timer("train"):
                learned = session.policy_step.update(batch.samples, scored, credit, step)
            with timer("sync"):
                run.sync()
            session.report(step, batch, scored, credit, learned)
        session.finish()


def _recipe_and_overrides(arguments: list[str]) -> tuple[str, list[str]]:
    if not arguments or "=" in arguments[0]:
        raise UserError("usage: torchrun --nproc-per-node N -m megarl.train RECIPE [key=value ...]")
    return arguments[0], arguments[1:]


if __name__ == "__main__":
    sys.exit(launch.command(train, sys.argv[1:]))
