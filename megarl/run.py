"""Everything that a run holds, built from its recipe."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.algorithms.objective import ObjectiveOptions
from megarl.data.digits import write_digits
from megarl.data.packing import TokenSequence
from megarl.data.prompt import Prompt
from megarl.data.prompts import check_rejected, load_prompts, write_rejections
from megarl.data.sampler import PromptSampler, shard
from megarl.environments.exact_match import ExactMatch
from megarl.errors import UserError
from megarl.media.encoder import Encoder
from megarl.media.item import EncodedPrompt
from megarl.models.build import ModelOptions, Policy, load_policy
from megarl.models.hf_config import hf_config
from megarl.models.qwen3_vl.positions import mrope_positions
from megarl.models.random_checkpoint import write_random_checkpoint
from megarl.models.tiny_processor import build_tiny_processor
from megarl.platform.kernels import kernels
from megarl.recipe import Recipe, load_recipe, save_recipe
from megarl.rollout.engine import EngineOptions, RolloutEngine
from megarl.rollout.sampling import SamplingOptions
from megarl.training.grpo import StepOptions
from megarl.training.trainer import OptimizerOptions, Trainer

GENERATORS = {"digits": write_digits}
"""What makes a data folder, by `data.generator`."""


@dataclass(eq=False)
class Run:
    recipe: Recipe
    folder: Path
    processor: Any
    policy: Policy
    trainer: Trainer
    engine: RolloutEngine
    encoder: Encoder
    environment: ExactMatch
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    stop_ids: tuple[int, ...]

    def __post_init__(self):
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.is_main = dist.get_rank() == 0
        self._sampler = PromptSampler(self.train_prompts, self.recipe.seed)
        self._answers = sorted({prompt.answer for prompt in self.train_prompts})

    @property
    def chance(self) -> float:
        """Held-out accuracy of the best constant answer, the most frequent one."""
        answers = [prompt.answer for prompt in self.test_prompts]
        return max(answers.count(a) for a in set(answers)) / len(answers)

    @property
    def merge_size(self) -> int:
        return self.policy.model.merge_size

    def step_prompts(self, step: int) -> tuple[list[EncodedPrompt], list[int]]:
        """This rank's prompts of an RL step, from 1, and the keys of their draws."""
        count = self.recipe.algorithm.prompts_per_step
        batch = list(enumerate(self._sampler.batch(step - 1, count)))
        mine = shard(batch, self.dp_rank, self.dp_size)
        keys = [draw_key(self.recipe.seed, "train", step, place) for place, _ in mine]
        return [self.encoder.encode(prompt) for _, prompt in mine], keys

    def sampling(self) -> SamplingOptions:
        """How training rollouts are sampled."""
        r = self.recipe.rollout
        return SamplingOptions(r.max_new_tokens, self.stop_ids, r.temperature, r.top_p, r.top_k)

    def warmup_sequences(self, step: int) -> list[TokenSequence]:
        """This rank's supervised targets of a warm-up step, from 1."""
        warmup = self.recipe.warmup
        batch = PromptSampler(self.train_prompts, self.recipe.seed + 1).batch(step - 1, warmup.batch_size)
        answers = [prompt.answer for prompt in batch]
        if warmup.answers == "random":
            generator = torch.Generator().manual_seed(draw_key(self.recipe.seed, "warmup", step, 0) >> 1)
            chosen = torch.randint(len(self._answers), (len(batch),), generator=generator)
            answers = [self._answers[i] for i in chosen.tolist()]
        pairs = shard(list(zip(batch, answers, strict=True)), self.dp_rank, self.dp_size)
        return [self._target(prompt, answer) for prompt, answer in pairs]

    def _target(self, prompt: Prompt, answer: str) -> TokenSequence:
        ids = self.processor.tokenizer.encode(answer, add_special_tokens=False, split_special_tokens=True)
        return TokenSequence(self.encoder.encode(prompt), torch.tensor([*ids, self.stop_ids[0]]))

    def text(self, ids: torch.Tensor) -> str:
        """A completion's text without its stop token."""
        return self.processor.tokenizer.decode([i for i in ids.tolist() if i not in self.stop_ids])


