"""Prompts in, rollouts out: Megatron's dynamic inference engine over the weights that are being trained, or a copy."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.inference.config import InferenceConfig, PrefixCachingEvictionPolicy
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor

from megarl.data.prompt import Prompt
from megarl.media.item import EncodedPrompt
from megarl.models.router_replay import layer_replays, recording
from megarl.packing.rows import TokenSequence
from megarl.parallel import experts
from megarl.parallel.agreement import any_rank
from megarl.rollout.context import MediaContext, MediaWrapper
from megarl.rollout.decode import DecodeRun
from megarl.rollout.features import FeatureCache
from megarl.rollout.prompts import build_prompt_table, prefix_hashes
from megarl.rollout.routing import RoutingCache
from megarl.rollout.sampling import Sampler, SamplingOptions, group_keys
from megarl.rollout.stepping import Controller, SteppingEngine

_STEPS_BETWEEN_QUESTIONS = 32

Extend = Callable[[EncodedPrompt, Tensor, Prompt], EncodedPrompt]
"""`(what was seen, what was sampled then, the reply to it)` to what is seen next; see
`megarl.media.expand.extend_prompt`."""


@dataclass(frozen=True)
class EngineOptions:
    max_requests: int
    """Requests that decode at the same time."""
    max_tokens_per_step: int
    """Tokens of one forward pass; a multiple of 64."""
    max_sequence_length: int
    """Prompt and completion."""
    kv_cache_gb: float
    block_size_tokens: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    vision_cache_bytes: int = 1 << 28
    """Bound of the media features that are kept."""
    patches_per_pass: int = 65536
    """Patches that go through the vision tower at once."""
    cuda_graphs: bool = False
    """Decode steps are CUDA graphs; steps with prompts run eagerly."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A completion after which the conversation went on."""

    start: int
    """Place of its first token in the conversation."""
    ids: Tensor
    """int64 `[n]`, the stop token included."""
    log_probs: Tensor
    """float32 `[n]`: as `Rollout.log_probs`."""
    reply: Prompt
    """What was said to it; its media are sources, that any rank can prepare again."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled completion, or a conversation: what counts as one for the policy gradient."""

    prompt: EncodedPrompt
    """All before the completion: where there were `turns`, these and what was said to them are its end."""
    ids: Tensor
    """int64 `[n]`, the stop token included; of a conversation its last completion."""
    log_probs: Tensor
    """float32 `[n]`: behaviour log-probabilities, of the distribution that was sampled from."""
    finished: bool
    """Ended by a stop token, not by length."""
    routing_indices: Tensor | None = None
    """uint8, or int16 where there are more than 256 experts, `[prompt + n - 1, layers with experts, top-k]`: the
    experts of each token but the last sampled one, which was never run.  None without router replay."""
    turns: tuple[Turn, ...] = ()
    """Earlier completions of a conversation, in order."""
    weight_versions: Tensor | None = None
    """int32 `[n]`: how many RL steps the weights had learned from that each token was sampled with; None: those of the
    step that it is trained in."""
    verdict: Any = None
    """What the environment has said of a conversation when it ended; None: the answer is yet to be judged."""

    @property
    def sequence(self) -> TokenSequence:
        """As training takes it: all that was sampled is trained on."""
        places = [torch.arange(turn.start, turn.start + turn.ids.numel()) for turn in self.turns]
        return TokenSequence(self.prompt, self.ids, self.routing_indices, torch.cat(places) if places else None)

    @property
    def sampled_log_probs(self) -> Tensor:
        """float32, of the tokens that are trained on, in their order."""
        return torch.cat([*(turn.log_probs for turn in self.turns), self.log_probs])

    def of_version(self, version: int) -> Tensor:
        """bool, of the tokens that are trained on: those that weights of that version have sampled."""
        if self.weight_versions is None:
            return torch.ones_like(self.sampled_log_probs, dtype=torch.bool)
        return self.weight_versions == version

    def sampled(self) -> dict[str, Any]:
        """Everything but the prompt, by field: what moves between ranks, of which each expands prompts by itself."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "prompt"}

    @classmethod
    def restored(cls, prompt: EncodedPrompt, sampled: dict[str, Any], extend: Extend) -> "Rollout":
        """On another rank.

        Args:
            prompt: that the conversation began with.
            sampled: by the method of that name.
            extend: gives the prompt of the next turn.
        """
        for turn in sampled["turns"]:
            prompt = extend(prompt, turn.ids, turn.reply)
        return cls(prompt, **sampled)


Generate = Callable[[list[EncodedPrompt], list[int]], list[list[Rollout]] | None]
"""`(prompts, keys)` to groups of one rollout, or None on all ranks where it was interrupted.  Collective over all ranks
of the job."""


@dataclass(frozen=True)
class _Live:
    """A generation between `start` and `collect`."""

    prompts: list[EncodedPrompt]
    options: SamplingOptions
    group_size: int


class _VocabularyOnly:
    """Megatron's controller wants a tokenizer; nothing is ever decoded inside the engine."""

    def __init__(self, vocab_size: int):
        self.vocab_size, self.bos, self.eod, self.pad = vocab_size, None, -1, 0
        self.unique_identifiers = {}

    def detokenize(self, tokens, **_):
        return ""


