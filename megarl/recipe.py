"""Recipes: the schema with every default, inheritance, overrides, and each refusal.

A recipe is a YAML file.  `extends: base.yaml` (or a list of paths, relative to the file) merges it over
others; `key.sub=value` overrides from the command line come last.  Paths inside a recipe (`run_dir`,
`data.path`, `model.path`, `model.processor`) are relative to the current directory.
"""

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from megarl.data.curriculum import weighted
from megarl.environments.extraction import EXTRACTIONS, FORMATS, malformed, without_group
from megarl.environments.registry import (
    DIALOGUES,
    GRADERS,
    DialogueSpec,
    EnvironmentSpec,
    EnvironmentSpecs,
    wrong_option,
)
from megarl.errors import UserError, one_line
from megarl.packing.alignment import Alignment
from megarl.pins import well_formed

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Part = Literal["vision", "projector", "language"]
LoraModule = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class Section(BaseModel):
    """Nothing is coerced or ignored: `"3"`, `3.0` and `true` are no integers, an unknown key is refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class TinyProcessor(Section):
    """A tokenizer of single characters and, for a model that reads pictures, their processor, built offline."""

    alphabet: Annotated[str, Field(min_length=1)] = "".join(map(chr, range(0x20, 0x7F)))
    """Characters that are tokens, beside the special tokens; default: printable ASCII."""
    vocab_size: PositiveInt = 128
    """Rows of the vocabulary; those that no token needs stay unused."""
    patch_size: PositiveInt | None = None
    """Side of a patch in pixels; null, as the two sizes below: for a model that reads text alone."""
    merge_size: PositiveInt = 2
    """Side of the square of patches that becomes one media token."""
    temporal_patch_size: PositiveInt = 2
    """Frames in a patch; a picture is repeated to fill them."""
    min_pixels: PositiveInt | None = None
    """Pixels (height x width) below which a picture is enlarged."""
    max_pixels: PositiveInt | None = None
    """Pixels (height x width) above which a picture is shrunk."""


class LoraSection(Section):
    rank: PositiveInt = 16
    """Rows of A and columns of B; a multiple of the tensor-parallel size."""
    alpha: PositiveFloat = 32.0
    """B A is multiplied by alpha / rank."""
    modules: Annotated[list[LoraModule], Field(min_length=1)] = list(get_args(LoraModule))
    """Layers that have an adapter, by Megatron's names: the projections into and out of attention, and of the MLP."""
    merge_for_rollouts: bool = True
    """Add the adapters to the weights while the engine samples, in place; else the engine computes both, more slowly
    and rounded as in training."""


class ModelSection(Section):
    path: str | None = None
    """Folder of a Hugging Face checkpoint to start from, or its name on the hub; excludes `config`."""
    config: dict[str, Any] | None = None
    """A Hugging Face configuration, inline: the model starts from random weights; excludes `path`."""
    init: Literal["auto", "random"] = "auto"
    """Weights to start from; auto: those of `path`, or random ones; random: of `path` configuration and processor
    alone, for experiments and for measuring speed."""
    init_std: PositiveFloat | None = None
    """Standard deviation of random weights; null: the configuration's `initializer_range`."""
    scale_output_projections: bool = True
    """Divide the standard deviation of random output projections by sqrt(2 x layers)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto: bfloat16 on a GPU, float32 on a CPU."""
    processor: str | None = None
    """Folder of a Hugging Face processor, or its name on the hub; null: `path`, or `tiny_processor`."""
    tiny_processor: TinyProcessor | None = None
    """Processor built offline, for recipes that start from nothing."""
    freeze: list[Part] = []
    """Parts of the model that are not trained."""
    lora: LoraSection | None = None
    """Train low-rank adapters of the language model in place of its weights; null: train the weights."""

    @property
    def frozen(self) -> set[Part]:
        """Parts whose own weights are not trained: the language model's are not where it has adapters."""
        return {*self.freeze, *["language"] * (self.lora is not None)}

    @property
    def random(self) -> bool:
        """Whether the run starts from random weights."""
        return self.path is None or self.init == "random"


class ParallelSection(Section):
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share the weights of each layer."""
    sequence_parallel: bool = False
    """Split norms and residuals by tokens over the tensor-parallel ranks."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers; only 1."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of a row; in rollouts each of them is an engine of its own."""
    cp_comm_type: Literal["a2a", "p2p"] = "a2a"
    """How these ranks attend to each other's tokens: Ulysses, or transformer-engine's ring, for text alone."""
    vision_dp_when_cp: bool = True
    """These ranks encode a part of a row's pictures and frames each and gather the features; else all of them each."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a layer, each of them with rows and requests of its own."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share the weights of each expert."""

    @property
    def alignment(self) -> Alignment:
        """What rows are packed for."""
        return Alignment.of(self.tensor_model_parallel_size, self.context_parallel_size, self.cp_comm_type)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model and work on one row."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.expert_model_parallel_size * self.expert_tensor_parallel_size

    @property
    def sizes(self) -> dict[str, int]:
        """As `megatron.core.parallel_state.initialize_model_parallel` takes them."""
        return {key: size for key, size in self.model_dump().items() if key.endswith("_size")}

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model in a job of `world_size` processes, which `check_world` has accepted."""
        return world_size // self.model_parallel_size


class ImageSection(Section):
    min_pixels: PositiveInt | None = None
    """Pixels (height x width) below which a picture is enlarged; null: as the processor has it."""
    max_pixels: PositiveInt | None = None
    """Pixels (height x width) above which a picture is shrunk; null: as the processor has it."""


class VideoSection(Section):
    fps: PositiveFloat | None = None
    """Frames sampled per second; null: as the processor has it, unless `num_frames` is set."""
    num_frames: PositiveInt | None = None
    """Frames sampled, spread evenly over the video; excludes `fps`."""
    min_frames: PositiveInt | None = None
    """Fewest frames that `fps` may lead to; null: as the processor has it."""
    max_frames: PositiveInt | None = None
    """Most frames that `fps` may lead to; null: as the processor has it."""
    min_pixels: PositiveInt | None = None
    """Pixels (frames x height x width) below which a video is enlarged; null: as the processor has it."""
    max_pixels: PositiveInt | None = None
    """Pixels (frames x height x width) above which a video is shrunk; null: as the processor has it."""


class DataSection(Section):
    path: str
    """Folder with the splits `train` and `test`, each as `.jsonl` or `.parquet`; see docs/data.md."""
    media_folders: list[str] = []
    """Other folders in which the media of rows may lie."""
    allow_remote: bool = False
    """Fetch media that rows name by URL, once, into the run folder; else such rows are rejected."""
    generator: Literal["color_codeword", "digits", "largest_digit", "mixed", "motion_video", "scenes"] | None = None
    """Creates the folder when it does not exist."""
    generator_options: dict[str, PositiveInt] = {}
    """Sizes that the generator takes, such as `train: 4096`; see `megarl/data/generators`."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, in tokens after media expansion; a longer one is rejected."""
    max_rejected_fraction: Fraction = 0.1
    """Share of rejected rows above which the run refuses to start."""
    image: ImageSection = ImageSection()
    """How pictures are prepared."""
    video: VideoSection = VideoSection()
    """How videos are sampled and prepared."""
    media_cache_gb: PositiveFloat = 1.0
    """Bound, in GiB on a rank, of the prepared pixels that are kept or prepared ahead of need."""
    media_threads: PositiveInt = 4
    """Threads of a rank that decode and prepare media."""


