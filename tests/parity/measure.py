"""How far megarl's answers are from transformers', what is allowed, and the lines of the table."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path

import torch
from torch import Tensor

from megarl.verify.cases import Case
from megarl.verify.compare import FLOAT32_LOG_PROB, gradient_distances
from megarl.verify.transformers_peer import Transformers
from tests.parity.exchange import ASKED, FOUND, SAMPLED, Asked, Found, negative_log_likelihood

LOGITS, LOG_PROBS, SAMPLED_LOG_PROBS, GRADIENTS = QUANTITIES = (
    "logits",
    "log-probabilities of fixed tokens",
    "the engine's, of tokens it sampled",
    "gradients",
)
FLOAT32_LOGIT = 1e-5
FLOAT32_GRADIENT = 1e-5
"""Of the norm of a weight's gradient."""
NOISE = 1.1
"""In bfloat16, over transformers' own distance from float32: by so much two samples of equal errors may differ."""


@dataclass(frozen=True)
class Line:
    """One quantity of one model, as distances from transformers in float32."""

    model: str
    what: str
    ours: Mapping[str, float]
    """`mean` and `max` of differences; of gradients `all` together, relative, and that of the `worst` weight."""
    own: Mapping[str, float] = field(default_factory=dict)
    """The same of transformers in bfloat16."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def good(self) -> bool:
        return all(self.ours[key] <= bound for key, bound in self.at_most.items())  # false for NaN


@dataclass(frozen=True, eq=False)
class _Theirs:
    """Everything on the model's device but the log-probabilities."""

    logits: list[Tensor]
    log_probs: list[Tensor]
    sampled: list[Tensor]
    gradients: dict[str, Tensor]
    experts: list[Tensor]


def lines(model: str, folder: Path) -> list[Line]:
    """Compares what a working folder holds: `ASKED`, `FOUND` and, where the engine did not fail, `SAMPLED`."""
    asked: Asked = torch.load(folder / ASKED, weights_only=False)
    found: Found = torch.load(folder / FOUND, weights_only=False, mmap=True)
    sampled = torch.load(folder / SAMPLED, weights_only=False) if (folder / SAMPLED).exists() else []
    half = asked.dtype is torch.bfloat16
    exact = _theirs(asked, sampled, torch.float32)
    rounded = _theirs(asked, sampled, torch.bfloat16) if half else None

    def line(what: str, distances: Callable[..., dict[str, float]], limits: Mapping[str, float], note: str = ""):
        """`limits` are those of float32; in bfloat16 the first statistic is bounded by transformers' own."""
        ours, own = distances(found), distances(rounded) if half else {}
        first = next(iter(ours))
        return Line(model, what, ours, own, {first: NOISE * own[first]} if half else limits, note)

    spread = float(torch.cat([x.float().std(-1) for x in exact.logits]).mean())
    logits = line(
        LOGITS,
        lambda of: _distance(of.logits, exact.logits),
        {"max": FLOAT32_LOGIT},
        f"their standard deviation at a place is {spread:.1f}",
    )
    log_probs = line(
        LOG_PROBS,
        lambda of: _distance(of.log_probs, exact.log_probs),
        {"max": FLOAT32_LOG_PROB},
        f"{sum(x.numel() for x in exact.log_probs)} tokens",
    )
    result = [logits, *_routed_alike(model, found, exact, rounded), log_probs]
    if sampled:
        engine = [case.sampled for case in sampled]
        result.append(
            line(
                SAMPLED_LOG_PROBS,
                lambda of: _distance(engine if of is found else of.sampled, exact.sampled),
                {"max": FLOAT32_LOG_PROB},
                f"{sum(x.numel() for x in engine)} tokens, log-probabilities from {min(map(min, engine)):.1f} to "
                f"{max(map(max, engine)):.1f}",
            )
        )
    where = []

    def gradients(of) -> dict[str, float]:
        each, together = gradient_distances(of.gradients, exact.gradients)
        worst = max(each, key=lambda name: (isnan(each[name]), each[name]))
        parts = {name: (each[name] * float(exact.gradients[name].norm())) ** 2 for name in each}
        most = max(parts, key=parts.__getitem__)
        where.append(f"worst {worst}, {parts[most] / max(sum(parts.values()), 1e-30):.0%} of all from {most}")
        return {"all": together, "worst": each[worst]}

    last = line(GRADIENTS, gradients, {"worst": FLOAT32_GRADIENT})
    return [*result, replace(last, note=f"{len(exact.gradients)} weights; {'; transformers: '.join(where)}")]


