"""From a Hugging Face checkpoint to the policy on this rank, and back."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import megarl.platform.prepare  # noqa: F401

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import SafetensorError

from megarl.data.folder import replaced_folder
from megarl.errors import UserError, one_line
from megarl.models import invariant as invariant_modules
from megarl.models.families import Family
from megarl.models.hf_config import family_of
from megarl.models.lora import Adapters, LoraOptions
from megarl.models.router_replay import install
from megarl.models.shard_writer import ShardWriter
from megarl.models.weight_files import check_weights
from megarl.platform.invariant import settle_torch
from megarl.platform.kernels import kernels


@dataclass(frozen=True)
class ModelOptions:
    dtype: torch.dtype
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: int = 1
    """Ranks that share the weights of each expert."""
    cp_comm_type: str = "a2a"
    """How context-parallel ranks attend: `a2a`, or `p2p` where transformer-engine is and no media."""
    vision_dp_when_cp: bool = True
    """Context-parallel ranks encode a part of a row's media each and share the features; else all of it each."""
    sequence_parallel: bool = False
    recompute: str = "none"
    """Of the language model's layers, what the backward pass computes again: `none`, `selective` (MLPs) or `full`."""
    freeze: tuple[str, ...] = ()
    """Of `vision`, `projector`, `language`."""
    router_replay: bool = False
    """Record the experts of each token in the engine, and replay them in training."""
    lora: LoraOptions | None = None
    """Train adapters of the language model in place of its weights."""
    deterministic: bool = False
    """Trainer and engine compute the same bits."""


