"""Drawing tokens, and the log-probabilities they were drawn with, in one pass over the logits.

A draw is a function of the rollout's key, the token's place and the logits: no generator has a state.
The same rollout is sampled the same way whatever else is in the batch, on every tensor-parallel rank, and
after a resume.  `sample` is where the engine's log-probabilities come from.  Nothing here asks the host for a value,
so that all of it can be part of a CUDA graph.
"""

import hashlib
from dataclasses import dataclass

import torch
from megatron.core.inference.sampling.base import Sampling
from torch import Tensor

from megarl.platform.invariant import log_softmax


@dataclass(frozen=True)
class SamplingOptions:
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """Token ids that end a completion; the stop token is part of it."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens with this probability is kept; 1 keeps all."""
    top_k: int = 0
    """Most probable tokens kept; 0 keeps all."""
    invariant: bool = False
    """The log-probability of a token has the same bits in every batch: for the engine to say, which has the model."""


def named_key(*parts: int | str) -> int:
    """63 bits for what these parts name together: equal in every process and release."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def group_keys(keys: Tensor, group_size: int) -> Tensor:
    """int64 `[prompts * group_size]`: one key per rollout from one per prompt (int64 `[prompts]`, of which all 64 bits
    count)."""
    place = torch.arange(group_size, device=keys.device).repeat(len(keys))
    return _mix(keys.repeat_interleave(group_size), place)


def uniform(keys: Tensor, places: Tensor) -> Tensor:
    """float64 `[n]` in [0, 1) from a key and a token's place (both int64 `[n]`): the upper 53 bits of their mix."""
    return _shifted(_mix(keys, places), 11).double() / (1 << 53)


def _mix(keys: Tensor, places: Tensor) -> Tensor:
    """int64 `[n]`: SplitMix64's finaliser, twice, over both (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014).  Products and sums of int64 wrap around, as those of its unsigned ones."""
    z = keys * _GOLDEN + places
    for _ in range(2):
        z = z + _GOLDEN
        z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
        z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
        z = z ^ _shifted(z, 31)
    return z


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def filtered_log_probs(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Log-probabilities of the sampling distribution.

    Args:
        logits: `[n, vocabulary]`, any float dtype.

    Returns:
        float32 `[n, vocabulary]`, -inf where `top_p` or `top_k` cut a token off.  Greedy decoding is given
        the distribution at temperature 1.
    """
    log_probs = logits.float()
    if options.temperature not in (0.0, 1.0):
        log_probs = log_probs / options.temperature
    if options.top_k:
        kth = log_probs.topk(min(options.top_k, log_probs.shape[-1]), dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < kth, -torch.inf)
    if options.top_p < 1.0:
        ordered, order = log_probs.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= options.top_p)
        log_probs = log_probs.masked_fill(cut, -torch.inf)
    return log_softmax(log_probs) if options.invariant else log_probs.log_softmax(-1)


def draw(log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
    """int64 `[n]`: the token at each row's `uniforms` (float64 `[n]`) of the cumulative distribution, or
    the most probable one where `uniforms` is None."""
    if uniforms is None:
        return log_probs.argmax(-1)
    # float64: rounding in float32 can step over an improbable token onto one that was cut off.
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def sample(logits: Tensor, uniforms: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """One token a row, and what it was drawn with.

    Args:
        logits: `[n, vocabulary]`, any float dtype.
        uniforms: float64 `[n]`; not read where sampling is greedy.

    Returns:
        Tokens int64 `[n]`; their log-probabilities float32 `[n]`.
    """
    whole = options.top_p == 1.0 and not options.top_k
    if logits.is_cuda and options.temperature and whole and not options.invariant:
        from megarl.platform.draw_kernel import draw_tempered  # Triton is there where a GPU is

        return draw_tempered(logits, uniforms, options.temperature)
    log_probs = filtered_log_probs(logits, options)
    tokens = draw(log_probs, uniforms if options.temperature else None)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


class Sampler(Sampling):
    """Megatron's sampling interface over the functions above, for its own steps; one set of options for all live
    requests."""

    def __init__(self, device: torch.device):
        self.device = device
        self.options: SamplingOptions | None = None
        self.keys: Tensor | None = None
        """int64 `[requests]`, by request id; on the CPU."""
        self.selected: Tensor | None = None
        """float32 `[n]`: log-probabilities of the tokens drawn last."""

    def sample_kernel(self, logits: Tensor, n: int, context, *, gather_indices=None, output=None, **_) -> Tensor:
        """Draws one token for each of the `n` active requests from logits `[>= n, vocabulary]`."""
        logits = logits[:n] if gather_indices is None else logits[gather_indices[:n]]
        active = slice(context.paused_request_count, context.total_request_count)
        keys = self.keys[context.request_ids[active].long()]
        uniforms = uniform(keys, context.get_active_sequence_lengths().long()).to(self.device)
        tokens, self.selected = sample(logits, uniforms, self.options)
        return tokens if output is None else output.copy_(tokens)

    def log_probs_kernel(self, logits: Tensor, context, *, token_to_request_index=None) -> Tensor:
        """Per-row log-probabilities `[rows, vocabulary]` of the sampling distribution."""
        return filtered_log_probs(logits, self.options)
