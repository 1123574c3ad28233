"""Layouts over which a model does not divide, refused before a model is built."""

import math
from typing import TYPE_CHECKING

from megarl.errors import UserError
from megarl.models.families import FAMILIES
from megarl.models.hf_config import key_of
from megarl.recipe import ParallelSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_heads(config: "PreTrainedConfig", tensor_parallel: int, section: str = "parallel") -> None:
    """Refuses attention heads that do not divide over the tensor-parallel ranks, as Megatron would.  `section` of the
    recipe asks for them."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    asked = f"{section}.tensor_model_parallel_size = {tensor_parallel}"
    counts = {key_of(config, "num_attention_heads"): text.num_attention_heads}
    if vision is not None and FAMILIES[config.model_type].split_tower:
        counts["vision_config.num_heads"] = vision.num_heads
    for key, heads in counts.items():
        if heads % tensor_parallel:
            raise UserError(f"{asked}: should divide {key} = {heads}")
    groups = text.num_key_value_heads
    if groups % tensor_parallel and tensor_parallel % groups:
        key = key_of(config, "num_key_value_heads")
        raise UserError(f"{asked}: should divide, or be a multiple of, {key} = {groups}")


def check_context(config: "PreTrainedConfig", parallel: ParallelSection) -> None:
    """Refuses a ring for a model that sees, and for Ulysses heads that do not divide over the context-parallel ranks,
    which share those of a tensor-parallel rank; key-value heads are repeated until they do."""
    tensor_parallel, context_parallel = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.cp_comm_type == "p2p":
        if FAMILIES[config.model_type].media:
            raise UserError(
                f"parallel.cp_comm_type = 'p2p': should be 'a2a' (Ulysses) for a {config.model_type}: a ring is for "
                "text alone, and one over pictures and videos was not proved"
            )
        return
    text = config.get_text_config()
    heads = text.num_attention_heads // tensor_parallel
    groups = max(1, text.num_key_value_heads // tensor_parallel)
    if heads % context_parallel or heads % math.lcm(groups, context_parallel):
        raise UserError(
            f"parallel.context_parallel_size = {context_parallel}: should divide the heads of a tensor-parallel rank, "
            f"{heads}, which have {groups} key-value heads"
        )


def check_router_replay(config: "PreTrainedConfig", router_replay: bool) -> None:
    """Refuses to replay the choices of routers that are not there."""
    if router_replay and not getattr(config.get_text_config(), "num_experts", None):
        raise UserError(f"algorithm.router_replay = True: should be false, since a {config.model_type} has no experts")


def check_experts(config: "PreTrainedConfig", parallel: ParallelSection, section: str = "parallel") -> None:
    """Refuses experts that do not divide over the ranks, or that are not there.  `section` of the recipe is
    `parallel`."""
    text = config.get_text_config()
    experts = getattr(text, "num_experts", None)
    shared = {
        "expert_model_parallel_size": ("num_experts", experts),
        "expert_tensor_parallel_size": ("moe_intermediate_size", getattr(text, "moe_intermediate_size", None)),
    }
    for name, (key, value) in shared.items():
        ranks = getattr(parallel, name)
        if not experts and ranks > 1:
            raise UserError(f"{section}.{name} = {ranks}: should be 1, since a {config.model_type} has no experts")
        if experts and value % ranks:
            raise UserError(f"{section}.{name} = {ranks}: should divide {key_of(config, key)} = {value}")
    if experts and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"{section}.sequence_parallel = False: should be true where a mixture of experts has "
            f"{section}.tensor_model_parallel_size = {parallel.tensor_model_parallel_size}"
        )
