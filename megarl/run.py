"""Everything that a run holds, built from its recipe."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import megarl.platform.prepare  # noqa: F401

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.conversation import Conversations, Limits
from megarl.data.answers import AnswerPool, best_constants
from megarl.data.checked import Ranks
from megarl.data.curriculum import CurriculumSampler, SolveRates
from megarl.data.download import Downloads
from megarl.data.files import find_split
from megarl.data.ledger import Ledger
from megarl.data.media_values import MediaReader
from megarl.data.prompts import PromptSet, load_prompts
from megarl.data.sampler import PromptSampler, shard
from megarl.environments.in_process import InProcess
from megarl.environments.registry import EnvironmentSpecs, refusal_of_answer
from megarl.environments.replies import Replies
from megarl.environments.score import Score
from megarl.environments.workers import Workers
from megarl.errors import MediaError, PromptError, UserError
from megarl.media.encoder import Encoder, fingerprint
from megarl.media.item import EncodedPrompt
from megarl.memory import kv_cache_that_fits
from megarl.models.build import Policy, empty_copy, load_policy
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.models.weight_files import check_weights
from megarl.options import (
    engine_model_options,
    engine_options,
    model_options,
    reward_options,
)
from megarl.packing.cost import CostModel
from megarl.packing.rows import TokenSequence
from megarl.parallel.agreement import from_first, gathered
from megarl.parallel.engines import EngineGroups, resharded_groups, shared_groups
from megarl.platform.kernels import kernels
from megarl.recipe import Recipe
from megarl.rewards import Batch, Judge, Scorer
from megarl.rollout.engine import Generate, Rollout, RolloutEngine
from megarl.rollout.exchange import balance
from megarl.rollout.quantized import Quantization
from megarl.rollout.sampling import SamplingOptions, named_key
from megarl.rollout.spread import generate_spread
from megarl.rollout.sync import ReshardedWeights, SharedWeights, WeightSync
from megarl.startup import (
    architecture,
    check_tokens,
    load_processor,
    media_options,
    prepare_checkpoint,
    processor_identity,
    refuse_other_architecture,
    stop_tokens,
)
from megarl.training import checkpoint
from megarl.training.checkpoint_folder import latest
from megarl.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class Parts:
    """The policy, and who works with its weights."""

    policy: Policy
    trainer: Trainer
    engine: RolloutEngine
    sync: WeightSync
    """From trainer to engine."""
    data_parallel_ranks: range
    """Of the trainer, whose prompts this rank's engine and its peers sample."""
    same_prompts: dist.ProcessGroup
    """All ranks that have these prompts, and all rollouts of them."""
    quantization: Quantization | None
    """Of the engine's weights."""


@dataclass(eq=False)
class HeldOut:
    """Held-out prompts, who answers them and who judges."""

    recipe: Recipe
    processor: Any
    engine: RolloutEngine
    encoder: Encoder
    judges: InProcess | Workers
    replies: Replies | None
    """Who replies to completions, where a rollout is a conversation."""
    test_prompts: PromptSet
    stop_ids: tuple[int, ...]

    def __post_init__(self):
        self.scorer = Scorer(self.judges.score, self.text)

    def conversed(
        self, groups: list[list[Rollout]], keys: Sequence[int], generate: Generate, same: dist.ProcessGroup
    ) -> list[list[Rollout]] | None:
        """The groups with each conversation at its end, where the recipe has any; see `Conversations`.

        Args:
            groups: of first completions.
            same: the ranks that have the same groups.
        """
        if self.replies is None:
            return groups
        r, turns = self.recipe.rollout, self.recipe.environment.dialogue.max_turns
        return Conversations(
            self.replies,
            Limits(turns, r.max_sequence_tokens, r.max_new_tokens),
            self.text,
            self.encoder.extend,
            generate,
            self.judges.components,
            lambda make: from_first(make, same),
        )(groups, keys)

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Of what this rank's engine has sampled alone.  Collective over the ranks of the engine."""
        return self.scorer(rollouts, self.engine.groups.tp)[1]

    @cached_property
    def chance(self) -> float:
        """Held-out accuracy of the best constant answer to each source."""
        return best_constants(self.test_prompts.sources, self.test_prompts.answers)

    def text(self, ids: torch.Tensor) -> str:
        """A completion's text without its stop token."""
        return self.processor.tokenizer.decode([i for i in ids.tolist() if i not in self.stop_ids])


