"""Patches to megatron-core."""

import functools

from megarl.platform.kernels import Kernels
from megarl.platform.patches import CORE, Patch


def _always(kernels: Kernels) -> bool:
    return True


def _torch_attention(kernels: Kernels) -> bool:
    return kernels.attention == "torch"


def _paged_attention() -> None:
    from megatron.core.transformer import attention

    from megarl.platform.attention import paged_decode, paged_varlen

    attention.is_fa_min_version = lambda *args: True
    attention.flash_attn_varlen_func = paged_varlen
    attention.flash_attn_with_kvcache = paged_decode


def _finite_kv_memory() -> None:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    stock = DynamicInferenceContext._allocate_memory_buffer

    @functools.wraps(stock)
    def allocate(self):
        stock(self)
        self.memory_buffer.zero_()

    DynamicInferenceContext._allocate_memory_buffer = allocate


def _evict_parents_of_live_blocks() -> None:
    import torch
    from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

    stock = KVBlockAllocator.evict_lru_blocks

    @functools.wraps(stock)
    def evict(self, num_blocks_needed):
        cached = (self.block_ref_counts == 0) & (self.block_hashes != -1)
        parents = self.block_parent_id[cached].long()
        self.block_child_count.zero_().index_add_(
            0, parents[parents >= 0], torch.ones_like(self.block_child_count[: int((parents >= 0).sum())])
        )
        done = stock(self, num_blocks_needed)
        evicted = (cached & (self.block_hashes == -1)).nonzero().flatten()
        self.block_parent_id[torch.isin(self.block_parent_id, evicted.to(self.block_parent_id.dtype))] = -1
        return done

    KVBlockAllocator.evict_lru_blocks = evict


def _one_split() -> None:
    from megatron.core.transformer import attention

    stock = attention.flash_attn4_varlen_func

    @functools.wraps(stock)
    def one_split(*args, **kwargs):
        return stock(*args, **{**kwargs, "num_splits": 1})

    attention.flash_attn4_varlen_func = one_split


def _torch_kv_append() -> None:
    from megatron.core.inference.contexts import dynamic_context

    dynamic_context.triton_append_key_value_cache = None  # the context has a torch path of its own


def _inference_without_autograd() -> None:
    import torch
    import torch.nn.functional as F
    from megatron.core.tensor_parallel import layers, mappings

    def skip(function, condition, result):
        stock = function.apply

        def apply(*args):
            return result(*args) if not torch.is_grad_enabled() and condition(*args) else stock(*args)

        function.apply = staticmethod(apply)

    for region in (mappings._CopyToModelParallelRegion, mappings._ReduceFromModelParallelRegion):
        skip(region, lambda input, group: group.size() == 1, lambda input, group: input)
    skip(
        layers.LinearWithGradAccumulationAndAsyncCommunication,
        lambda input, weight, bias, fusion, allreduce, sequence_parallel, *_: not sequence_parallel,
        lambda input, weight, bias, *_: F.linear(input, weight, bias),
    )


def _swiglu_kernels() -> None:
    from megatron.core.fusions import fused_bias_swiglu

    from megarl.platform import swiglu_kernels

    fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = swiglu_kernels.swiglu, swiglu_kernels.swiglu_back


def _resharding_waits_for_its_sources() -> None:
    import torch
    from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

    stock = NCCLCopyService.run

    @functools.wraps(stock)
    def run(self):
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        stock(self)

    NCCLCopyService.run = run


def _torch_adam_state() -> None:
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    stock_set = DistributedOptimizer._set_main_param_and_optimizer_states
    stock_load = DistributedOptimizer.load_state_dict
    stock_sharded = DistributedOptimizer.sharded_state_dict

    def set_states(self, model_param, tensors):
        tensors.setdefault("step", None)  # kept in the common state
        return stock_set(self, model_param, tensors)

    def load_state_dict(self, state_dict):
        stock_load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:  # else all parameters share one tensor, and each update counts many times
                state["step"] = state["step"].clone()

    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, **kwargs):
        for group in self.optimizer.param_groups:  # the state's shapes are asked for before a first step has made it
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    self.optimizer.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
        return stock_sharded(self, model_sharded_state_dict, is_loading, **kwargs)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer.sharded_state_dict = sharded_state_dict


