"""Decode steps that ask nothing of the host: from a token to the next one, and to the one after that.

Megarl lets Megatron's context schedule, share and page; but a step of its engine is milliseconds of Python, in which a
GPU has nothing to do.  Where all live requests decode, `DecodeRun` takes many steps at once: tokens, places and lengths
stay on the device, `Step` draws and ends requests there, and a CUDA graph is one such step whole.  The context is told
afterwards (`MediaContext.advance`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference import utils
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from megarl.models.decode_attention import DecodeContext
from megarl.parallel import experts
from megarl.platform.graphs import captured
from megarl.platform.kernels import kernels
from megarl.rollout.sampling import SamplingOptions, sample, uniform

_IN_FLIGHT = 2 if kernels().gpu else 0
"""Steps that the host is ahead of the device, so that it never waits for the host."""


@dataclass(frozen=True, eq=False)
class Requests:
    """Of each row a request, on the device; the fields are views of `packed`."""

    packed: Tensor
    """int64 `[5, rows]`."""
    table: Tensor
    """int32 `[rows, pages]`: its blocks."""
    live: Tensor
    """bool `[rows]`: not ended yet."""
    taken: Tensor
    """int64 `[rows]`: steps in which it was live."""

    @classmethod
    def empty(cls, rows: int, pages: int, device: torch.device) -> "Requests":
        return cls(
            torch.zeros((5, rows), dtype=torch.long, device=device),
            torch.zeros((rows, pages), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
            torch.zeros(rows, dtype=torch.long, device=device),
        )

    @property
    def tokens(self) -> Tensor:
        """The token that the next step runs."""
        return self.packed[0]

    @property
    def places(self) -> Tensor:
        """Its place in the request."""
        return self.packed[1]

    @property
    def limits(self) -> Tensor:
        """Length at which the request ends."""
        return self.packed[2]

    @property
    def offsets(self) -> Tensor:
        """Rotary position of a sampled token less its place."""
        return self.packed[3]

    @property
    def keys(self) -> Tensor:
        """See `megarl.rollout.sampling.uniform`."""
        return self.packed[4]

    def first(self, rows: int) -> "Requests":
        return Requests(self.packed[:, :rows], self.table[:rows], self.live[:rows], self.taken[:rows])


@dataclass(frozen=True, eq=False)
class Sampled:
    """What a call of the engine's step sampled; on the CPU."""

    tokens: Tensor
    """int64 `[steps, requests]`."""
    log_probs: Tensor
    """float32, likewise."""
    taken: Tensor
    """int64 `[requests]`: of how many steps the request has a token."""