@dataclass(frozen=True, eq=False)
class Policy:
    model: torch.nn.Module
    bridge: AutoBridge
    """Knows the way of every weight between Megatron's layout and Hugging Face's."""
    adapters: Adapters | None = None

    def merged(self) -> AbstractContextManager[None]:
        """Inside, the weights alone say what the policy is, see `Adapters.merged`.  Collective."""
        return nullcontext() if self.adapters is None else self.adapters.merged()

    def as_sampled(self) -> AbstractContextManager[None]:
        """Inside, the weights are those that rollouts are sampled with.  Collective."""
        merges = self.adapters is not None and self.adapters.options.merge
        return self.adapters.merged() if merges else nullcontext()

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole tensor, on the CPU, as a Hugging Face checkpoint has them, one at a time; adapters are merged
        into them.  Collective."""
        with self.merged():
            yield from self.base_weights()

    def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`hf_weights` as they are, whatever adapters add to them.  Collective."""
        for name, tensor in self.bridge.export_hf_weights(
            [self.model.bridged], cpu=True, show_progress=False, merge_adapter_weights=False
        ):
            yield name.replace(".base_layer.", "."), tensor  # peft's name for what an adapter is added to

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Likewise those of the adapters, `....lora_A.weight` and `....lora_B.weight`.  Collective."""
        if self.adapters is not None:
            yield from self.bridge.export_adapter_weights([self.model.bridged], cpu=True, show_progress=False)


def load_policy(folder: Path, options: ModelOptions) -> Policy:
    """Builds this rank's shard of the model and fills it from a checkpoint folder.

    Raises:
        UserError: no checkpoint there, a family that megarl does not know, or what `check_weights` refuses.
    """
    family = family_of(folder)
    check_weights(folder)
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = _model(family, bridge, options)
    bridge.load_hf_weights([model.bridged])
    if options.freeze:
        frozen = {part: part in options.freeze for part in ("language", "vision", "projector")}
        model.freeze(frozen["language"], frozen["vision"], frozen["projector"])
    return Policy(model, bridge, options.lora and Adapters(model, options.lora))


def empty_copy(policy: Policy, folder: Path, options: ModelOptions, groups: ProcessGroupCollection) -> torch.nn.Module:
    """This rank's shard of the same model in another layout, for inference.  Its weights are memory as it was found:
    who asks for it fills it (`megarl.rollout.sync`).

    Args:
        folder: that `policy` was loaded from.
        options: with the sizes of `groups`.
    """
    model = _model(family_of(folder), policy.bridge, options, groups).eval()
    if options.lora:
        Adapters(model, options.lora).switch(not options.lora.merge)
    return model


def _model(family: Family, bridge: AutoBridge, options: ModelOptions, groups: ProcessGroupCollection | None = None):
    if options.deterministic:
        settle_torch()
    model = family.load("model")(_megatron_config(bridge, options), groups)
    model = model.to("cuda" if kernels().gpu else "cpu", options.dtype)
    if options.deterministic:
        invariant_modules.install(model)
    if options.router_replay:
        install(model)
    return model


def fill(policy: Policy, folder: Path) -> None:
    """Writes the weights of another checkpoint, of the same sizes, into the policy's module, in place.  Collective;
    refuses what `check_weights` does."""
    check_weights(folder)
    policy.bridge.load_hf_weights([policy.model.bridged], folder)
    if policy.adapters:
        policy.adapters.clear()


def _megatron_config(bridge: AutoBridge, options: ModelOptions):
    """Bridge's provider, which is Megatron's TransformerConfig too, for this machine and layout."""
    config = bridge.to_megatron_provider(load_weights=False)
    rope = bridge.hf_pretrained.config.get_text_config().rope_parameters
    if "mrope_section" in rope:  # Bridge's Qwen2.5-VL keeps its own default
        config.mrope_section = rope["mrope_section"]
    half = options.dtype is torch.bfloat16
    settings = dict(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=options.expert_tensor_parallel_size,
        cp_comm_type=options.cp_comm_type,
        vision_dp_when_cp=options.vision_dp_when_cp,
        sequence_parallel=options.sequence_parallel,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        autocast_dtype=options.dtype,
        bf16=half,
        fp16=False,
        perform_initialization=False,
        calculate_per_token_loss=True,
        # Needs NVIDIA's apex; the trainer switches it on in the layers that do not.
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )
    if options.recompute == "full":
        settings.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif options.recompute == "selective":
        mlp = "moe" if config.num_moe_experts else "mlp"
        settings.update(recompute_granularity="selective", recompute_modules=[mlp])
    if not kernels().te:
        settings.update(
            transformer_impl="local",
            persist_layer_norm=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
        )
    elif config.activation_func is F.silu and config.gated_linear_unit:
        settings.update(bias_activation_fusion=True)
    if config.num_moe_experts:
        settings.update(_mixture_settings(options))
    if options.deterministic:
        settings.update(invariant_modules.settings())
    for name, value in settings.items():
        setattr(config, name, value)
    config.finalize()
    # Some of Bridge's providers switch it on by themselves where tensor parallelism is on.
    config.sequence_parallel = options.sequence_parallel
    return config


def _mixture_settings(options: ModelOptions) -> dict:
    """Every token goes to the experts that its router scores highest, in training and in the engine alike: none is
    dropped, and no loss balances the experts, so padding, which is routed like any token, is counted nowhere."""
    return dict(
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_expert_capacity_factor=None,
        moe_router_dtype="fp32",
        moe_enable_routing_replay=options.router_replay,
        moe_router_fusion=False,  # knows nothing of replay
        moe_token_dispatcher_type="alltoall",
        # Of the engine's own dispatchers, which these layers do not use, the one that reserves no memory.
        inference_moe_token_dispatcher_type="nccl",
        moe_grouped_gemm=kernels().te,
        moe_permute_fusion=kernels().te,
    )


def save_checkpoint(policy: Policy, folder: Path, processor) -> None:
    """Writes the policy as a Hugging Face checkpoint: weights, config, processor and tokenizer, and the generation
    config of the checkpoint that it was loaded from.  Collective; rank 0 writes, with one file of at most 1 GiB in
    memory at a time.

    The folder appears whole or not at all, after each tensor was read back.

    Raises:
        UserError: a file cannot be written, or is not what was written when it is read.
    """
    with writing(folder):
        _save_checkpoint(policy, folder, processor)
    dist.barrier()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Trouble of the disk is said in one line.

    Raises:
        UserError: in place of what says that a file was not written.
    """
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{folder} was not written: {where}{error.strerror or error}") from error
    except SafetensorError as error:  # its own kind, also for a full disk
        raise UserError(f"{folder} was not written: {one_line(error)}") from error


def _save_checkpoint(policy: Policy, folder: Path, processor) -> None:
    main = dist.get_rank() == 0
    with replaced_folder(folder) if main else nullcontext() as partial:
        writer = ShardWriter(partial) if main else None
        for name, tensor in policy.hf_weights():
            if writer:
                writer.add(name, tensor)
        if writer:
            writer.close()
            policy.bridge.hf_pretrained.config.save_pretrained(partial)
            processor.save_pretrained(partial)
            generation = Path(policy.bridge.hf_pretrained.model_name_or_path, "generation_config.json")
            if generation.is_file():
                shutil.copyfile(generation, partial / generation.name)