class Conflict(ValueError):
    """Values of a section that do not go together."""

    def __init__(self, settings: dict[str, Any], why: str):
        """
        Args:
            settings: values by key, inside the section.
            why: what is wrong with them.
        """
        super().__init__(why)
        self.settings = settings

    def under(self, section: str) -> str:
        """The message, with dotted keys of the recipe."""
        named = [f"{section}.{key} = {_shown(value)}" for key, value in self.settings.items()]
        return f"{', '.join(named)}: {self}"


class GraderSection(Section):
    name: str | None = None
    """`exact_match`, `visual_answer`, `multiple_choice`, `numeric`, `math`, `box_iou`, `point_in_box`, or your own as
    `package.module:Name`; see docs/environments.md. null: `exact_match`; but where `sources` are given there is none
    for the others."""
    options: dict[str, Any] = {}
    """Of that grader, such as `count_tolerance: 1`; of your own, what it is made with."""
    extract: str | None = None
    """Where in a completion the answer is: `answer` (the last `<answer>` tags), `boxed` (the last `\\boxed` braces), or
    a regular expression whose first group it is; null: all of it."""
    format: str | None = None
    """Regular expression that a well-formed completion matches in full; or `think_answer`: `<think>` tags, then
    `<answer>` tags."""
    format_reward: NonNegativeFloat = 0.0
    """Added to the reward of a well-formed completion."""
    weight: PositiveFloat = 1.0
    """Multiplies the reward."""

    @property
    def own(self) -> bool:
        """Whether it is the user's."""
        return self.name is not None and ":" in self.name

    def spec(self, key: str) -> EnvironmentSpec:
        """As the environments take it; `key` is this section's."""
        name = self.name or "exact_match"
        return EnvironmentSpec(key, name, self.options, self.extract, self.format, self.format_reward, self.weight)

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for refused, keys, why in self._conflicts():
            if refused:
                raise Conflict({key: getattr(self, key) for key in keys.split()}, why)
        return self

    def _conflicts(self) -> Iterator[tuple[bool, str, str]]:
        name = self.name or "exact_match"
        known = name in GRADERS or (self.own and _IMPORT_PATH.fullmatch(name))
        yield (
            not known,
            "name",
            f"should be one of {', '.join(GRADERS)}, or your own as package.module:Name",
        )
        for key in ("extract", "format", "format_reward"):
            yield (
                self.own and bool(getattr(self, key)),
                f"{key} name",
                "your own environment is given the whole completion and its reward is all",
            )
        if not self.own and (wrong := wrong_option(name, self.options)):
            option, why = wrong
            raise Conflict({f"options.{option}": self.options.get(option)}, why)
        for key, names in (("extract", EXTRACTIONS), ("format", FORMATS)):
            value = getattr(self, key)
            error = malformed(value) if value is not None and value not in names else None
            yield error is not None, key, f"should be {', '.join(names)} or a regular expression: {error}"
        yield (
            self.extract is not None and self.extract not in EXTRACTIONS and without_group(self.extract),
            "extract",
            f"should be {', '.join(EXTRACTIONS)} or have a group that is the answer",
        )
        yield self.format_reward > 0 and self.format is None, "format_reward format", "the reward needs a format"


class DialogueSection(Section):
    name: str
    """`zoom`, which shows parts of the picture, or your own as `package.module:Name`; see docs/environments.md."""
    options: dict[str, Any] = {}
    """What it is made with."""
    max_turns: Annotated[int, Field(ge=2)] = 4
    """Completions of a conversation, at most."""

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        if self.name not in DIALOGUES and not _IMPORT_PATH.fullmatch(self.name):
            known = ", ".join(DIALOGUES)
            raise Conflict({"name": self.name}, f"should be one of {known}, or your own as package.module:Name")
        if self.name in DIALOGUES and (wrong := wrong_option(self.name, self.options)):
            option, why = wrong
            raise Conflict({f"options.{option}": self.options.get(option)}, why)
        return self


class EnvironmentSection(GraderSection):
    dialogue: DialogueSection | None = None
    """Who replies to completions, so that a rollout is a conversation; null: the first completion is the answer."""
    sources: dict[str, GraderSection] = {}
    """Environments of single sources, by a row's `source`; other rows have the one above."""
    on_error: Literal["zero", "drop"] = "zero"
    """A completion whose reward fails, takes too long or is no finite number earns 0; or it is left out of the loss and
    of its group's statistics."""
    timeout_seconds: PositiveFloat = 10.0
    """For a completion, where it is judged in a process of its own: your own and `math`; and for a dialogue's reply."""
    workers: PositiveInt = 2
    """Such processes of a rank."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before rollout.max_new_tokens over which a penalty rises from 0 to overlong_penalty; 0: none."""
    overlong_penalty: PositiveFloat = 1.0
    """Taken off the reward of an answer of rollout.max_new_tokens."""

    @property
    def dialogue_spec(self) -> DialogueSpec | None:
        """Who replies to completions."""
        talk = self.dialogue
        return talk and DialogueSpec("environment.dialogue", talk.name, talk.options)

    @property
    def specs(self) -> EnvironmentSpecs:
        """What judges the rows, by their sources."""
        default = None if self.name is None and self.sources else self.spec("environment")
        return EnvironmentSpecs(
            default, {name: one.spec(f"environment.sources.{name}") for name, one in self.sources.items()}
        )

    @property
    def components(self) -> bool:
        """Whether a reward may have several."""
        graders = (self, *self.sources.values())
        return self.overlong_buffer > 0 or any(one.own or one.format_reward > 0 for one in graders)