@dataclass(eq=False)
class Run(HeldOut):
    folder: Path
    parts: Parts
    train_prompts: PromptSet

    def __post_init__(self):
        super().__post_init__()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.policy, self.trainer, self.sync = self.parts.policy, self.parts.trainer, self.parts.sync
        curriculum, seed = self.recipe.algorithm.curriculum, self.recipe.seed
        self.solve_rates = curriculum and SolveRates(len(self.train_prompts), curriculum.discount)
        """Of the training prompts, where these are drawn by them."""
        self._sampler = (
            CurriculumSampler(self.train_prompts, seed, self.solve_rates, curriculum.share)
            if curriculum
            else PromptSampler(self.train_prompts, seed)
        )
        # An order of its own, beside the steps' and the warm-up's.
        self._other_sampler = PromptSampler(self.train_prompts, (self.recipe.seed + 2) % 2**32)
        self._judge = Judge(self.scorer, reward_options(self.recipe))
        self.imbalance = 1.0
        """Of the last step: the largest training cost of a data-parallel rank over the mean."""
        self._answers = AnswerPool(self.train_prompts.sources, self.train_prompts.answers)

    @cached_property
    def cost(self) -> CostModel:
        """By which rows and ranks are balanced."""
        model = self.policy.model
        return CostModel.of(model.language_model.config, model.tower_config)

    @property
    def merge_size(self) -> int:
        return self.policy.model.merge_size

    def calibrate(self) -> None:
        """Fits the quantised engine's scales to the present weights and the first training prompts.  Collective."""
        quantization, engine = self.parts.quantization, self.engine
        count = min(self.recipe.rollout.quantization.calibration_prompts, len(self.train_prompts))
        mine = [number for number in range(count) if self.samples_here(number)]
        prompts, sampling = self._encode(mine), SamplingOptions(1, self.stop_ids)
        quantization.calibrate(lambda: generate_spread(engine, prompts, sampling, 1, mine))
        engine.weights_changed()  # what it keeps was computed before

    def step_prompts(self, step: int) -> tuple[list[EncodedPrompt], list[int]]:
        """The prompts of an RL step, from 1, that this rank's engine and its peers sample, and the keys of their
        draws."""
        mine = self._sampled_here(step)
        keys = [draw_key(self.recipe.seed, "train", step, place) for place, _ in mine]
        encoded = self._encode([index for _, index in mine])
        self.prefetch_step(step + 1)
        return encoded, keys

    def prefetch_step(self, step: int) -> None:
        """Begins to prepare the media of the prompts that are sampled here, if there is such a step and its prompts are
        known."""
        if step <= self.recipe.steps and self._sampler.knows(step - 1):
            self.encoder.prefetch([self.train_prompts[index] for _, index in self._sampled_here(step)])

    def other_prompts(self, step: int, number: int, positions: Sequence[int]) -> tuple[list[EncodedPrompt], list[int]]:
        """Prompts to draw in place of those at these positions of what is sampled here for an RL step, and the keys of
        their draws; `number` counts the times that it is done, from 0."""
        algorithm, seed = self.recipe.algorithm, self.recipe.seed
        turn = (step - 1) * algorithm.resample_rounds + number
        indices = self._other_sampler.indices(turn, algorithm.prompts_per_step)
        here = self._sampled_here(step)
        places = [here[position][0] for position in positions]
        keys = [draw_key(seed, f"resample {number}", step, place) for place in places]
        return self._encode([indices[place] for place in places]), keys

    def numbered_prompts(self, numbers: Sequence[int]) -> list[EncodedPrompt]:
        """The prompts of the run's groups, counted in the order in which they begin."""
        return self._encode([index for number in numbers for index in self._sampler.indices(number, 1)])

    def prefetch_numbers(self, numbers: Sequence[int]) -> None:
        """Begins to prepare the media of those of the run's groups that are sampled here."""
        indices = [self._sampler.indices(number, 1)[0] for number in numbers if self.samples_here(number)]
        self.encoder.prefetch([self.train_prompts[index] for index in indices])

    def samples_here(self, number: int) -> bool:
        """Whether this rank's engine and its peers sample the run's group of that number."""
        return number % self.dp_size in self.parts.data_parallel_ranks

    def offers(self, number: int) -> bool:
        """Whether, of the ranks that have the run's group of that number, this one offers it to those that train."""
        return number % self.dp_size == self.dp_rank

    def offered(self, step: int, groups: list[list[Rollout]]) -> dict[int, list[Rollout]]:
        """Of the groups that were sampled here for a step, this data-parallel rank's, by their places in its batch."""
        mine = {place for place, _ in self._step_share(step, self.dp_rank)}
        sampled = [place for place, _ in self._sampled_here(step)]
        return {place: group for place, group in zip(sampled, groups, strict=True) if place in mine}

    def record(self, step: int, batch: Batch, dropped: Sequence[tuple[int, list[Rollout]]]) -> None:
        """Takes what a step's completions say about their prompts into the solve rates, where these are kept: then the
        next step's prompts are known, and their media begins to be prepared.  Collective.

        Args:
            batch: what this rank trains on.
            dropped: groups that others have replaced, with their positions in what was sampled here.
        """
        if self.solve_rates is None:
            return
        # Engines may sample for several data-parallel ranks, and several engines for one: each rank counts its share.
        first = self.parts.data_parallel_ranks.index(self.dp_rank)
        size = self.recipe.algorithm.prompts_per_step // self.dp_size
        judged = batch, self.judge([group for position, group in dropped if position // size == first])
        mine: list[tuple[int, bool]] = [
            (rollout.prompt.prompt.index, score.correct)
            for one in judged
            for rollout, score in zip(one.rollouts, one.scores, strict=True)
        ]
        tried: Counter[int] = Counter()
        right: Counter[int] = Counter()
        for outcomes in gathered(mine, parallel_state.get_data_parallel_group()):
            for index, correct in outcomes:
                tried[index] += 1
                right[index] += correct
        self.solve_rates.update(step, {index: (right[index], count) for index, count in tried.items()})
        self.prefetch_step(step + 1)

    def balance(self, groups: Mapping[int, list[Rollout]]) -> list[list[Rollout]]:
        """The groups that this rank trains on, of those that each offers, by their places in the step's batch: of each
        minibatch as many as every rank, of even cost."""
        algorithm = self.recipe.algorithm
        kept, self.imbalance = balance(
            list(groups.values()),
            list(groups),
            [rollouts[0].prompt.prompt.index for rollouts in groups.values()],
            algorithm.prompts_per_step,
            algorithm.minibatches,
            self.cost,
            lambda index: self.encoder.encode(self.train_prompts[index]),
            self.encoder.extend,
        )
        return kept

    def judge(self, groups: list[list[Rollout]]) -> Batch:
        """Of the groups that this rank trains on.  Collective over the ranks that train on the same rows."""
        return self._judge(groups, parallel_state.get_tensor_and_context_parallel_group())

    def constant(self, groups: list[list[Rollout]]) -> torch.Tensor:
        """`Batch.constant` of groups that were sampled here.  Collective over the ranks that have the same prompts."""
        return self._judge(groups, self.parts.same_prompts).constant

    def _sampled_here(self, step: int) -> list[tuple[int, int]]:
        """The shares of one data-parallel rank after another."""
        return [one for rank in self.parts.data_parallel_ranks for one in self._step_share(step, rank)]

    def _step_share(self, step: int, dp_rank: int) -> list[tuple[int, int]]:
        """A data-parallel rank's part of an RL step, places in the batch and the prompts' indices: an equal share of
        each minibatch, so that minibatches are the same under any layout."""
        algorithm = self.recipe.algorithm
        batch = list(enumerate(self._sampler.indices(step - 1, algorithm.prompts_per_step)))
        size = len(batch) // algorithm.minibatches
        minibatches = [batch[start : start + size] for start in range(0, len(batch), size)]
        return [one for minibatch in minibatches for one in shard(minibatch, dp_rank, self.dp_size)]

    def _encode(self, indices: Sequence[int]) -> list[EncodedPrompt]:
        """Training prompts by index.

        Raises:
            UserError: what was accepted when the run began cannot be used any more.
        """
        prompts = [self.train_prompts[index] for index in indices]
        self.encoder.prefetch(prompts)
        try:
            encoded = [self.encoder.encode(prompt) for prompt in prompts]
        except (MediaError, PromptError) as error:
            raise UserError(f"{error}: it was accepted at the start, and files must not change during a run") from error
        for one in encoded:
            accepted = self.train_prompts.fingerprint(one.prompt.index)
            if accepted is not None and accepted != fingerprint(one):
                raise UserError(
                    f"training data, row {one.prompt.row}: its tokens or pixels are not those accepted at the "
                    "start, and files must not change during a run"
                )
        return encoded

    def warmup_sequences(self, step: int) -> list[TokenSequence]:
        """This rank's supervised targets of a warm-up step, from 1."""
        warmup, prompts = self.recipe.warmup, self.train_prompts
        sampler = PromptSampler(prompts, self.recipe.seed + 1)
        indices = sampler.indices(step - 1, warmup.batch_size)
        following = sampler.indices(step, warmup.batch_size) if step < warmup.steps else []
        answers = [prompts.answers[index] for index in indices]
        if warmup.answers == "random":
            generator = torch.Generator().manual_seed(draw_key(self.recipe.seed, "warmup", step, 0) >> 1)
            answers = self._answers.draw([prompts.sources[index] for index in indices], generator)
        indices, following, answers = (
            shard(values, self.dp_rank, self.dp_size) for values in (indices, following, answers)
        )
        encoded = self._encode(indices)
        self.encoder.prefetch([prompts[index] for index in following])
        return [self._target(*pair) for pair in zip(encoded, answers, strict=True)]

    def _target(self, prompt: EncodedPrompt, answer: str) -> TokenSequence:
        ids = [*_answer_ids(self.processor.tokenizer, answer), self.stop_ids[0]]
        return TokenSequence(prompt, torch.tensor(ids))


def build_run(recipe: Recipe, folder: Path, ranks: Ranks, alive: Callable[[], None] = lambda: None) -> Run:
    """Data, model, engine and trainer of this rank.  Collective; the run folder is there, `ranks` are `start_ranks()`.
    `alive` is called now and then while rewards are waited for.

    Raises:
        UserError: something in the recipe, the data or the checkpoint does not fit.
    """
    if recipe.algorithm.reference is not None:
        check_weights(Path(recipe.algorithm.reference))
    initial = prepare_checkpoint(recipe, folder)
    reader = _reader(recipe, initial)
    train_prompts = _load_prompts(recipe, folder, "train", reader, ranks)
    if recipe.warmup:
        _refuse_long_answers(recipe, reader.processor.tokenizer, train_prompts)
    if recipe.algorithm.curriculum:
        _refuse_few_prompts(recipe, len(train_prompts))
    test_prompts = _load_prompts(recipe, folder, "test", reader, ranks)[: recipe.evaluation.max_prompts]
    judges, replies = build_judges(recipe, alive), build_replies(recipe, alive)
    parts = build_parts(recipe, initial)
    return Run(
        recipe=recipe,
        processor=reader.processor,
        engine=parts.engine,
        encoder=reader.encoder,
        judges=judges,
        replies=replies,
        test_prompts=test_prompts,
        stop_ids=reader.stop_ids,
        folder=folder,
        parts=parts,
        train_prompts=train_prompts,
    )


def build_held_out(
    recipe: Recipe,
    folder: Path,
    initial: Path,
    saved: Path | None,
    ranks: Ranks,
    alive: Callable[[], None] = lambda: None,
) -> HeldOut:
    """What evaluates a policy that is not trained: no optimizer, no gradients, no training prompts.  Collective.

    Args:
        folder: of the run; nothing is written into it but media that rows name by URL.
        initial: where the model that the run begins with lies, or is made.
        saved: the checkpoint whose weights are evaluated; None: the initial ones.
        alive: called now and then while rewards are waited for.

    Raises:
        UserError: something in the recipe, the data or the checkpoint does not fit.
    """
    initial = prepare_checkpoint(recipe, initial)
    reader = _reader(recipe, initial)
    prompts = _load_prompts(recipe, folder, "test", reader, ranks, record=False)[: recipe.evaluation.max_prompts]
    judges, replies = build_judges(recipe, alive), build_replies(recipe, alive)
    policy = load_policy(initial, model_options(recipe))
    if saved is not None:
        now = architecture(policy.bridge.hf_pretrained.config)
        refuse_other_architecture(checkpoint.read_progress(saved)["architecture"], now)
        checkpoint.fill_weights(saved, policy.model)
    engine, sync, *_ = _build_engine(recipe, policy, initial)
    sync()
    return HeldOut(
        recipe=recipe,
        processor=reader.processor,
        engine=engine,
        encoder=reader.encoder,
        judges=judges,
        replies=replies,
        test_prompts=prompts,
        stop_ids=reader.stop_ids,
    )


@dataclass(frozen=True, eq=False)
class _Reader:
    """What turns rows into tokens, and tokens into text."""

    processor: Any
    identity: str
    """Of the processor: with the recipe's data section it decides what a row becomes."""
    encoder: Encoder
    stop_ids: tuple[int, ...]


def _reader(recipe: Recipe, initial: Path) -> _Reader:
    folder = Path(recipe.model.processor) if recipe.model.processor else initial
    config = hf_config(str(initial), None)
    family = FAMILIES[config.model_type]
    processor = load_processor(folder, family)
    check_tokens(config, processor)
    stop_ids = stop_tokens(processor.tokenizer, recipe.rollout.stop)
    encoder = Encoder(processor, family.load("positions")(config), recipe.data.max_prompt_tokens, media_options(recipe))
    return _Reader(processor, processor_identity(folder), encoder, stop_ids)


def build_judges(recipe: Recipe, alive: Callable[[], None] = lambda: None) -> InProcess | Workers:
    """Who gives the rewards: this process, where their time is bounded, or others.

    Raises:
        UserError: the user's own cannot be made.
    """
    environment = recipe.environment
    specs = environment.specs
    if specs.bounded:
        return InProcess(specs.build())
    return Workers(specs, environment.workers, environment.timeout_seconds, alive)


def build_replies(recipe: Recipe, alive: Callable[[], None] = lambda: None) -> Replies | None:
    """Who replies to completions.

    Raises:
        UserError: the user's own cannot be made.
    """
    spec = recipe.environment.dialogue_spec
    return spec and Replies(spec.build(), recipe.environment.timeout_seconds, alive)


def build_parts(recipe: Recipe, checkpoint: Path) -> Parts:
    """The policy from its Hugging Face folder, trainer and engine, whose weights are the same.  Collective."""
    policy, asked = load_policy(checkpoint, model_options(recipe)), recipe.rollout.quantization
    aware = Quantization(policy.model, asked.format, aware=True) if asked and asked.training else None
    # The trainer before the engine: its DDP moves the weights into its buffers, and what the engine captures in CUDA
    # graphs are addresses.
    temperature, chunk = recipe.rollout.scoring_temperature, recipe.training.log_prob_chunk
    trainer = Trainer(policy.model, temperature, chunk, aware.quantize_weights if aware else lambda: None)
    engine, sync, groups, quantization = _build_engine(recipe, policy, checkpoint, aware)
    return Parts(policy, trainer, engine, sync, groups.data_parallel_ranks, groups.same_prompts, quantization)


def _build_engine(
    recipe: Recipe, policy: Policy, checkpoint: Path, aware: Quantization | None = None
) -> tuple[RolloutEngine, WeightSync, EngineGroups, Quantization | None]:
    """Over the policy's module, which may be `aware` of its rounding, or over one of its own."""
    recipe = _with_kv_cache(recipe, policy)
    sampled, groups, sync = policy.model, shared_groups(), SharedWeights
    in_engine, in_transfer, quantization = policy.as_sampled, nullcontext, aware
    if recipe.own_engine:
        options = engine_model_options(recipe)
        groups = resharded_groups(
            options.tensor_model_parallel_size, options.expert_model_parallel_size, options.expert_tensor_parallel_size
        )
        sampled, sync = empty_copy(policy, checkpoint, options, groups.model), ReshardedWeights
        in_engine, in_transfer = nullcontext, policy.as_sampled
    if recipe.rollout.quantization is not None and aware is None:
        quantization = Quantization(sampled, recipe.rollout.quantization.format)
    engine = RolloutEngine(sampled, engine_options(recipe), groups.peers, in_engine)
    arrived = quantization.quantize_weights if quantization else lambda: None
    return engine, sync(engine, policy.model, recipe.rollout.verify_sync, in_transfer, arrived), groups, quantization


def _with_kv_cache(recipe: Recipe, policy: Policy) -> Recipe:
    """The recipe with a size for the KV cache, where it is to take what is left; the least of all ranks.  Collective.

    Raises:
        UserError: there is no GPU, or what is left does not hold the longest request.
    """
    if recipe.rollout.kv_cache_gb is not None:
        return recipe
    if not kernels().gpu:
        raise UserError("rollout.kv_cache_gb = null: there is no GPU of which it could take what is left; set a number")
    # Of this process and of nobody: what the allocator holds and what it could still get.
    memory = torch.tensor(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), device="cuda")
    dist.all_reduce(memory, dist.ReduceOp.MIN)
    config, dtype = policy.bridge.hf_pretrained.config, policy.model.config.params_dtype
    size = kv_cache_that_fits(recipe, config, str(dtype).removeprefix("torch."), dist.get_world_size(), int(memory))
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"kv_cache_gb": size})})


