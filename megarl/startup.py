"""What must lie on disk before a run is built: its folder, its data, the checkpoint that it starts from."""

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.data.checked import Ranks
from megarl.data.generators.registry import generate
from megarl.errors import UserError, one_line
from megarl.media.expand import media_tokens
from megarl.media.options import ImageOptions, MediaOptions, VideoOptions
from megarl.models import hub
from megarl.models.families import FAMILIES, Family
from megarl.models.hf_config import hf_config
from megarl.models.random_checkpoint import write_random_checkpoint
from megarl.models.text.processor import TextProcessor
from megarl.models.tiny_processor import build_tiny_processor, build_tiny_tokenizer
from megarl.models.weight_files import check_weights
from megarl.recipe import Recipe, TinyProcessor, load_recipe, save_recipe

_RECIPE = "recipe.yaml"


_MAY_CHANGE = (
    # how long, how it is watched and kept
    "steps",
    "eval_only",
    "run_dir",
    "checkpoint",
    "limits",
    "observe",
    "evaluation.every",
    "evaluation.at_start",
    # how the machine does it: the same to rounding
    "parallel",
    "training.tokens_per_row",
    "training.recompute",
    "training.log_prob_chunk",
    "training.offload",
    "rollout.max_requests",
    "rollout.max_tokens_per_step",
    "rollout.kv_cache_gb",
    "rollout.block_size_tokens",
    "rollout.enable_prefix_caching",
    "rollout.enable_chunked_prefill",
    "rollout.vision_cache_gb",
    "rollout.patches_per_pass",
    "rollout.cuda_graphs",
    "rollout.parallel",
    "rollout.verify_sync",
    "model.lora.merge_for_rollouts",
    "data.media_cache_gb",
    "data.media_threads",
    "environment.timeout_seconds",
    "environment.workers",
    # which Megatron is installed: without pins another one goes on too
    "pins",
    # where the data lies: what it is has a hash of its own
    "allow_dataset_change",
    "data.path",
    "data.media_folders",
    "data.generator",
    "data.generator_options",
    "data.max_rejected_fraction",
)
"""Keys, and sections, in which a run may go on with another value."""


def refuse_other_recipe(recipe: Recipe, folder: Path) -> None:
    """Makes the run folder where it is not there.  On rank 0 only.

    Raises:
        UserError: the folder cannot be written into, or holds a run of another recipe.
    """
    may_change = (*_MAY_CHANGE, *["data"] * recipe.allow_dataset_change, *["evaluation"] * recipe.eval_only)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir = {recipe.run_dir!r} cannot be made: {error.filename}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"run_dir = {recipe.run_dir!r} cannot be written into")
    kept = folder / _RECIPE
    if not kept.exists():
        return
    before, now = load_recipe(kept).model_dump(), recipe.model_dump()
    changed = [
        f"{key}: {old!r} -> {new!r}"
        for key, old, new in _differences(before, now)
        if not any(key == other or key.startswith(f"{other}.") for other in may_change)
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"run_dir = {recipe.run_dir!r} holds a run of another recipe ({'; '.join(changed[:3])}{more}): "
            "give another run_dir, or remove it"
        )


def keep_recipe(recipe: Recipe, folder: Path) -> None:
    """Writes the resolved recipe, once the run could be built: a start that was refused leaves none."""
    partial = folder / f"{_RECIPE}.partial"
    save_recipe(recipe, partial)
    partial.replace(folder / _RECIPE)


def _differences(before: Any, now: Any, key: str = ""):
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now


def architecture(config: Any) -> dict[str, Any]:
    """What a Hugging Face config says of the model, as JSON has it."""
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}


def refuse_other_architecture(before: dict[str, Any], now: dict[str, Any]) -> None:
    """
    Raises:
        UserError: what `architecture` says is not what it said of the run's checkpoint.
    """
    for key, old, new in _differences(before, now):
        if old is not None:  # a new release of transformers adds keys of its own
            raise UserError(f"the run's checkpoint is of another architecture: {key}: {old!r} -> {new!r}")


def prepare_data(recipe: Recipe) -> None:
    """Generates the data folder where it is not there; `megarl.check` has refused a recipe that does not say how.
    On rank 0 only."""
    folder = Path(recipe.data.path)
    if not folder.exists():
        generate(recipe.data.generator, folder, recipe.data.generator_options)