def draw_key(seed: int, purpose: str, step: int, place: int) -> int:
    """63 bits that decide the draws of one prompt's rollouts: the same under every layout and after a resume."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prepare_folder(recipe: Recipe) -> Path:
    """Makes the run folder and keeps the recipe in it, or finds the same recipe there.  On rank 0 only.

    Raises:
        UserError: the folder holds a run of another recipe.
    """
    folder = Path(recipe.run_dir)
    kept = folder / "recipe.yaml"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_recipe(recipe, kept)
        return folder
    before, now = load_recipe(kept).model_dump(), recipe.model_dump()
    changed = [f"{k}: {old!r} -> {new!r}" for k, old, new in _differences(before, now)]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"run_dir = {recipe.run_dir!r} holds a run of another recipe ({'; '.join(changed[:3])}{more}): "
            "give another run_dir, or remove it"
        )
    return folder


def _differences(before: Any, now: Any, key: str = ""):
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now


def prepare_data(recipe: Recipe) -> None:
    """Generates the data folder where the recipe says how and it is not there.  On rank 0 only."""
    folder = Path(recipe.data.path)
    if folder.exists():
        return
    if recipe.data.generator is None:
        raise UserError(f"data.path: folder '{folder}' does not exist, and data.generator is not set")
    GENERATORS[recipe.data.generator](folder)


def prepare_checkpoint(recipe: Recipe, folder: Path) -> Path:
    """The Hugging Face folder that the run starts from; writes it for random weights.  Rank 0 writes.

    Raises:
        UserError: config and tokenizer do not fit together.
    """
    model = recipe.model
    if model.path is not None:
        return Path(model.path)
    initial = folder / "initial"
    if dist.get_rank() == 0 and not initial.exists():
        processor = folder / "processor" if model.processor is None else Path(model.processor)
        if model.tiny_processor is not None:
            build_tiny_processor(processor, **model.tiny_processor.model_dump())
        loaded = load_processor(processor)
        config = hf_config(None, model.config)
        config.image_token_id, config.video_token_id = loaded.image_token_id, loaded.video_token_id
        config.vision_start_token_id = loaded.vision_start_token_id
        config.vision_end_token_id = loaded.vision_end_token_id
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            setattr(config.text_config, name, getattr(loaded.tokenizer, name))
        write_random_checkpoint(initial, config, loaded, model.init_std, model.scale_output_projections, recipe.seed)
    dist.barrier()
    return initial


def load_processor(folder: Path) -> Any:
    """A transformers processor from its folder.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"model.processor: cannot load '{folder}': {' '.join(str(error).split())}") from None


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


def _load_prompts(recipe: Recipe, folder: Path, split: str, encoder: Encoder) -> list[Prompt]:
    file = Path(recipe.data.path) / f"{split}.jsonl"
    prompts, rejections = load_prompts(file, check_prompt=encoder.encode)
    if rejections and dist.get_rank() == 0:
        write_rejections(rejections, folder / f"rejected_{split}.jsonl")
    check_rejected(file, prompts, rejections, recipe.data.max_rejected_fraction)
    return prompts


def model_options(recipe: Recipe) -> ModelOptions:
    """How this machine builds the recipe's model."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(recipe.model.dtype)
    return ModelOptions(
        dtype=dtype or (torch.bfloat16 if kernels().gpu else torch.float32),
        tensor_model_parallel_size=recipe.parallel.tensor_model_parallel_size,
        sequence_parallel=recipe.parallel.sequence_parallel,
        recompute=recipe.training.recompute == "full",
        freeze=tuple(recipe.model.freeze),
        cuda_graphs=recipe.rollout.cuda_graphs and kernels().gpu,
    )


def build_run(recipe: Recipe, folder: Path) -> Run:
    """Data, model, engine and trainer of this rank.  Collective; the run folder is there.

    Raises:
        UserError: something in the recipe, the data or the checkpoint does not fit.
    """
    initial = prepare_checkpoint(recipe, folder)
    processor = load_processor(Path(recipe.model.processor) if recipe.model.processor else initial)
    stop_ids = stop_tokens(processor.tokenizer, recipe.rollout.stop)
    encoder = Encoder(processor, mrope_positions, recipe.data.max_prompt_tokens)
    train_prompts = _load_prompts(recipe, folder, "train", encoder)
    test_prompts = _load_prompts(recipe, folder, "test", encoder)[: recipe.evaluation.max_prompts]
    policy = load_policy(initial, model_options(recipe))
    trainer = Trainer(policy.model, recipe.rollout.temperature or 1.0, recipe.training.log_prob_chunk)
    engine = RolloutEngine(policy.model, engine_options(recipe))
    environment = ExactMatch(recipe.environment.format, recipe.environment.format_reward)
    return Run(
        recipe,
        folder,
        processor,
        policy,
        trainer,
        engine,
        encoder,
        environment,
        train_prompts,
        test_prompts,
        stop_ids,
    )


def engine_options(recipe: Recipe) -> EngineOptions:
    """Sizes of the engine."""
    r = recipe.rollout
    return EngineOptions(
        max_requests=r.max_requests,
        max_tokens_per_step=r.max_tokens_per_step,
        max_sequence_length=recipe.data.max_prompt_tokens + r.max_new_tokens,
        kv_cache_gb=r.kv_cache_gb,
        block_size_tokens=r.block_size_tokens,
        enable_prefix_caching=r.enable_prefix_caching,
        enable_chunked_prefill=r.enable_chunked_prefill,
        cuda_graphs=r.cuda_graphs and kernels().gpu,
    )


def step_options(recipe: Recipe) -> StepOptions:
    """How a batch of rollouts is trained on."""
    a = recipe.algorithm
    return StepOptions(
        objective=ObjectiveOptions(a.clip_low, a.clip_high, a.kl_coefficient, a.entropy_coefficient),
        epochs=a.epochs,
        minibatches=a.minibatches,
        old_log_probs=a.old_log_probs,
        tokens_per_row=recipe.training.tokens_per_row,
    )


def warmup_optimizer(recipe: Recipe) -> OptimizerOptions:
    """Constant learning rate; everything else as in RL."""
    o, w = recipe.optimizer, recipe.warmup
    return OptimizerOptions(
        learning_rate=w.learning_rate,
        total_updates=w.steps,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        weight_decay=o.weight_decay,
        clip_grad=o.clip_grad,
    )


def rl_optimizer(recipe: Recipe) -> OptimizerOptions:
    """The recipe's optimizer section, over all updates of the RL phase."""
    return OptimizerOptions(total_updates=recipe.total_updates, **recipe.optimizer.model_dump())