def _load_prompts(
    recipe: Recipe, folder: Path, split: str, reader: _Reader, ranks: Ranks, record: bool = True
) -> PromptSet:
    """`record`: keep in the run folder what the check found."""
    data = recipe.data
    files = find_split(Path(data.path), split)
    downloads = Downloads(folder / "downloads") if data.allow_remote else None
    media = MediaReader(Path(data.path), [Path(other) for other in data.media_folders], downloads)
    settings = {"data": data.model_dump(exclude=_OF_NO_PROMPT), "processor": reader.identity}
    began = latest(folder / "checkpoints") is not None
    ledger = Ledger(folder, split, settings, began and not recipe.allow_dataset_change, record)
    ceiling = data.max_rejected_fraction
    prompts = load_prompts(files, media, reader.encoder.check, ranks, ledger, max_rejected_fraction=ceiling)[0]
    _refuse_rows_without_judge(recipe.environment.specs, prompts, split)
    return prompts


_OF_NO_PROMPT = {"generator", "generator_options", "max_rejected_fraction", "media_cache_gb", "media_threads"}
"""Keys of the data section that change no prompt."""


def start_ranks() -> Ranks:
    """All ranks, in a group of its own for the start: on the CPU, where lists of rows lie, and patient with a rank
    that works alone, for hours where it copies and hashes large files.  Collective.  A rank that dies ends the others
    long before (`megarl.platform.launch`)."""
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=24))

    def gather(value: Any) -> list[Any]:
        return gathered(value, group)

    def broadcast(value: Any) -> Any:
        return from_first(lambda: value, group)

    return Ranks(dist.get_rank(), dist.get_world_size(), gather, broadcast)