class RolloutEngine:
    """Built suspended; `generate` and `advance` wake it, and leave the model ready for training.

    Args:
        model: the policy, or a copy in another layout; its language model is stepped in place, over the process
            groups that it was built with.
        options: sizes.
        peers: one rank of each engine that is given the same prompts (`megarl.rollout.spread`); default: the
            context-parallel ranks, which train on the same rows.
        as_sampled: entered while the engine computes: inside, the model has the weights to sample with, and
            afterwards those that are trained.
    """

    def __init__(
        self,
        model,
        options: EngineOptions,
        peers: dist.ProcessGroup | None = None,
        as_sampled: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        config = model.language_model.config
        device = next(model.parameters()).device
        self.model, self._options, self._device, self._as_sampled = model, options, device, as_sampled
        self.groups = model.pg_collection
        """`dp_cp` is one rank of each engine of the job."""
        self.peers = self.groups.cp if peers is None else peers
        self.features = FeatureCache(
            model.encode,
            model.merge_size,
            device,
            model.feature_row_bytes,
            options.vision_cache_bytes,
            options.patches_per_pass,
        )
        self.asked = 0
        """Media items of all rollouts since the start: how often the tower would have run without groups and caches."""
        self._live: _Live | None = None
        self._context = MediaContext(
            config,
            InferenceConfig(
                block_size_tokens=options.block_size_tokens,
                buffer_size_gb=options.kv_cache_gb,
                max_requests=options.max_requests,
                max_tokens=options.max_tokens_per_step,
                max_sequence_length=options.max_sequence_length,
                enable_prefix_caching=options.enable_prefix_caching,
                prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
                enable_chunked_prefill=options.enable_chunked_prefill,
                sampling_backend="torch",
                logging_step_interval=0,
                pg_collection=self.groups,
            ),
        )
        self._replays = layer_replays(model)
        if self._replays:
            self._context.routing = RoutingCache(self._context, config, len(self._replays))
        self._sampler = Sampler(device)
        with self._evaluating():
            controller = Controller(
                MediaWrapper(model, self._context, self.features),
                _VocabularyOnly(model.language_model.vocab_size),
                self._sampler,
            )
            self._engine = SteppingEngine(controller, self._context)
            controller.decode = self._decode_run(controller.inference_wrapped_model)
            self._engine.suspend()

    def _decode_run(self, wrapper: MediaWrapper) -> DecodeRun:
        tp, routing = self.groups.tp, self._context.routing
        return DecodeRun(
            wrapper.decode,
            self._context,
            self.model.language_model,
            graphs=self._options.cuda_graphs,
            multiple=tp.size() if self.model.language_model.config.sequence_parallel else 1,
            ranks=self.groups.ep,
            record=routing and partial(routing.record_at, tp_group=tp),
        )

    def weights_changed(self) -> None:
        """The one hook that clears whatever was computed from the weights: the KV cache, of prefixes and of live
        requests, and the media features.  CUDA graphs read the weights where they are, so they stay valid."""
        self.features.clear()
        if self._live is None:
            self._context.reset()
        else:
            self._engine.restart_requests()

    def generate(
        self,
        prompts: list[EncodedPrompt],
        options: SamplingOptions,
        group_size: int = 1,
        keys: list[int] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[list[Rollout]] | None:
        """Samples `group_size` completions of each prompt: `start`, `advance` to the end, `collect`; None where it was
        `interrupted` before."""
        if not prompts and self.groups.ep.size() == 1:
            return []
        self.start(prompts, options, group_size, keys)
        if not self.advance(interrupted=interrupted):
            self.abandon()
            return None
        return self.collect()

    def start(
        self,
        prompts: list[EncodedPrompt],
        options: SamplingOptions,
        group_size: int = 1,
        keys: list[int] | None = None,
    ) -> None:
        """Takes requests; nothing is computed yet.

        Args:
            prompts: in any order; equal pictures are encoded once.  Ranks that share experts start together, also
                those that have none.
            keys: one number per prompt that decides its draws together with the rollout's place in its
                group; equal keys give equal rollouts.  Default: the prompt's place in the list.

        Raises:
            RuntimeError: a generation is live already, or a prompt is larger than the engine.
        """
        if self._live is not None:
            raise RuntimeError("a generation is live: collect or abandon it first")
        self._live = _Live(prompts, options, group_size)
        try:
            self._begin(prompts, options, group_size, keys or list(range(len(prompts))))
        except BaseException:
            self.abandon()
            raise

    @torch.no_grad()
    def advance(self, max_steps: int | None = None, interrupted: Callable[[], bool] | None = None) -> bool:
        """Steps to the end, or at most `max_steps` times, and suspends: the model is ready for training then.

        Between two calls the weights may change, if `weights_changed` is told.  Collective over the ranks that share
        experts: they step together until the last of them is done.

        Args:
            interrupted: asked every few steps whether to leave it at that; all ranks that step together do so as soon
                as one of them says yes.

        Returns:
            Whether all is sampled, on all of these ranks.
        """
        try:
            with self._evaluating(), self._awake():
                steps, asked = 0, -_STEPS_BETWEEN_QUESTIONS
                while (unfinished := self._anyone_unfinished()) and steps != max_steps:
                    if interrupted and steps - asked >= _STEPS_BETWEEN_QUESTIONS:
                        if self._any_rank(interrupted()):
                            break
                        asked = steps
                    step = self._engine.step if self._engine.has_unfinished_requests() else self._engine.idle_step
                    steps += step(max_steps and max_steps - steps)
                return not unfinished
        except BaseException:
            self.abandon()
            raise

    def _anyone_unfinished(self) -> bool:
        return bool(experts.most(int(self._engine.has_unfinished_requests()), self.groups.ep))

    def _any_rank(self, value: bool) -> bool:
        """Over the ranks that step together: those that share experts, and those that share the weights of layers."""
        return any_rank(any_rank(value, self.groups.ep), self.groups.tp)

    def collect(self) -> list[list[Rollout]]:
        """One list of `group_size` rollouts per prompt, of the generation that `advance` brought to its end.

        Raises:
            RuntimeError: there is none, or it is not at its end.
        """
        live = self._live
        # Megatron's own question looks at its queue and its context only, which are empty while the engine sleeps.
        if live is None or self._engine.requests:
            raise RuntimeError("nothing to collect: the generation is not at its end" if live else "nothing to collect")
        self._live = self._context.prompts = None
        return self._rollouts(live)

    def abandon(self) -> None:
        """Drops the live generation, if there is one."""
        if self._live is None:
            return
        self._live = self._context.prompts = None
        self._engine.reset()
        self._engine.suspend()

    def _begin(self, prompts, options: SamplingOptions, group_size: int, keys: list[int]) -> None:
        self.asked += group_size * sum(len(prompt.items) for prompt in prompts)
        prompt_of_request = torch.arange(len(prompts)).repeat_interleave(group_size)
        if prompts:
            self._context.prompts = build_prompt_table(prompts, prompt_of_request, self.model.merge_size)
        self._sampler.options = replace(options, invariant=self.model.language_model.config.deterministic_mode)
        # Keys may have 64 bits, of which int64 calls the last one a sign.
        self._sampler.keys = group_keys(torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64)), group_size)
        if self._context.routing is not None:
            self._context.routing.begin()
        self._engine.controller.begin(options.stop_ids)
        self._engine.begin(len(prompts) * group_size, options.max_new_tokens)
        hashes = [self._hashes(prompt) for prompt in prompts]
        for request in _in_order(len(prompts), group_size, self._options.max_requests):
            index = request // group_size
            self._engine._add_request(
                DynamicInferenceRequest(
                    request_id=request,
                    prompt_tokens=prompts[index].ids,  # on the CPU, as the context's own bookkeeping is
                    sampling_params=SamplingParams(
                        num_tokens_to_generate=options.max_new_tokens,
                        termination_id=-1,
                        return_log_probs=True,
                        skip_prompt_log_probs=True,
                    ),
                    precomputed_block_hashes=copy.copy(hashes[index]),
                )
            )
            if self._engine.failed_request_ids:
                tokens = prompts[index].ids.numel()
                raise RuntimeError(
                    f"the engine has no room for a prompt of {tokens} tokens and {options.max_new_tokens} new ones: "
                    f"{self._options}"
                )

    def _hashes(self, prompt: EncodedPrompt) -> list[int]:
        if not self._options.enable_prefix_caching:
            return []
        return prefix_hashes(prompt, self.model.merge_size, self._options.block_size_tokens)

    def _rollouts(self, live: "_Live") -> list[list[Rollout]]:
        done, routing = self._engine.completions, self._context.routing
        groups = []
        for index, prompt in enumerate(live.prompts):
            group = []
            for request in range(index * live.group_size, (index + 1) * live.group_size):
                n = int(done.count[request])
                ids = done.tokens[request, :n]
                stopped = n > 0 and int(ids[-1]) in live.options.stop_ids
                chosen = None if routing is None else routing.take(request)
                group.append(Rollout(prompt, ids.clone(), done.log_probs[request, :n].clone(), stopped, chosen))
            groups.append(group)
        return groups

    @contextmanager
    def _evaluating(self):
        training = self.model.training
        self.model.eval()
        try:
            with recording(self._replays), self._as_sampled():
                yield
        finally:
            self.model.train(training)

    @contextmanager
    def _awake(self):
        self._engine.resume()
        collected = gc.isenabled()
        gc.disable()  # it would walk over the process's whole heap every few steps
        try:
            yield
        finally:
            if collected:
                gc.enable()
            self._engine.suspend()
            # Scratch made under torch.inference_mode cannot be written by a training forward.
            get_global_memory_buffer().buffer.clear()


def _in_order(prompts: int, group_size: int, max_requests: int) -> Iterator[int]:
    """Requests in the order in which they wait.  Of as many groups as decode together, first one rollout of each: what
    is computed for it serves the others, which would have to wait for it, and with them all that stand behind them."""
    together = max(1, max_requests // group_size)
    for first in range(0, prompts, together):
        window = range(first, min(first + together, prompts))
        for member in range(group_size):
            yield from (prompt * group_size + member for prompt in window)