def _theirs(asked: Asked, sampled: Sequence[Case], dtype: torch.dtype) -> _Theirs:
    model = Transformers(asked.checkpoint, asked.dtype, dtype)
    chosen: list[Tensor] = []
    routers = [m for m in model.model.modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda module, _, output: chosen.append(output[2])) for router in routers]
    logits, experts = [], []
    with torch.no_grad():
        for case in asked.cases:
            chosen.clear()
            logits.append(model.logits(case))
            routed = [layer.sort(-1).values.cpu() for layer in chosen]
            experts.append(torch.stack(routed, 1) if routed else torch.empty(len(logits[-1]), 0, 0))
        for hook in hooks:
            hook.remove()
        of_sampled = [model.log_probs(case)[0].cpu() for case in sampled]
    log_probs, _ = model.differentiate(asked.cases, lambda case, log_probs, _: negative_log_likelihood(log_probs))
    gradients = dict(model.gradients())
    del model, routers, hooks
    release()  # gradients stay, weights do not
    return _Theirs(logits, log_probs, of_sampled, gradients, experts)


def release() -> None:
    """Gives memory that nothing refers to back to the device, which megarl's process shares."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """`mean` and `max` over all elements, computed where `expected` is."""
    total = largest = 0.0
    for a, b in zip(found, expected, strict=True):
        difference = (a.to(b.device).float() - b.float()).abs()
        if not bool(difference.isfinite().all()):
            return {"mean": float("nan"), "max": float("nan")}
        total += float(difference.double().sum())
        largest = max(largest, float(difference.max()))
    return {"mean": total / sum(b.numel() for b in expected), "max": largest}


def _routed_alike(model: str, found: Found, exact: _Theirs, rounded: _Theirs | None) -> list[Line]:
    """Of a mixture of experts in bfloat16: tokens that all layers sent to the same experts as in float32."""
    if rounded is None or not exact.experts[0].numel():
        return []
    distances, shares = [], []
    for of in (found, rounded):
        alike = [(a == b).all(-1).all(-1) for a, b in zip(of.experts, exact.experts, strict=True)]
        pairs = [(a[m.to(a.device)], b[m.to(b.device)]) for a, b, m in zip(of.logits, exact.logits, alike, strict=True)]
        distances.append(_distance([a for a, _ in pairs], [b for _, b in pairs]) if any(map(any, alike)) else {})
        shares.append(float(torch.cat(alike).float().mean()))
    if not all(distances):
        return []
    note = f"{shares[0]:.0%} of the tokens; of transformers' own {shares[1]:.0%}"
    return [Line(model, "logits where experts are the same", *distances, note=note)]


# As text


def tiny_head() -> list[str]:
    heads = ["family", "logits", *QUANTITIES[1:3], "gradient of a weight", "all gradients"]
    return [_row(heads), _row(["---"] * len(heads))]


def tiny_row(of: Sequence[Line]) -> str:
    """Largest differences of one family in float32."""
    by_name = {line.what: line.ours for line in of}
    gradients = by_name[GRADIENTS]
    largest = [by_name[what]["max"] for what in QUANTITIES[:3]]
    return _row([f"`{of[0].model}`", *(f"{value:.1e}" for value in (*largest, gradients["worst"], gradients["all"]))])


def real_head() -> list[str]:
    heads = ["model", "of", "megarl", "transformers", "ratio", "megarl, max", "transformers, max", "about"]
    return [_row(heads), _row(["---"] * len(heads))]


def real_row(line: Line) -> str:
    """Distances in bfloat16 beside transformers' own: mean (of gradients: all together) and largest (worst weight)."""
    (mean, largest), (own_mean, own_largest) = line.ours.values(), line.own.values()
    ratio = f"{mean / own_mean:.2f}" if own_mean else "-"
    numbers = (f"{value:.2e}" for value in (mean, own_mean)), (f"{value:.1e}" for value in (largest, own_largest))
    return _row([line.model, line.what, *numbers[0], ratio, *numbers[1], line.note])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
