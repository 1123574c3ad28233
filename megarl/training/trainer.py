"""Forward and backward over packed rows, and the optimizer: what changes the weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.models.router_replay import RowReplay
from megarl.packing.alignment import Alignment
from megarl.packing.rows import PackedRow, idle_row
from megarl.parallel import experts
from megarl.platform.to_device import to_device
from megarl.training.log_probs import LogProbRequest, token_log_probs
from megarl.training.offload import Offload


@dataclass(frozen=True)
class OptimizerOptions:
    learning_rate: float
    total_updates: int
    min_learning_rate_ratio: float = 0.1
    warmup_steps: int = 0
    schedule: str = "constant"
    """`constant`, `linear` or `cosine`, from the peak to the minimum over `total_updates`."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0


@dataclass(frozen=True)
class UpdateResult:
    grad_norm: float
    learning_rate: float
    applied: bool
    """False where loss or gradients were not finite and the step was skipped."""


class Trainer:
    """Megatron's DDP and distributed optimizer around the policy.

    Args:
        model: the policy; its parameters become views into DDP's buffers, in place.
        temperature: of the rollouts; log-probabilities are of the tempered distribution.
        log_prob_chunk: completion tokens whose logits exist at a time; None: all of a row's.
        changed: called after each update, for what is computed from the weights.
    """

    def __init__(
        self, model, temperature: float, log_prob_chunk: int | None, changed: Callable[[], None] = lambda: None
    ):
        self.model, self.changed = model, changed
        self._config = model.config
        self._device = next(model.parameters()).device
        self._temperature, self._chunk = temperature, log_prob_chunk
        self._replay = RowReplay(model)
        self._ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
            ),
            model,
        )
        # The loss is divided before it is differentiated, see `_run`: Megatron would go over all gradients for that.
        self._config.finalize_model_grads_func = lambda model, tokens, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )
        _accumulate_in_products(model)
        self._forward_backward = get_forward_backward_func()
        self._offload = Offload(self._device)

    @property
    def alignment(self) -> Alignment:
        """What the rows that it is given are packed for."""
        c = self._config
        return Alignment.of(c.tensor_model_parallel_size, c.context_parallel_size, c.cp_comm_type)

    def begin(self, options: OptimizerOptions) -> None:
        """Starts a phase of training with a fresh optimizer and schedule."""
        self.bring_back()
        half = self._config.params_dtype is torch.bfloat16
        minimum = options.learning_rate * (1.0 if options.schedule == "constant" else options.min_learning_rate_ratio)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.learning_rate,
                min_lr=minimum,
                adam_beta1=options.adam_beta1,
                adam_beta2=options.adam_beta2,
                adam_eps=options.adam_eps,
                weight_decay=options.weight_decay,
                clip_grad=options.clip_grad,
                bf16=half,
                params_dtype=self._config.params_dtype,
                use_distributed_optimizer=True,
            ),
            [self._ddp],
        )
        self.scheduler = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=options.learning_rate,
            min_lr=minimum,
            lr_warmup_steps=options.warmup_steps,
            lr_decay_steps=max(options.total_updates, options.warmup_steps + 1),
            lr_decay_style=options.schedule,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,  # a run that goes on for more steps has the schedule of so many
        )
        self.scheduler.step(1)  # the first update is made at the first step's rate, not at 0

    @property
    def optimizer(self):
        """Megatron's, its state in place again if it was away."""
        self.bring_back()
        return self._optimizer

    def offload(self) -> None:
        """Gives up the GPU's memory of the optimizer's state, which goes to the host's while what follows is computed,
        and of the gradients, which are nobody's between two updates.  Whoever needs them brings them back: the state's
        way back begins with `score` and ends before the optimizer's step."""
        of_weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        self._offload.leave(
            tensor
            for optimizer in self._optimizer.chained_optimizers
            for tensor in _state(optimizer)
            # float32 weights are their own masters, and stay
            if tensor.device == self._device and tensor.untyped_storage().data_ptr() not in of_weights
        )
        self._ddp.offload_grad_buffers(synchronize=False, empty_cache=False)

    def bring_back(self) -> None:
        """The optimizer's state, if it is away: all that is given to the GPU from now on finds it there."""
        self._offload.wait()

    @property
    def offloaded_bytes(self) -> int:
        """Of state that the last `offload` copied."""
        return self._offload.bytes

    @torch.no_grad()
    def score(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Log-probabilities of the rows' completion tokens under the present weights: one float32
        `[completion tokens]` per row, on the CPU."""
        self._offload.begin_return()
        training = self._ddp.training
        self._ddp.eval()
        self._replay.begin_comparing()
        try:
            scores = self._run(rows, lambda row, output: output[0], forward_only=True)
        finally:
            self._ddp.train(training)
        return [score.cpu() for score in scores]

    def rerouted(self) -> float | None:
        """Of the last `score`, over all ranks: see `megarl.models.router_replay.RowReplay.rerouted`.  Collective."""
        return self._replay.rerouted()

    def update(
        self,
        rows: Sequence[PackedRow],
        loss: Callable[..., tuple[Tensor, Tensor]],
        twin: Callable[[PackedRow], PackedRow] | None = None,
    ):
        """One optimizer step on the rows of this rank.

        Args:
            rows: microbatches; ranks may have different numbers of them, but at least one each.
            loss: `(row, log-probabilities [n], entropies [n]) -> (summed loss, sums to report)`.
            twin: gives a row with the same targets, which goes through the model beside the row; `loss` is given its
                log-probabilities and entropies too.

        Returns:
            (UpdateResult, the loss function's sums added over this rank's rows.)
        """
        self._offload.begin_return()
        self._begin_gradients()
        self._optimizer.zero_grad()
        losses = []

        def kept(row: PackedRow, output: Tensor) -> tuple[Tensor, Tensor]:
            total, sums = loss(row, *output)
            losses.append(total.detach())
            return total, sums

        sums = self._run(rows, kept, forward_only=False, twin=twin)
        applied, grad_norm = self._step(losses)
        rate = next(g["lr"] for g in self.optimizer.param_groups if g["params"])
        self.scheduler.step(1)
        return UpdateResult(grad_norm, rate, applied), torch.stack(sums).sum(0)

    @torch.no_grad()
    def _step(self, losses: list[Tensor]) -> tuple[bool, float]:
        """Applies the clipped gradients, unless these or a loss of any rank are not finite: Megatron looks for this in
        fp16 only, and one NaN is in every weight after the step.

        Returns:
            (whether it did, norm of all gradients before they were clipped, NaN if it did not.)
        """
        self.optimizer.prepare_grads()
        norm = torch.as_tensor(self.optimizer.get_grad_norm(), device=self._device).view(1)
        finite = torch.cat([norm, torch.stack(losses).to(norm)]).isfinite().all()[None].float()
        torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        grad_norm, finite = torch.cat([norm, finite]).tolist()
        if not finite:
            return False, float("nan")
        for optimizer in self.optimizer.chained_optimizers:
            limit, parameters = optimizer.config.clip_grad, optimizer.get_parameters()
            if limit > 0 and parameters:
                # Given a number, it leaves alone gradients that are short enough; a tensor it would multiply with.
                clip_grad_by_total_norm_fp32(parameters, limit, grad_norm)
        self.optimizer.step_with_ready_grads()
        self.changed()
        return True, grad_norm

    def gradients(self, rows: Sequence[PackedRow], loss) -> dict[str, Tensor]:
        """Of the loss per token, by parameter, without an update: float32, summed over all ranks, of this rank's
        shard under tensor parallelism.  For verification.  Collective; arguments as for `update`."""
        self._begin_gradients()
        self._run(rows, lambda row, output: loss(row, *output), forward_only=False)
        for buffer in [*self._ddp.buffers, *self._ddp.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                # The distributed optimizer needs the sum in one rank's shard only: the others' shards follow.
                mine = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, mine, group=group)
        return {name: p.main_grad.clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def _begin_gradients(self) -> None:
        self._ddp.train()
        self._ddp.restore_grad_buffers(synchronize=False)
        self._ddp.zero_grad_buffer()

    def _run(self, rows: Sequence[PackedRow], result, forward_only: bool, twin=None) -> list:
        """What `result` makes of each row.  Ranks that share experts run equally many microbatches: who has fewer
        rows adds idle ones, which weigh nothing.  Gradients are of the loss per token of all ranks."""
        idle = [idle_row(self.alignment.multiple)] * (experts.most(len(rows), self.model.pg_collection.ep) - len(rows))

        def forward_step(iterator, model):
            row = next(iterator)
            # The twin of every row, so that ranks that share experts go through the model equally often.
            output = torch.cat([self._forward(one) for one in ([row, twin(row)] if twin else [row])])
            return output, lambda output, non_loss_data=False: finish(row, output, non_loss_data)

        tokens = 0 if forward_only else _all_targets(rows, self._device)

        def finish(row, output, non_loss_data):
            nothing = torch.tensor(0, dtype=torch.int)  # Megatron's count of tokens, which nobody reads
            if not row.members:
                return output if non_loss_data else (0 * output.sum(), nothing, nothing)
            if non_loss_data:
                return result(row, output)
            loss, sums = result(row, output)
            return loss / tokens, nothing, sums

        try:
            results = self._forward_backward(
                forward_step_func=forward_step,
                data_iterator=iter([*rows, *idle]),
                model=self._ddp,
                num_microbatches=len(rows) + len(idle),
                seq_length=0,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        finally:
            self._replay.begin(None)
        return results[: len(rows)]

    def _forward(self, row: PackedRow) -> Tensor:
        """float32 `[2, completion tokens]`: log-probabilities and entropies."""
        routing = row.routing_indices
        self._replay.begin(None if routing is None else to_device(routing, self._device))
        return self._ddp(
            **row_arguments(row, self._device),
            output_processor=token_log_probs,
            output_processor_context=LogProbRequest(row.predictors, row.targets, self._temperature, self._chunk),
        )


def _state(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Masters and moments, as far as there are any yet."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _all_targets(rows: Sequence[PackedRow], device: torch.device) -> Tensor:
    """float32 `[]`, at least 1: of the rows of all ranks; context-parallel ranks have the same.  Collective."""
    count = torch.tensor(sum(row.targets.numel() for row in rows if row.members), dtype=torch.float32)
    count = to_device(count, device)
    torch.distributed.all_reduce(count, group=parallel_state.get_data_parallel_group())
    return count.clamp(min=1)


def _accumulate_in_products(model: torch.nn.Module) -> None:
    """Transformer-engine's layers add the gradient of a weight where DDP keeps it, in float32, as they multiply; else
    it is rounded, written, read and added.  Megatron's own switch asks for NVIDIA's apex, which its output layer needs,
    whose gradient is `megarl.training.log_probs`' to add."""
    for module in model.modules():
        trained = all(hasattr(parameter, "main_grad") for parameter in module.parameters(recurse=False))
        # A weight that is rounded as it computes is not the one whose gradient is kept.
        if hasattr(module, "fuse_wgrad_accumulation") and trained and not hasattr(module, "weight_quantizer"):
            module.fuse_wgrad_accumulation = True
            # Else the very first pass through it counts as the first of a step, and writes where it should add.
            module.disable_parameter_transpose_cache = True


def row_arguments(row: PackedRow, device: torch.device) -> dict[str, Any]:
    """What `megarl.models.policy_model.PolicyModel.forward` takes of a row, on `device`."""
    bounds = to_device(torch.tensor(row.bounds, dtype=torch.int32), device)
    longest = max(b - a for a, b in zip(row.bounds, row.bounds[1:], strict=False))
    pixels = grids = None
    if row.items:
        pixels = torch.cat([i.pixels for i in row.items])  # on the CPU: a rank may need a part of them only
        grids = torch.tensor([i.grid for i in row.items])
    return {
        "ids": to_device(row.ids, device),
        "positions": to_device(row.positions, device),
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        "feature_rows": to_device(row.feature_rows, device),
        "pixels": pixels,
        "grids": grids,
    }