def _checkpoint_results_in_process() -> None:
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = queue.Queue()
    filesystem_async.get_write_results_queue = lambda mp_mode="spawn": results


PATCHES = [
    Patch(
        "paged-attention",
        "the dynamic engine needs flash-attention's paged kernels; torch versions stand in",
        CORE,
        "megatron/core/transformer/attention.py",
        'HAVE_FA4 or HAVE_FA3 or is_fa_min_version("2.7.3")',
        _torch_attention,
        _paged_attention,
    ),
    Patch(
        "finite-kv-memory",
        "the torch stand-ins read whole pages and mask what a request has not written: there, NaN in memory that "
        "was never initialised would still become NaN in the output",
        CORE,
        "megatron/core/inference/contexts/dynamic_context.py",
        "self.memory_buffer = torch.empty(",
        _torch_attention,
        _finite_kv_memory,
    ),
    Patch(
        "evict-parents-of-live-blocks",
        "a block that is computed twice may become the parent of a block of another request and end before it; "
        "the prefix cache then asserts that it has nothing to evict, where only cached children should count",
        CORE,
        "megatron/core/inference/contexts/kv_block_allocator.py",
        "heap = [(ts[i], bid[i], i) for i in range(num_cached) if child_count[i] == 0]",
        _always,
        _evict_parents_of_live_blocks,
    ),
    Patch(
        "fa4-splits",
        "FlashAttention-4's split-KV kernel refuses Hopper, and num_splits=0 may choose it",
        CORE,
        "megatron/core/transformer/attention.py",
        "num_splits=0 if not self.batch_invariant_mode else 1",
        lambda kernels: kernels.attention == "flash-attn-4",
        _one_split,
    ),
    Patch(
        "kv-append",
        "a Triton kernel writes the KV cache wherever Triton can be imported, a CPU included",
        CORE,
        "megatron/core/inference/contexts/dynamic_context.py",
        "if triton_append_key_value_cache is not None and not self.cache_mla_latent:",
        lambda kernels: not kernels.gpu,
        _torch_kv_append,
    ),
    Patch(
        "inference-without-autograd",
        "each linear and each collective over one rank is an autograd node in inference too: a tenth of an engine "
        "step on a CPU",
        CORE,
        "megatron/core/tensor_parallel/mappings.py",
        "return _ReduceFromModelParallelRegion.apply(input_, group)",
        lambda kernels: not kernels.gpu,
        _inference_without_autograd,
    ),
    Patch(
        "swiglu-kernels",
        "the fused SwiGLU of a dense layer is compiled by torch again for new numbers of tokens: seconds for each "
        "size of a decode step",
        CORE,
        "megatron/core/fusions/fused_bias_swiglu.py",
        "return F.silu(y_1) * y_2",
        lambda kernels: kernels.gpu,
        _swiglu_kernels,
    ),
    Patch(
        "resharding-waits-for-its-sources",
        "what stays on a rank is copied on a stream of its own, which does not wait for the optimizer's step or for "
        "the contiguous copy of a slice that it reads",
        CORE,
        "megatron/core/resharding/copy_services/nccl_copy_service.py",
        "with torch.no_grad(), torch.cuda.stream(self._copy_stream):",
        lambda kernels: kernels.gpu,
        _resharding_waits_for_its_sources,
    ),
    Patch(
        "torch-adam-state",
        "checkpoints of the distributed optimizer expect apex's or transformer-engine's Adam, whose state has "
        "no step of its own",
        CORE,
        "megatron/core/optimizer/distrib_optimizer.py",
        "# Extract 'step', for non-Apex/TE support.",
        lambda kernels: not kernels.te,
        _torch_adam_state,
    ),
    Patch(
        "checkpoint-results-in-process",
        "each rank starts a second Python process at its first save, only to hold the queue through which its own "
        "threads say what they wrote: 650 MB and seconds of imports; it dies of the signal that asks the job to save "
        "and stop, and stays behind when the rank is killed",
        CORE,
        "megatron/core/dist_checkpointing/strategies/filesystem_async.py",
        "_results_queue = ctx.Manager().Queue()",
        _always,
        _checkpoint_results_in_process,
    ),
]
