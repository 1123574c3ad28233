"""`torchrun --nproc-per-node 2 -m tests.gpu.zero_copy FOLDER`: what lies on a GPU when context-parallel ranks sample.

Prints one JSON object: bytes of the weights, of gradients and KV cache, and of all else that is allocated before and
after a rollout.  A second copy of the weights would be among the latter.
"""

import json
import sys
from pathlib import Path

from megarl.platform import launch
from megarl.recipe import load_recipe

ROOT = Path(__file__).parents[2]
WIDE = [
    "model.config.text_config.hidden_size=1024",
    "model.config.text_config.intermediate_size=4096",
    "model.config.text_config.num_hidden_layers=12",
    "model.config.vision_config.out_hidden_size=1024",
    "model.dtype=bfloat16",
]


def main(folder: Path) -> None:
    overrides = [f"run_dir={folder / 'run'}", f"data.path={folder / 'data'}", *WIDE, "parallel.context_parallel_size=2"]
    recipe = load_recipe(str(ROOT / "recipes" / "mixed.yaml"), overrides)
    launch.start(recipe.parallel.sizes, recipe.seed, cuda_graphs=True)

    import torch
    import torch.distributed as dist

    from megarl.options import sampling_options
    from megarl.rollout.spread import generate_spread
    from megarl.run import build_run, start_ranks
    from megarl.startup import prepare_data

    ranks = start_ranks()
    if dist.get_rank() == 0:
        (folder / "run").mkdir(parents=True, exist_ok=True)
        prepare_data(recipe)
    ranks.broadcast(None)
    run = build_run(recipe, folder / "run", ranks)
    parameters = list(run.policy.model.parameters())
    weights = sum(p.nbytes for p in parameters)
    gradients = sum(b.grad_data.nbytes for b in run.trainer._ddp.buffers)
    cache = run.engine._context.memory_buffer.nbytes
    addresses = [p.data_ptr() for p in parameters]

    def other() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - weights - gradients - cache

    before = other()
    prompts, keys = run.step_prompts(1)
    groups = generate_spread(run.engine, prompts, sampling_options(recipe, run.stop_ids), 4, keys)
    sampled = sum(r.ids.numel() for group in groups for r in group)
    result = {
        "weights": weights,
        "gradients": gradients,
        "kv_cache": cache,
        "other_before": before,
        "other_after": other(),
        "sampled_tokens": sampled,
        "weights_stay": addresses == [p.data_ptr() for p in parameters],
    }
    results = ranks.gather(result)
    if dist.get_rank() == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(launch.command(lambda arguments: main(Path(arguments[0])), sys.argv[1:]))