_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class CorrectionSection(Section):
    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Importance weight of the trainer's policy over the engine's: of a token, of a whole completion, or the geometric
    mean of its tokens'; none: 1."""
    bound: Literal["truncate", "mask"] = "truncate"
    """Weights outside low and high are set to the bound, or to 0."""
    low: NonNegativeFloat = 0.0
    """Least weight."""
    high: PositiveFloat = 2.0
    """Largest weight."""
    drop_mean: PositiveFloat | None = None
    """Mean distance of log-probabilities, in nats, above which a rollout is left out; null: off."""
    drop_max: PositiveFloat | None = None
    """Distance of one token's log-probabilities, in nats, above which its rollout is left out; null: off."""


class PerceptionSection(Section):
    coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence between the policy and the policy from which a part of the media is hidden, which is to
    grow (PAPO); 0: off. Each row goes through the model twice."""
    mask_ratio: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the patches that are hidden."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which is to fall."""
    masked_entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy of the policy from which a part is hidden, which is to fall too."""


class CurriculumSection(Section):
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a step's prompts that are drawn by p (1 - p) of their solve rates p; the others come in shuffled
    epochs."""
    discount: Fraction = 0.5
    """What earlier completions of a prompt still count each time that it is tried again; 1: they count in full."""


class AlgorithmSection(Section):
    advantage: Literal[
        "group_std",
        "group_mean",
        "leave_one_out",
        "batch_std",
        "group_mean_batch_std",
        "component_std",
        "max_at_k",
    ] = "group_std"
    """How rewards are weighed against each other; see docs/objectives.md."""
    best_of: Annotated[int, Field(ge=2)] | None = None
    """k of `max_at_k`."""
    prompts_per_step: PositiveInt = 32
    """Prompts drawn for a step, over all ranks."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Rollouts of one prompt."""
    resample_rounds: NonNegativeInt = 0
    """Times in a step that groups whose rewards are equal make room for those of other prompts; 0: never."""
    curriculum: CurriculumSection | None = None
    """Draw prompts more often that are solved now and then; null: every prompt once an epoch."""
    filter_overlong: bool = False
    """Leave completions that reached rollout.max_new_tokens out of the loss."""
    epochs: PositiveInt = 1
    """Times that a step's rollouts are trained on."""
    minibatches: PositiveInt = 1
    """Optimizer updates in an epoch; each takes an equal share of the step's prompts."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio of each token, or the geometric mean over its completion (GSPO)."""
    surrogate: Literal["clipped", "cispo", "unclipped", "none"] = "clipped"
    """What is made of the ratio: PPO's pessimistic clipping, a bounded weight of the log-probability, the ratio itself;
    none: rewards teach nothing, only the divergence to the reference does."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Of `clipped`: a negative advantage costs at most this many times its size; null: off."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """The loss is a mean over the minibatch's tokens, over its completions of their means, or over its completions of
    their sums divided by rollout.max_new_tokens."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference policy; 0: no reference is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the divergence from the sampled tokens."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it counts: at each token of the loss, or summed over the completion in the reward."""
    reference: str | None = None
    """Folder or name on the hub of a checkpoint of the same sizes and tokens that is the reference, such as a teacher;
    null: the policy that RL began with."""
    reference_every: NonNegativeInt = 0
    """RL steps after which the policy becomes its own reference; 0: never."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    old_log_probs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: the trainer's before its first update, or what the engine sampled with."""
    router_replay: bool = False
    """Send each token to the experts that it had in the rollout when scoring and training; mixtures of experts only."""
    correction: CorrectionSection = CorrectionSection()
    """What is done about tokens to which engine and trainer give different probabilities."""
    perception: PerceptionSection = PerceptionSection()
    """What the policy is to gain from looking at the media."""

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


class WarmupSection(Section):
    steps: PositiveInt
    """Supervised updates."""
    batch_size: PositiveInt = 64
    """Prompts in an update, over all ranks."""
    learning_rate: PositiveFloat
    """Constant learning rate."""
    answers: Literal["dataset", "random"] = "dataset"
    """Targets: the ground truth, or drawn from the training answers of the same source: teaches the format only."""


class QuantizationSection(Section):
    format: Literal["fp8", "int8"] = "fp8"
    """Of the weights and inputs of the language model's layers: FP8 (E4M3), which GPUs multiply from Hopper on; or
    INT8, which is rounded to and multiplied in the model's type."""
    calibration_prompts: PositiveInt = 32
    """First prompts of the training set, whose largest values decide the scales of inputs."""
    training: bool = False
    """Train with the rounding too (quantisation-aware): one module, rounded whenever it computes, for engines and
    trainer, and gradients that go straight through."""


class RolloutParallelSection(Section):
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks of an engine; they share the weights of each layer."""
    sequence_parallel: bool = False
    """Split norms and residuals by tokens over the tensor-parallel ranks."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a layer, each of them with requests of its own."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share the weights of each expert."""


class PartialSection(Section):
    extra_prompts: PositiveInt
    """Prompts in flight beside those that a step trains on: the more, the less often does it wait for the last."""
    tokens_per_round: PositiveInt
    """New tokens of a rollout after which all ranks look whether enough groups are done; divides
    rollout.max_new_tokens."""


class RolloutSection(Section):
    max_new_tokens: PositiveInt
    """Longest answer in tokens, its end token included."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits when sampling and when training; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that hold this probability; 1: off."""
    top_k: NonNegativeInt = 0
    """Sample from this many likeliest tokens; 0: off."""
    stop: list[str] = []
    """Tokens that end an answer; empty: the tokenizer's end-of-sequence token."""
    max_requests: PositiveInt = 512
    """Requests that a rank decodes at a time."""
    max_tokens_per_step: Annotated[int, Field(gt=0, multiple_of=64)] = 4096
    """Tokens in one forward pass of the engine, a multiple of 64."""
    kv_cache_gb: PositiveFloat | None = 0.25
    """Size of the KV cache of a rank in GiB; null: what all else, as `megarl.check` predicts it, leaves of a GPU."""
    block_size_tokens: Annotated[int, Field(gt=0, multiple_of=16)] = 64
    """Tokens in a block of the KV cache, a multiple of 16; also the grain of prefix caching."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prefixes, such as the prompts of a group."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit into the current step."""
    vision_cache_gb: PositiveFloat = 0.5
    """Bound, in GiB on a rank, of the media features that are kept for prompts still to be read."""
    patches_per_pass: PositiveInt = 65536
    """Patches that go through the vision tower at once; a larger video is cut between its frames."""
    cuda_graphs: bool = True
    """Replay the engine's steps as CUDA graphs; ignored without a GPU."""
    max_sequence_tokens: PositiveInt | None = None
    """Tokens of a conversation (environment.dialogue), its next completion included; without room for that it ends.
    Null, where there is none: data.max_prompt_tokens + rollout.max_new_tokens."""
    partial: PartialSection | None = None
    """Do not wait for the longest completions: what a step has not finished goes on in the next, under its weights.
    Null: every rollout is sampled to its end in its own step."""
    parallel: RolloutParallelSection | None = None
    """A layout of the engines' own: the weights are held twice and resharded after each step; null: engines and
    trainer share one set of weights."""
    quantization: QuantizationSection | None = None
    """Sample with weights in eight bits, which the engines hold beside the trainer's; null: as they are trained."""
    verify_sync: bool = False
    """Compare every tensor of the engines with the trainer's after each step, and end the run where one differs."""

    @property
    def scoring_temperature(self) -> float:
        """Divides the trainer's logits: what was sampled with, or 1 where nothing is sampled (greedy)."""
        return self.temperature if self.temperature > 0 else 1.0


