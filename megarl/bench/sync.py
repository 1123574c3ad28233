"""The way of the weights from trainer to engine, in the recipe's layouts, against a plain copy of as many bytes."""

from pathlib import Path

from megarl.bench.ceilings import Ceilings
from megarl.bench.lines import Line, median_seconds, turns


def measure(recipe, options, ceilings: Ceilings) -> list[Line]:
    """Bytes and seconds of a sync, and its speed beside `torch.Tensor.copy_` on all ranks at once.  Collective.

    The floor: no byte moves where weights are shared; else each is read and written, with the bandwidth of all ranks.
    """
    import torch
    import torch.distributed as dist

    from megarl.run import build_parts, start_ranks
    from megarl.startup import fetch_models, prepare_checkpoint

    if dist.get_rank() == 0:
        Path(recipe.run_dir).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    recipe = fetch_models(recipe, start_ranks())
    parts = build_parts(recipe, prepare_checkpoint(recipe, Path(recipe.run_dir)))
    kind = "resharded" if recipe.own_engine else "shared"
    amount = Line(f"weights, {kind}: moved by a sync, all ranks", "MiB", parts.sync.bytes / 2**20)
    if not parts.sync.bytes:
        seconds = median_seconds(parts.sync, 20)
        return [amount, Line(f"weights, {kind}: a sync", "ms", 1e3 * seconds, floor=0.0)]
    received = list(parts.engine.model.parameters())
    kept = [tensor.detach().clone() for tensor in received]

    def copy():
        with torch.no_grad():
            for tensor, other in zip(received, kept, strict=True):
                tensor.copy_(other)
        dist.barrier()

    def sync():
        parts.sync()
        dist.barrier()

    seconds = *turns(sync, copy, options.rounds), ceilings.seconds(2 * parts.sync.bytes / dist.get_world_size())
    return [
        amount,
        Line(f"weights, {kind}: a sync, beside a copy", "ms", *(1e3 * s for s in seconds)),
        Line(f"weights, {kind}: speed, beside a copy", "GiB/s", *(parts.sync.bytes / s / 2**30 for s in seconds)),
    ]