def _answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """A supervised target without its stop token; special tokens that it spells out are ordinary text."""
    return tokenizer.encode(answer, add_special_tokens=False, split_special_tokens=True)


def _refuse_long_answers(recipe: Recipe, tokenizer: Any, prompts: PromptSet) -> None:
    """A supervised target must fit where a sampled one does, so that it fits into a row."""
    most = recipe.rollout.max_new_tokens
    for answer in sorted(set(prompts.answers)):
        tokens = len(_answer_ids(tokenizer, answer)) + 1
        if tokens > most:
            raise UserError(
                f"warmup: the answer {answer[:40]!r} has {tokens} tokens with its end token, "
                f"rollout.max_new_tokens = {most}: raise it, or set warmup = null"
            )


def _refuse_rows_without_judge(specs: EnvironmentSpecs, prompts: PromptSet, split: str) -> None:
    """Each row needs an environment, and a ground truth that it can compare with."""
    sources, answers = prompts.sources, prompts.answers
    if missing := sorted({source for source in sources if specs.of(source) is None}):
        shown = ", ".join(map(repr, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(
            f"environment.sources has none for {shown}, sources of rows in {split}: name an environment for each, "
            "or environment.name for all others"
        )
    seen = set()
    for index, pair in enumerate(zip(sources, answers, strict=True)):
        if pair in seen:
            continue
        seen.add(pair)
        spec = specs.of(pair[0])
        if refusal := refusal_of_answer(spec, pair[1]):
            raise UserError(f"{split}, row {prompts[index].row}: {refusal} ({spec.key}.name = {spec.name!r})")


def _refuse_few_prompts(recipe: Recipe, prompts: int) -> None:
    """A step's prompts that are drawn by their solve rates are distinct."""
    wanted = recipe.algorithm.prompts_per_step
    if prompts < wanted:
        raise UserError(
            f"algorithm.prompts_per_step = {wanted}: there are {prompts} training prompts, and algorithm.curriculum "
            "draws distinct ones: lower it, or set algorithm.curriculum = null"
        )


def draw_key(seed: int, purpose: str, step: int, place: int) -> int:
    """63 bits that decide the draws of one prompt's rollouts: the same under every layout and after a resume."""
    return named_key(seed, purpose, step, place)