class TrainingSection(Section):
    tokens_per_row: PositiveInt = 4096
    """Tokens of a packed row, which is one microbatch."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Of the language model's layers, what is computed again in the backward pass in place of being kept: nothing, MLPs
    (or experts), or all."""
    log_prob_chunk: PositiveInt | None = None
    """Tokens whose logits exist at a time; those of a row with more are made again in the backward pass. null: all of a
    row's."""
    offload: Literal["none", "optimizer"] = "none"
    """What leaves the GPU while rollouts are sampled: nothing, or the optimizer's state, for page-locked memory of the
    host, and the gradients, which are made anew."""


class OptimizerSection(Section):
    learning_rate: PositiveFloat
    """Peak learning rate."""
    min_learning_rate_ratio: Fraction = 0.1
    """Learning rate of the last update, as a share of the peak."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the fall from the peak to the last update."""
    adam_beta1: Beta = 0.9
    """Decay of the first moment."""
    adam_beta2: Beta = 0.95
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, times the learning rate."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0: off."""


class EvaluationSection(Section):
    every: NonNegativeInt = 20
    """RL steps between evaluations; 0: only at the start and at the end."""
    at_start: bool = True
    """Evaluate before the first RL step."""
    max_prompts: PositiveInt | None = None
    """Prompts of `test.jsonl` to use; null: all."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0: greedy."""
    samples: PositiveInt = 1
    """Answers to each prompt: with several, pass@k and the accuracy of the majority are reported beside the mean."""


class CheckpointSection(Section):
    every: NonNegativeInt = 20
    """RL steps between checkpoints; 0: only at the end and on a signal."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept: where the newest is damaged, the one before is gone on from."""
    keep_best: NonNegativeInt = 0
    """Checkpoints of the highest held-out accuracy that are kept beside them, of steps that were evaluated."""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy of the rank's state in main memory."""


class LimitsSection(Section):
    wall_clock_hours: PositiveFloat | None = None
    """Hours after which a command saves and stops, as on a signal; null: none."""
    no_progress_minutes: PositiveFloat | None = 60.0
    """Minutes without a sign of life from a rank after which it shows all stacks and ends the job; null: never."""
    max_skipped_steps: NonNegativeInt = 3
    """Steps in a row with an update skipped for loss or gradients that are not finite, beyond which the run ends."""


class ObserveSection(Section):
    save_rollouts_every: NonNegativeInt = 1
    """RL steps between saved samples of the rollouts; 0: never."""
    max_saved_rollouts: NonNegativeInt = 64
    """Rollouts saved at a time."""


class PinsSection(Section):
    megatron_lm: str | None = None
    """Commit of Megatron-LM (40 hex digits), or release of megatron-core, such as `1.2.3`; null: whatever is
    installed."""
    megatron_bridge: str | None = None
    """Commit of Megatron-Bridge, or release of megatron-bridge; null: whatever is installed."""

    @model_validator(mode="after")
    def _refuse_malformed(self) -> Self:
        for key, pin in self.model_dump().items():
            if pin is not None and not well_formed(pin):
                raise Conflict({key: pin}, "should be a commit of 40 hex digits or a release, such as 1.2.3")
        return self