class DecodeRun:
    """Takes decode steps on the device.

    Args:
        forward: `(tokens [1, n], positions [3, 1, n], context)` to logits `[1, n, vocabulary]`.
        context: Megatron's, of which the KV cache and the sizes are.
        model: the language model, whose experts are padded while a graph is captured.
        graphs: whether a step is a CUDA graph, captured at the first step of its size.
        multiple: the sizes are multiples of this.
        ranks: those that take each step together, since they share experts.
        record: called after each forward pass with the blocks and places of its tokens, int64 `[n]` both.
    """

    most_steps = 32

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, DecodeContext], Tensor],
        context,
        model,
        graphs: bool,
        multiple: int,
        ranks: dist.ProcessGroup,
        record: Callable[[Tensor, Tensor], None] | None = None,
    ):
        self._forward, self._context, self._model, self._record = forward, context, model, record
        self._multiple, self._ranks, self._graphs = multiple, ranks, {} if graphs else None
        self._device = context.memory_buffer.device
        self._dummy = context.kv_block_allocator.dummy_block_idx
        self._step_context = DecodeContext(context.memory_buffer, context.layer_map, self._dummy)
        self._most_rows = rows = self._padded(context.max_requests)
        self._requests = Requests.empty(rows, context.request_to_kv_block_ids.shape[1], self._device)
        self._at = torch.zeros(1, dtype=torch.long, device=self._device)
        self._tokens = torch.zeros((self.most_steps, rows), dtype=torch.long, device=self._device)
        self._log_probs = torch.zeros((self.most_steps, rows), device=self._device)
        self._alive = torch.zeros(self.most_steps, dtype=torch.long, device=self._device)
        self._pool = None
        self._read: list[Callable[[], None]] = []
        """What graphs read must live as long as they, as the stop tokens of a step do in its closure."""

    def agreed(self, steps: int, rows: int) -> tuple[int, int]:
        """The fewest steps and the most rows of the ranks that take each step together.  Collective over them."""
        return -experts.most(-steps, self._ranks), experts.most(rows, self._ranks)

    def run(
        self, steps: int, rows: int, packed: Tensor, table: Tensor, options: SamplingOptions
    ) -> tuple[Sampled, Tensor]:
        """Takes up to `steps` steps: fewer where so many requests end that the others are worth a smaller batch, if
        that is for this rank to say.

        Args:
            rows: of the batch, at least.
            packed, table: of the live requests, see `Requests`, with -1 for no block; on the CPU.

        Returns:
            What was sampled; and bool `[n]`: which requests go on.
        """
        n = packed.shape[1]
        rows = min(self._padded(rows), self._most_rows)
        step = self._step_of(rows, options)
        requests = self._requests.first(rows)
        self._clear(requests)
        requests.packed[:, :n].copy_(packed)
        requests.table[:n].copy_(torch.where(table < 0, self._dummy, table))
        requests.live[:n].fill_(True)
        taken = self._take(step, steps, n)
        done = self._tokens[:taken, :n].cpu(), self._log_probs[:taken, :n].cpu(), requests.taken[:n].cpu()
        return Sampled(*done), requests.live[:n].cpu()

    def _take(self, step: Callable[[], None], steps: int, n: int) -> int:
        alive = torch.zeros(steps, dtype=torch.long, pin_memory=kernels().gpu)
        events = []
        for taken in range(steps):
            step()
            alive[taken].copy_(self._alive[taken], non_blocking=True)
            if kernels().gpu:
                events.append(torch.cuda.Event())
                events[-1].record()
            known = taken - _IN_FLIGHT
            if known >= 0 and self._ranks.size() == 1:
                if kernels().gpu:
                    events[known].synchronize()
                if int(alive[known]) <= n - max(1, n // 8):
                    return taken + 1
        return steps

    def _clear(self, requests: Requests) -> None:
        """Rows without a request."""
        requests.packed.zero_()
        requests.table.fill_(self._dummy)
        requests.live.zero_()
        requests.taken.zero_()
        self._at.zero_()

    def _padded(self, n: int) -> int:
        """Of graphs few sizes: from 16 rows on each is at most a quarter too large, for which a step hardly takes
        longer."""
        step = max(4 if n > 4 else 1, (1 << n.bit_length()) >> 3) if self._graphs is not None else 1
        step = -(-step // self._multiple) * self._multiple
        return -(-n // step) * step

    def _step_of(self, rows: int, options: SamplingOptions) -> Callable[[], None]:
        stops = torch.tensor(options.stop_ids, dtype=torch.long, device=self._device)

        def step():
            self._step(self._requests.first(rows), options, stops)

        if self._graphs is None:
            return step
        key = rows, replace(options, max_new_tokens=0)
        if key not in self._graphs:
            self._graphs[key] = self._captured(step, rows)
        return self._graphs[key]

    def _captured(self, step: Callable[[], None], rows: int) -> Callable[[], None]:
        self._clear(self._requests.first(rows))
        with _experts_padded(self._model):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()  # kernels are compiled and workspaces made outside of the graph
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            captured.add(graph)
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"), _own_scratch():
                step()
        self._pool = graph.pool()
        self._read.append(step)
        return graph.replay

    def _step(self, requests: Requests, options: SamplingOptions, stops: Tensor) -> None:
        places, live = requests.places, requests.live
        self._step_context.begin(places, requests.table, live)
        positions = (places + requests.offsets).expand(3, 1, -1)
        logits = self._forward(requests.tokens[None], positions, self._step_context)[0]
        if self._record is not None:
            self._record(self._step_context.blocks, self._step_context.offsets)
        tokens, log_probs = sample(logits, uniform(requests.keys, places + 1), options)
        rows = slice(0, len(places))
        self._tokens[:, rows].index_copy_(0, self._at, tokens[None])
        self._log_probs[:, rows].index_copy_(0, self._at, log_probs[None])
        requests.taken.add_(live)
        live &= ~(tokens[:, None] == stops).any(1) & (places + 2 < requests.limits)
        requests.tokens.copy_(torch.where(live, tokens, requests.tokens))
        places.add_(live)
        self._alive.index_copy_(0, self._at, live.sum()[None])
        self._at.add_(1)


@contextmanager
def _own_scratch() -> Iterator[None]:
    """Inside, what Megatron gathers under sequence parallelism lies in memory of the graph: its scratch buffer grows
    and is cleared, and a graph would go on writing where it was."""
    before, parallel_state._GLOBAL_MEMORY_BUFFER = parallel_state._GLOBAL_MEMORY_BUFFER, GlobalMemoryBuffer()
    try:
        yield
    finally:
        parallel_state._GLOBAL_MEMORY_BUFFER = before


@contextmanager
def _experts_padded(model) -> Iterator[None]:
    """Inside, every expert has room for every token, so that no size depends on the tokens."""
    config = model.config
    if config.num_moe_experts is None:
        yield
        return
    utils.moe_layer_cache = None  # or it would hold the experts of the first model that asked
    utils.set_decode_expert_padding(model, True, config.num_moe_experts / config.moe_router_topk)
    try:
        yield
    finally:
        utils.set_decode_expert_padding(model, False)