def fetch_models(recipe: Recipe, ranks: Ranks) -> Recipe:
    """The recipe with a folder in place of each name on the Hugging Face hub.  Collective; one rank of each node
    fetches what its node's cache does not have, at the commit that rank 0 has found.

    Raises:
        UserError: the hub does not give it, and the cache does not have it.
    """
    given = {
        ("model", "path"): recipe.model.path,
        ("model", "processor"): recipe.model.processor,
        ("algorithm", "reference"): recipe.algorithm.reference,
    }
    with_weights = [("algorithm", "reference"), *[("model", "path")] * (not recipe.model.random)]
    names = ranks.broadcast({place: path for place, path in given.items() if path is not None and hub.on_hub(path)})

    def folders(cached: bool = False) -> dict[tuple[str, str], Path]:
        return {
            place: hub.fetch(name, ".".join(place), weights=place in with_weights, cached=cached)
            for place, name in names.items()
        }

    if ranks.rank == 0:
        names = {place: hub.at(names[place], folder.name) for place, folder in folders().items()}
    names = ranks.broadcast(names)
    if int(os.environ["LOCAL_RANK"]) == 0:
        folders()
    ranks.gather(None)  # every node has them
    changed: dict[str, dict[str, str]] = {}
    for (section, key), folder in folders(cached=True).items():
        changed.setdefault(section, {})[key] = str(folder)
    sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in changed.items()}
    return recipe.model_copy(update=sections)


def prepare_checkpoint(recipe: Recipe, folder: Path) -> Path:
    """The Hugging Face folder that the run starts from; writes it for random weights.  Rank 0 writes.

    Raises:
        UserError: the weights of a folder that is given do not fit its config.
    """
    model = recipe.model
    if not model.random:
        check_weights(Path(model.path))
        return Path(model.path)
    initial = folder / "initial"
    if dist.get_rank() == 0 and not initial.exists():
        processor = Path(model.processor or model.path or folder / "processor")
        config = hf_config(model.path, model.config)
        family = FAMILIES[config.model_type]
        if model.tiny_processor is not None:
            _build_tiny(model.tiny_processor, processor, family)
        loaded = load_processor(processor, family)
        if family.media:
            config.image_token_id, config.video_token_id = loaded.image_token_id, loaded.video_token_id
            for name in ("vision_start", "vision_end"):
                setattr(config, f"{name}_token_id", loaded.tokenizer.convert_tokens_to_ids(f"<|{name}|>"))
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            setattr(config.get_text_config(), name, getattr(loaded.tokenizer, name))
        write_random_checkpoint(initial, config, loaded, model.init_std, model.scale_output_projections, recipe.seed)
    dist.barrier()
    return initial


def _build_tiny(tiny: TinyProcessor, folder: Path, family: Family) -> None:
    if family.media:
        build_tiny_processor(folder, **tiny.model_dump(), processor=family.processor)
    else:
        build_tiny_tokenizer(folder, tiny.alphabet, tiny.vocab_size)


def load_processor(folder: Path, family: Family) -> Any:
    """A transformers processor from its folder, or a `TextProcessor` for a family that reads text alone.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoProcessor, AutoTokenizer

    try:
        if not family.media:
            return TextProcessor(AutoTokenizer.from_pretrained(folder))
        return AutoProcessor.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"model.processor: cannot load '{folder}': {one_line(error)}") from None


def media_options(recipe: Recipe) -> MediaOptions:
    """How media is prepared."""
    d = recipe.data
    return MediaOptions(
        image=ImageOptions(**d.image.model_dump()),
        video=VideoOptions(**d.video.model_dump()),
        cache_bytes=int(d.media_cache_gb * 2**30),
        threads=d.media_threads,
    )


def check_tokens(config: Any, processor: Any) -> None:
    """Refuses a tokenizer that the model was not built for.

    Raises:
        UserError: an id that the model has no embedding for, or a media token whose id is another one in the config.
    """
    tokenizer, rows = processor.tokenizer, config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise UserError(
            f"the tokenizer gives {tokenizer.convert_ids_to_tokens(largest)!r} the id {largest}: the model's "
            f"embedding has {rows} rows (vocab_size in config.json)"
        )
    for kind, token in media_tokens(processor).items():
        expected = getattr(config, f"{kind}_token_id")
        if token != expected:
            raise UserError(
                f"the tokenizer gives {getattr(processor, f'{kind}_token')!r} the id {token}: config.json has "
                f"{kind}_token_id = {expected}"
            )


def processor_identity(folder: Path) -> str:
    """SHA-256 of all that decides what a processor makes of a prompt: its files, weights left out, and the versions of
    what reads them and decodes media."""
    digest = hashlib.sha256()
    for package in ("transformers", "tokenizers", "pillow", "av"):
        digest.update(f"{package} {version(package)}\n".encode())
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def stop_tokens(tokenizer, stop: list[str]) -> tuple[int, ...]:
    """Ids of the tokens that end an answer; the tokenizer's end-of-sequence token where none is named."""
    if not stop:
        if tokenizer.eos_token_id is None:
            raise UserError("rollout.stop: the tokenizer has no end-of-sequence token, so name the stop tokens")
        return (tokenizer.eos_token_id,)
    vocabulary = tokenizer.get_vocab()
    for token in stop:
        if token not in vocabulary:
            raise UserError(f"rollout.stop: {token!r} is not a token of the tokenizer")
    return tuple(vocabulary[token] for token in stop)