class Recipe(Section):
    seed: Annotated[int, Field(ge=0, le=2**32 - 2)] = 1
    """Seed of weights, data order and sampling."""
    run_dir: Annotated[str, Field(min_length=1)] = "runs/default"
    """Folder of everything that the run writes."""
    steps: NonNegativeInt
    """RL steps; 0: warm-up and evaluation only."""
    allow_dataset_change: bool = False
    """Go on with other data, or data prepared otherwise, than the run began with."""
    eval_only: bool = False
    """Evaluate what the run folder holds, its newest checkpoint or the initial model, and do nothing else."""
    deterministic: bool = False
    """Trainer and engine compute log-probabilities by kernels that give a token the same bits in every batch, and
    gradients by algorithms that do from run to run: slower; for a dense model that reads text alone."""
    model: ModelSection
    """Weights and processor to start from."""
    parallel: ParallelSection = ParallelSection()
    """How the ranks share the model; those that do not are data parallel."""
    data: DataSection
    """Prompts with their ground truths."""
    environment: EnvironmentSection = EnvironmentSection()
    """What a rollout is rewarded for."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """GRPO and its family."""
    warmup: WarmupSection | None = None
    """Supervised updates before RL, with an optimizer of their own; null: off."""
    rollout: RolloutSection
    """Sampling and the engine that samples."""
    training: TrainingSection = TrainingSection()
    """Rows, and what is kept of them for the backward pass."""
    optimizer: OptimizerSection
    """AdamW and its schedule, counted in optimizer updates."""
    evaluation: EvaluationSection = EvaluationSection()
    """Reward on `test.jsonl`."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When the state of the run is saved."""
    limits: LimitsSection = LimitsSection()
    """When a command ends by itself."""
    observe: ObserveSection = ObserveSection()
    """What the run shows of itself."""
    pins: PinsSection = PinsSection()
    """Which Megatron the recipe was made for; another one is refused."""

    @property
    def own_engine(self) -> bool:
        """Whether the engines have weights of their own."""
        quantization = self.rollout.quantization
        return self.rollout.parallel is not None or (quantization is not None and not quantization.training)

    @property
    def unquantized(self) -> "Recipe":
        """With rollouts by the weights as they are trained."""
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"quantization": None})})

    @property
    def engines_key(self) -> str:
        """The section that says how the engines share the model."""
        return "parallel" if self.rollout.parallel is None else "rollout.parallel"

    @property
    def engine_parallel(self) -> ParallelSection:
        """The layout of the engines.  Context-parallel ranks are engines of their own."""
        if self.rollout.parallel is None:
            return self.parallel.model_copy(update={"context_parallel_size": 1})
        return ParallelSection(**self.rollout.parallel.model_dump())

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt with its completion, or of a conversation."""
        return self.rollout.max_sequence_tokens or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def longest_prompt(self) -> int:
        """Tokens before a completion, or before the part of one that is sampled in a round."""
        partial = self.rollout.partial
        return self.longest_sequence - (partial.tokens_per_round if partial else self.rollout.max_new_tokens)

    @property
    def total_updates(self) -> int:
        """Optimizer updates of all RL steps."""
        return self.steps * self.algorithm.updates_per_step

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for refused, keys, why in _conflicts(self):
            if refused:
                raise ValueError(f"{_settings(self, *keys.split())}: {why}")
        return self


def _conflicts(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Combinations that are refused: when, the keys whose values are named, and why."""
    m, tiny, config = r.model, r.model.tiny_processor, r.model.config
    yield (m.path is None) == (config is None), "model.path model.config", "set exactly one"
    yield (
        not m.random and m.init_std is not None,
        "model.path model.init_std",
        "a checkpoint has weights: should be null, or model.init = 'random'",
    )
    yield (
        m.path is not None and tiny is not None,
        "model.path model.tiny_processor",
        "a checkpoint has a processor, or name the folder of one in model.processor",
    )
    if config is not None:
        for key in ("model_type", "architectures"):
            yield key not in config, "model.config", f"an inline configuration needs {key!r}"
        yield (
            (m.processor is None) == (tiny is None),
            "model.processor model.tiny_processor",
            "set exactly one beside model.config",
        )
    if tiny is not None:
        tokenizer, pixels = "model.tiny_processor.alphabet", "model.tiny_processor.max_pixels"
        yield len(set(tiny.alphabet)) < len(tiny.alphabet), tokenizer, "a character may occur only once"
        yield (
            len(tiny.alphabet) >= tiny.vocab_size,
            f"model.tiny_processor.vocab_size {tokenizer}",
            "the vocabulary must hold the characters and the special tokens",
        )
        given = [size is not None for size in (tiny.patch_size, tiny.min_pixels, tiny.max_pixels)]
        yield (
            any(given) and not all(given),
            f"model.tiny_processor.patch_size model.tiny_processor.min_pixels {pixels}",
            "belong together: set all, or none for a model that reads text alone",
        )
        if all(given):
            yield (
                tiny.min_pixels > tiny.max_pixels,
                f"model.tiny_processor.min_pixels {pixels}",
                "min exceeds max",
            )
            token = (tiny.patch_size * tiny.merge_size) ** 2
            yield tiny.max_pixels < token, pixels, f"should be at least {token}, the pixels of one media token"
        for ours, section, theirs in (
            ("vocab_size", "text_config", "vocab_size"),
            ("patch_size", "vision_config", "patch_size"),
            ("merge_size", "vision_config", "spatial_merge_size"),
            ("temporal_patch_size", "vision_config", "temporal_patch_size"),
        ):
            values, mine = config.get(section), getattr(tiny, ours)
            yield (
                isinstance(values, dict) and mine is not None and values.get(theirs, mine) != mine,
                f"model.tiny_processor.{ours} model.config.{section}.{theirs}",
                "should be equal",
            )
    quantized = r.rollout.quantization is not None
    aware = quantized and r.rollout.quantization.training
    yield (
        quantized and m.lora is not None and not m.lora.merge_for_rollouts,
        "model.lora.merge_for_rollouts rollout.quantization",
        "what is rounded has its adapters in it: should be true",
    )
    yield (
        aware and r.algorithm.reference is not None,
        "rollout.quantization.training algorithm.reference",
        "another model's inputs have another scale: should be false, or algorithm.reference = null",
    )
    yield (
        aware and m.lora is not None,
        "rollout.quantization.training model.lora",
        "adapters are trained beside weights that are not: should be false, or model.lora = null",
    )
    yield (
        aware and r.rollout.parallel is not None,
        "rollout.quantization.training rollout.parallel",
        "engines and trainer are one module then: should be false, or rollout.parallel = null",
    )
    yield (
        set(m.freeze) == set(get_args(Part)) and m.lora is None and (r.steps > 0 or r.warmup is not None),
        "model.freeze steps",
        "nothing is left to train",
    )

    for section, low, high in (
        ("data.image", "min_pixels", "max_pixels"),
        ("data.video", "min_frames", "max_frames"),
        ("data.video", "min_pixels", "max_pixels"),
    ):
        values = getattr(r.data, section.removeprefix("data."))
        least, most = getattr(values, low), getattr(values, high)
        keys = f"{section}.{low} {section}.{high}"
        yield (least is None) != (most is None), keys, "belong together: set both or neither"
        yield least is not None and most is not None and least > most, keys, "min exceeds max"
    yield (
        r.data.video.fps is not None and r.data.video.num_frames is not None,
        "data.video.fps data.video.num_frames",
        "set at most one",
    )
    yield (
        r.data.video.min_frames is not None and r.data.video.num_frames is not None,
        "data.video.min_frames data.video.num_frames",
        "bounds belong to sampling by fps",
    )

    tensor_parallel = r.parallel.tensor_model_parallel_size
    yield (
        r.parallel.pipeline_model_parallel_size > 1,
        "parallel.pipeline_model_parallel_size",
        "only 1 is accepted, since rollouts share the rank's module with training and step all layers of it",
    )
    yield (
        r.parallel.sequence_parallel and tensor_parallel == 1,
        "parallel.sequence_parallel parallel.tensor_model_parallel_size",
        "sequence parallelism needs a tensor parallel size above 1",
    )
    yield (
        r.rollout.max_requests % r.engine_parallel.tensor_model_parallel_size > 0,
        f"rollout.max_requests {r.engines_key}.tensor_model_parallel_size",
        "should be a multiple of the tensor parallel size",
    )
    yield from _engine_conflicts(r)
    yield (
        r.training.tokens_per_row % r.parallel.alignment.multiple > 0,
        "training.tokens_per_row parallel.tensor_model_parallel_size parallel.context_parallel_size",
        f"should be a multiple of {r.parallel.alignment.multiple}, which cuts into their parts",
    )

    yield (
        r.environment.overlong_buffer > r.rollout.max_new_tokens,
        "environment.overlong_buffer rollout.max_new_tokens",
        "the buffer is a part of the longest answer",
    )
    yield (
        r.environment.overlong_penalty != 1.0 and r.environment.overlong_buffer == 0,
        "environment.overlong_penalty environment.overlong_buffer",
        "the penalty needs a buffer",
    )
    yield (
        len(r.data.generator_options) > 0 and r.data.generator is None,
        "data.generator_options data.generator",
        "options need a generator",
    )

    yield (
        r.algorithm.prompts_per_step % r.algorithm.minibatches > 0,
        "algorithm.minibatches algorithm.prompts_per_step",
        "minibatches should divide the prompts of a step",
    )
    for key, greedy in (
        ("temperature", r.rollout.temperature == 0),
        ("top_k", r.rollout.top_k == 1),
    ):
        yield (
            greedy and r.steps > 0,
            f"rollout.{key} algorithm.group_size steps",
            "the greedy rollouts of a group are equal and their advantages 0; sample, or set steps = 0",
        )
    for key, filtered in (("top_p", r.rollout.top_p < 1), ("top_k", r.rollout.top_k > 0)):
        yield (
            filtered and r.algorithm.old_log_probs == "rollout",
            f"rollout.{key} algorithm.old_log_probs",
            "the trainer knows only the full tempered distribution; set old_log_probs = 'trainer'",
        )
        for setting in _corrections_on(r.algorithm.correction):
            yield (
                filtered,
                f"rollout.{key} {setting}",
                "the trainer knows only the full tempered distribution, and every token is off by what was cut away",
            )
    yield from _algorithm_conflicts(r)
    yield (
        r.rollout.max_tokens_per_step < r.rollout.max_requests,
        "rollout.max_tokens_per_step rollout.max_requests",
        "every decoding request takes a token of the engine's step",
    )
    yield (
        r.evaluation.samples > 1 and r.evaluation.temperature == 0,
        "evaluation.samples evaluation.temperature",
        "greedy answers to a prompt are equal; set a temperature, or samples = 1",
    )
    yield (
        r.evaluation.samples > r.rollout.max_requests,
        "evaluation.samples rollout.max_requests",
        "the engine should hold all samples of a prompt at a time",
    )
    yield (
        not r.rollout.enable_chunked_prefill and r.rollout.max_tokens_per_step < r.longest_prompt,
        "rollout.enable_chunked_prefill rollout.max_tokens_per_step data.max_prompt_tokens",
        f"an unchunked prompt must fit into the engine's step, with what was sampled before {r.longest_prompt} tokens",
    )
    shortest = r.data.max_prompt_tokens + r.rollout.max_new_tokens
    yield (
        r.longest_sequence < shortest,
        "rollout.max_sequence_tokens data.max_prompt_tokens rollout.max_new_tokens",
        "a prompt and one completion must fit",
    )
    yield (
        (r.environment.dialogue is None) != (r.rollout.max_sequence_tokens is None),
        "environment.dialogue rollout.max_sequence_tokens",
        "a conversation needs a bound, and nothing else does",
    )
    longest = "data.max_prompt_tokens rollout.max_new_tokens"
    if r.rollout.max_sequence_tokens is not None:
        longest = "rollout.max_sequence_tokens"
    yield (
        r.longest_sequence > r.training.tokens_per_row,
        f"{longest} training.tokens_per_row",
        "a row must hold the longest sample",
    )
    yield from _partial_conflicts(r)
    yield from _deterministic_conflicts(r)
    yield (
        r.steps > 0 and r.optimizer.warmup_steps > r.total_updates,
        "optimizer.warmup_steps steps algorithm.epochs algorithm.minibatches",
        f"the run has only {r.total_updates} updates",
    )


