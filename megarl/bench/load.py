"""Host memory of loading a checkpoint in the recipe's layout, against the weights that the rank is left with."""

from pathlib import Path

from megarl.bench.host_memory import PeakHostMemory
from megarl.bench.lines import Line


def measure(recipe, options) -> list[Line]:
    """Of each rank the peak, beside the bytes of its weights; and the largest tensor of the checkpoint.  Collective.

    Weights that go to a GPU leave the host, whose peak is then a fraction of them; that of the GPU is measured too.
    """
    import torch
    import torch.distributed as dist

    from megarl.models.build import load_policy
    from megarl.models.weight_files import stored_shapes
    from megarl.options import model_options
    from megarl.parallel.agreement import gathered
    from megarl.platform.kernels import kernels
    from megarl.run import start_ranks
    from megarl.startup import fetch_models, prepare_checkpoint

    if dist.get_rank() == 0:
        Path(recipe.run_dir).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    recipe = fetch_models(recipe, start_ranks())
    checkpoint, settings = prepare_checkpoint(recipe, Path(recipe.run_dir)), model_options(recipe)
    if kernels().gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with PeakHostMemory() as host:
        policy = load_policy(checkpoint, settings)
    peaks = {"host": host.bytes}
    if kernels().gpu:
        peaks["GPU"] = torch.cuda.max_memory_allocated() - before
    ranks = gathered((peaks, weight_bytes(policy.model)), dist.group.WORLD)
    largest = max(torch.Size(shape).numel() for shape in stored_shapes(checkpoint).values())
    return [
        Line(f"load, rank {rank}: {where} memory at its peak, beside its weights", "MiB", peak / 2**20, held / 2**20)
        for rank, (of_rank, held) in enumerate(ranks)
        for where, peak in of_rank.items()
    ] + [Line("load: largest tensor of the checkpoint", "MiB", largest * settings.dtype.itemsize / 2**20)]


def weight_bytes(model) -> int:
    """Of the parameters that this rank holds, each once."""
    return sum(parameter.nbytes for parameter in model.parameters())