def _partial_conflicts(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Of rollouts that go on in the next step."""
    partial = r.rollout.partial
    if partial is None:
        return
    yield (
        r.rollout.max_new_tokens % partial.tokens_per_round > 0,
        "rollout.partial.tokens_per_round rollout.max_new_tokens",
        "a round should be a whole part of the longest completion",
    )
    yield (
        r.environment.dialogue is not None,
        "rollout.partial environment.dialogue",
        "a conversation is sampled to its end",
    )
    for key, given, why in (
        ("resample_rounds", r.algorithm.resample_rounds > 0, "a group is judged when it is done, steps after it began"),
        ("curriculum", r.algorithm.curriculum is not None, "its draws wait for the outcomes of all steps before"),
        (
            "router_replay",
            r.algorithm.router_replay,
            "the experts of a rollout's first tokens are those of other weights",
        ),
    ):
        yield given, f"rollout.partial.extra_prompts algorithm.{key}", why


def _deterministic_conflicts(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Of what trainer and engine were not proved to compute alike to the last bit."""
    if not r.deterministic:
        return
    for axis in ("tensor_model", "context", "expert_model", "expert_tensor"):
        key = f"parallel.{axis}_parallel_size"
        yield getattr(r.parallel, f"{axis}_parallel_size") > 1, f"deterministic {key}", "ranks add up in another order"
    for key, given in (("parallel", r.rollout.parallel is not None), ("quantization", r.rollout.quantization)):
        yield (
            given,
            f"deterministic rollout.{key}",
            "engine and trainer would compute with other weights: should be null",
        )
    yield (
        r.model.lora is not None,
        "deterministic model.lora",
        "weights with adapters merged round otherwise than both apart: should be null",
    )
    for key, given in (("top_p", r.rollout.top_p < 1), ("top_k", r.rollout.top_k > 0)):
        yield given, f"deterministic rollout.{key}", "the trainer does not know what was cut off"


def _engine_conflicts(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Of a layout of the engines' own."""
    if r.rollout.parallel is None:
        return
    sizes = [f"{size}_parallel_size" for size in ("tensor_model", "expert_model", "expert_tensor")]
    engine, same_rows = r.rollout.parallel, r.parallel.tensor_model_parallel_size * r.parallel.context_parallel_size
    yield (
        engine.sequence_parallel and engine.tensor_model_parallel_size == 1,
        "rollout.parallel.sequence_parallel rollout.parallel.tensor_model_parallel_size",
        "sequence parallelism needs a tensor parallel size above 1",
    )
    yield (
        all(getattr(engine, size) == getattr(r.parallel, size) for size in sizes),
        " ".join(f"rollout.parallel.{size}" for size in sizes),
        "the trainer's layout already: set rollout.parallel = null, and engines and trainer share one set of weights",
    )
    largest, smallest = sorted((engine.tensor_model_parallel_size, same_rows), reverse=True)
    yield (
        largest % smallest > 0,
        "rollout.parallel.tensor_model_parallel_size",
        f"should divide, or be a multiple of, the {same_rows} ranks that train on the same rows "
        "(parallel.tensor_model_parallel_size x parallel.context_parallel_size)",
    )


def _algorithm_conflicts(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Those of the objective's terms among each other, as `_conflicts`."""
    a, c = r.algorithm, r.algorithm.correction
    yield (
        (a.advantage == "max_at_k") != (a.best_of is not None),
        "algorithm.advantage algorithm.best_of",
        "max_at_k needs best_of, and no other advantage knows it",
    )
    yield (
        a.best_of is not None and a.best_of > a.group_size,
        "algorithm.best_of algorithm.group_size",
        "the best are chosen among a group's rollouts",
    )
    yield (
        a.advantage == "component_std" and not r.environment.components,
        "algorithm.advantage environment.format_reward environment.overlong_buffer",
        "normalising each component needs a second one",
    )
    yield (
        a.advantage == "component_std" and a.kl_in == "reward",
        "algorithm.advantage algorithm.kl_in",
        "a normalised penalty would not depend on its coefficient; set kl_in = 'loss'",
    )
    yield (
        a.advantage == "group_std" and a.kl_in == "reward" and a.kl_coefficient > 0,
        "algorithm.advantage algorithm.kl_in",
        "where a group's answers earn the same, the penalty alone would be scaled to a deviation of 1; "
        "set another advantage",
    )
    yield (
        a.advantage == "batch_std" and a.resample_rounds > 0,
        "algorithm.advantage algorithm.resample_rounds",
        "a group whose rewards are equal teaches something there",
    )
    yield (
        a.router_replay and a.perception.coefficient > 0,
        "algorithm.router_replay algorithm.perception.coefficient",
        "the engine chose its experts seeing the media that the masked policy must not see",
    )
    yield (
        a.curriculum is not None and weighted(a.curriculum.share, a.prompts_per_step) == 0,
        "algorithm.curriculum algorithm.prompts_per_step",
        "no prompt of a step would be drawn by its solve rate",
    )
    yield (
        a.dual_clip is not None and a.surrogate != "clipped",
        "algorithm.dual_clip algorithm.surrogate",
        "only the clipped surrogate has a second bound",
    )
    asked = (
        ("kl_in", a.kl_in == "reward"),
        ("reference", a.reference is not None),
        ("reference_every", a.reference_every > 0),
    )
    for key, given in asked:
        yield (
            given and a.kl_coefficient == 0,
            f"algorithm.{key} algorithm.kl_coefficient",
            "there is no reference policy without a weight of the divergence",
        )
    yield (
        a.reference is not None and a.reference_every > 0,
        "algorithm.reference algorithm.reference_every",
        "a checkpoint does not move",
    )
    yield (
        a.surrogate == "none" and (a.kl_coefficient == 0 or a.kl_in == "reward"),
        "algorithm.surrogate algorithm.kl_coefficient algorithm.kl_in",
        "without a policy gradient the divergence must be in the loss",
    )
    rewarded = (
        ("resample_rounds", a.resample_rounds > 0),
        ("curriculum", a.curriculum is not None),
        ("correction.level", c.level != "none"),
    )
    for key, given in rewarded:
        yield (
            a.surrogate == "none" and given,
            f"algorithm.surrogate algorithm.{key}",
            "there is no policy gradient that rewards or corrections would weigh",
        )
    yield (
        a.ratio == "sequence" and c.level == "token",
        "algorithm.ratio algorithm.correction.level",
        "weights of single tokens do not belong to a ratio of the whole completion; set 'sequence' or 'geometric'",
    )
    for setting in _corrections_on(c):
        yield (
            a.old_log_probs == "rollout",
            f"algorithm.old_log_probs {setting}",
            "the ratio to what the engine sampled with corrects already; set old_log_probs = 'trainer'",
        )
    yield c.low >= c.high, "algorithm.correction.low algorithm.correction.high", "low should be below high"
    for key, given in (("bound", c.bound == "mask"), ("low", c.low > 0)):
        yield (
            given and c.level == "none",
            f"algorithm.correction.{key} algorithm.correction.level",
            "there is no weight to bound; set a level",
        )
    for key in ("entropy_coefficient", "masked_entropy_coefficient"):
        yield (
            getattr(a.perception, key) > 0 and a.perception.coefficient == 0,
            f"algorithm.perception.{key} algorithm.perception.coefficient",
            "it keeps the divergence in check, which has no weight",
        )
    yield (
        a.perception.entropy_coefficient > 0 and a.entropy_coefficient > 0,
        "algorithm.perception.entropy_coefficient algorithm.entropy_coefficient",
        "one wants a low entropy and the other a high one",
    )


def _corrections_on(section: CorrectionSection) -> list[str]:
    """Keys of the corrections that are asked for."""
    asked = {"level": section.level != "none", "drop_mean": section.drop_mean, "drop_max": section.drop_max}
    return [f"algorithm.correction.{key}" for key, value in asked.items() if value]


def check_world(recipe: Recipe, world_size: int) -> None:
    """Refuses a number of processes over which the work of the recipe does not divide.

    Raises:
        UserError: names the keys, their values and the number of processes.
    """
    if world_size < 1:
        raise UserError(f"world size = {world_size}: should be at least 1")
    if world_size % recipe.parallel.model_parallel_size:
        keys = _settings(recipe, "parallel.tensor_model_parallel_size", "parallel.context_parallel_size")
        raise UserError(f"{keys}: their product should divide the world size, which is {world_size}")
    _check_expert_ranks(recipe, "parallel", recipe.parallel, world_size)
    if recipe.rollout.parallel is not None:
        engine = recipe.engine_parallel
        if world_size % engine.tensor_model_parallel_size:
            keys = _settings(recipe, "rollout.parallel.tensor_model_parallel_size")
            raise UserError(f"{keys}: should divide the world size, which is {world_size}")
        _check_expert_ranks(recipe, "rollout.parallel", engine, world_size)
    data_parallel = recipe.parallel.data_parallel_size(world_size)
    if recipe.algorithm.prompts_per_step % (recipe.algorithm.minibatches * data_parallel):
        keys = _settings(recipe, "algorithm.prompts_per_step", "algorithm.minibatches")
        raise UserError(f"{keys}: a minibatch should give each of {data_parallel} data-parallel ranks whole groups")
    if recipe.warmup is not None and recipe.warmup.batch_size % data_parallel:
        keys = _settings(recipe, "warmup.batch_size")
        raise UserError(f"{keys}: should be a multiple of the data parallel size, which is {data_parallel}")


def _check_expert_ranks(recipe: Recipe, section: str, parallel: ParallelSection, world_size: int) -> None:
    shared, same = parallel.expert_parallel_size, parallel.model_parallel_size
    expert = f"{section}.expert_model_parallel_size", f"{section}.expert_tensor_parallel_size"
    if world_size % shared:
        raise UserError(
            f"{_settings(recipe, *expert)}: their product should divide the world size, which is {world_size}"
        )
    if parallel.tensor_model_parallel_size % parallel.expert_tensor_parallel_size:
        # Parts of an expert would belong to ranks with other rows, which do not keep step with each other.
        keys = _settings(recipe, expert[1], f"{section}.tensor_model_parallel_size")
        raise UserError(f"{keys}: the first should divide the second")
    if max(shared, same) % min(shared, same):
        # Ranks with the same rows would keep step with different ranks, and some wait for ever.
        raise UserError(
            f"{_settings(recipe, *expert)}: their product should divide, or be a multiple of, tensor times context "
            f"parallel size, which is {same}"
        )


_SECRET = re.compile(r"oc\.env:\s*\w*(?:TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY)\w*", re.IGNORECASE)
"""A variable of the environment that an interpolation would make readable."""


class _Layer(NamedTuple):
    """One file or one override; later layers win."""

    source: str
    values: DictConfig


def load_recipe(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Recipe:
    """Merges what the file extends, the file, and `key=value` overrides, in this order; then validates.

    Raises:
        UserError: one line with the dotted key, the value, where it was set and what would be accepted.
    """
    layers = list(_file_layers(Path(path), chain=(), seen=set()))
    layers += [_override_layer(text) for text in overrides]
    for layer in layers:
        if secret := _SECRET.search(OmegaConf.to_yaml(layer.values)):
            raise UserError(f"{secret[0]} in {layer.source}: the recipe is written into run folders, secrets are not")
    try:
        merged = OmegaConf.merge(*(layer.values for layer in layers))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_one_line(error)}") from None
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(_refusal(error, layers, str(path))) from None


def recipe_of_run(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """What the run in a folder was started with.

    Raises:
        UserError: none was.
    """
    if not (run / "recipe.yaml").exists():
        raise UserError(f"{run} is not the folder of a run: it has no recipe.yaml")
    return load_recipe(run / "recipe.yaml", overrides)


def save_recipe(recipe: Recipe, path: str | os.PathLike) -> None:
    """Writes every value, defaults included; `load_recipe(path)` gives an equal recipe."""
    OmegaConf.save(OmegaConf.create(_escape(recipe.model_dump())), Path(path))


def _file_layers(path: Path, chain: tuple[Path, ...], seen: set[Path]) -> Iterator[_Layer]:
    """Bases first, depth first; a file that is reached twice counts once, at its first place."""
    if path.resolve() in [link.resolve() for link in chain]:
        raise UserError(f"extends runs in a circle: {' -> '.join(map(str, (*chain, path)))}")
    if path.resolve() in seen:
        return
    seen.add(path.resolve())
    origin = f" (extended by {chain[-1]})" if chain else ""
    try:
        values = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"recipe {path}{origin} does not exist") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"recipe {path}{origin} cannot be read: {_one_line(error)}") from None
    if not isinstance(values, DictConfig):
        raise UserError(f"recipe {path}{origin} is a list: a recipe is a mapping of keys to values")

    bases = OmegaConf.to_container(values).pop("extends", [])
    values.pop("extends", None)
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"extends = {bases!r} in {path}: should be a path or a list of paths")
    for base in bases:
        yield from _file_layers(path.parent / base, (*chain, path), seen)
    yield _Layer(str(path), values)


def _override_layer(text: str) -> _Layer:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override {text!r} should be key=value, such as optimizer.learning_rate=1e-3")
    try:
        return _Layer(f"override {text!r}", OmegaConf.from_dotlist([text]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"override {text!r} cannot be read: {_one_line(error)}") from None


def _settings(recipe: Recipe, *keys: str) -> str:
    """`key = value, key = value` of dotted keys."""
    named = []
    for key in keys:
        value: Any = recipe
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        named.append(f"{key} = {_shown(value)}")
    return ", ".join(named)


def _shown(value: Any) -> str:
    return _one_line(repr(value.model_dump() if isinstance(value, Section) else value), limit=60)


def _refusal(error: ValidationError, layers: Sequence[_Layer], path: str) -> str:
    """One line for the first mistake; unknown keys first, since a misspelt key is a missing one too."""
    unknown = ("extra_forbidden", "invalid_key")
    first = min(error.errors(), key=lambda e: e["type"] not in unknown)
    kind, key = first["type"], ".".join(map(str, first["loc"]))
    if kind == "value_error":
        error = first["ctx"]["error"]  # that of `_conflicts` names its keys
        return f"{error.under(key) if isinstance(error, Conflict) else error} (in {path})"
    if kind == "missing":
        meaning = dict(_fields(Recipe))[key].description
        return f"{key} is missing in {path}: should be {_one_line(meaning).rstrip('.')}"
    source = _source(first["loc"], layers) or path
    if kind in unknown:
        return f"unknown key '{key}' in {source}: {_nearest(key)}"
    accepted = "should be a mapping" if kind == "model_type" else first["msg"].removeprefix("Input ")
    return f"{key} = {_one_line(repr(first['input']), limit=60)} in {source}: {accepted}"


def _source(location: tuple[int | str, ...], layers: Sequence[_Layer]) -> str | None:
    """The last file or override that sets the key, or the list that it is an item of; None: interpolated."""
    for layer in reversed(layers):
        node: Any = OmegaConf.to_container(layer.values)
        for key in location:
            if not isinstance(node, dict) or key not in node:
                break
            node = node[key]
        else:
            return layer.source
        if isinstance(node, list):
            return layer.source
    return None


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted key and field of everything in a section, inner sections included."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, Section):
                yield from _fields(option, f"{prefix}{name}.")


def _nearest(key: str) -> str:
    """Hint for an unknown key: the closest name in its section, else anywhere, else what the section has."""
    keys = [known for known, _ in _fields(Recipe)]
    if key in keys:
        return "dots are for overrides, a file nests its keys"
    section, _, name = key.rpartition(".")
    siblings = [known for known in keys if known.rpartition(".")[0] == section]
    if not siblings:  # of one of several alike, such as environment.sources.NAME
        siblings = [known for known in keys if known.rpartition(".")[0] == section.rpartition(".")[0]]
    for candidates in (siblings, keys):
        names = [known.rpartition(".")[2] for known in candidates]
        if close := get_close_matches(name, names, n=1):
            meant = [f"'{known}'" for known in candidates if known.rpartition(".")[2] == close[0]]
            return f"did you mean {' or '.join(meant)}?"
    return f"should be one of {', '.join(siblings)}"


def _escape(value: Any) -> Any:
    """Shields strings that OmegaConf would read as an `${interpolation}` or as `???`, a missing value."""
    if isinstance(value, dict):
        return {key: _escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escape(inner) for inner in value]
    if isinstance(value, str):
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        return re.sub(r"^(\\*\?\?\?)\Z", r"\\\1", value)
    return value


def _one_line(message: object, limit: int = 200) -> str:
    text = one_line(message)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
