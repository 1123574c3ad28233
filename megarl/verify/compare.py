"""How far two computations of the same thing are apart, what is allowed, and the verdict.

**float32.**  Log-probabilities may differ by 1e-5 nats at most, the loss per token by as much (advantages are at most
1), and gradients by 1e-4 of the norm of each weight's gradient.  Sums in another order differ by some 1e-6; a wrong
mask, position, picture or collective differs by far more.

**bfloat16.**  What is allowed cannot be a number: rounding depends on the depth, the width and the sharpness of the
model.  It is measured: `own` is the distance of transformers in bfloat16 from transformers in float32, with the same
weights on the same tokens.  The job may be 1.5 own from transformers in float32, in the mean over the tokens of a
modality and in the norm of all gradients; the half is for scatter, since tens of tokens are no more than a sample.  Two
computations in bfloat16 (engine and trainer, two layouts, two packings) may be sqrt(2) times as far apart, as
independent rounding errors of equal size are.  A single token, or a single weight's gradient, scatters more widely:
`TAIL` times its own value is allowed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHECKS = {
    "engine": "engine = trainer",
    "transformers": "trainer = transformers",
    "layout": "this layout = one rank",
    "packing": "packed = unpacked",
    "sync": "before and after a sync",
}
"""Title of each, by the name that `--only` takes."""
FLOAT32_LOG_PROB = 1e-5
"""Nats, the largest difference of a token."""
FLOAT32_GRADIENT = 1e-4
"""Of the norm of a weight's gradient."""
SCATTER = 1.5
"""In bfloat16, over `own`: means over tokens, and the norm of all gradients."""
TAIL = 4.0
"""In bfloat16: the largest difference of a token over `own`'s largest, and the same for a weight's gradient."""
_SILENT = 1e-6
"""Share of the norm of all gradients below which a weight's own is noise, and is compared with this instead."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    subject: str
    measured: Mapping[str, float] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    """Where the worst value is; or why nothing was measured."""

    @property
    def verdict(self) -> str:
        """`passed`, `failed` or `skipped`."""
        if not self.measured:
            return "skipped"
        low = all(self.measured[key] <= bound for key, bound in self.at_most.items())  # false for NaN
        high = all(self.measured[key] >= bound for key, bound in self.at_least.items())
        return "passed" if low and high else "failed"


@dataclass(frozen=True)
class Bounds:
    """What is allowed."""

    log_probs: Mapping[str, Mapping[str, float]]
    """By modality and statistic of `log_prob_distance`."""
    loss: float
    """Nats per token."""
    gradient: float
    """Relative, of all gradients together."""
    gradient_of: Mapping[str, float]
    """Relative, by name; `gradient` for those that are not in it."""

    @classmethod
    def float32(cls, modalities: Iterable[str]) -> "Bounds":
        """Between any two computations."""
        log_probs = {modality: {"max": FLOAT32_LOG_PROB} for modality in modalities}
        return cls(log_probs, FLOAT32_LOG_PROB, FLOAT32_GRADIENT, {})

    @classmethod
    def bfloat16(
        cls,
        half: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        half_gradients: Mapping[str, Tensor],
        exact_gradients: Mapping[str, Tensor],
    ) -> "Bounds":
        """Between the job and transformers in float32.

        Args:
            half, exact: log-probabilities float32 `[tokens]` by modality, from transformers in bfloat16 and float32.
            half_gradients, exact_gradients: likewise by name.
        """
        every = log_prob_distance(torch.cat([*half.values()]), torch.cat([*exact.values()]))
        log_probs = {}
        for modality in exact:
            own = log_prob_distance(half[modality], exact[modality])
            # A modality that happens to be rounded well is not held to its luck.
            log_probs[modality] = {
                "mean": SCATTER * max(own["mean"], every["mean"]),
                "max": TAIL * max(own["max"], every["max"]),
            }
        each, together = gradient_distances(half_gradients, exact_gradients)
        gradient_of = {name: TAIL * max(value, together) for name, value in each.items()}
        return cls(log_probs, SCATTER * every["mean"], SCATTER * together, gradient_of)

    def between_two(self) -> "Bounds":
        """From bounds against an exact computation to those between two that err independently."""
        root = math.sqrt(2)
        return Bounds(
            {
                modality: {key: root * value for key, value in values.items()}
                for modality, values in self.log_probs.items()
            },
            root * self.loss,
            root * self.gradient,
            {name: root * value for name, value in self.gradient_of.items()},
        )


def log_prob_distance(found: Tensor, expected: Tensor) -> dict[str, float]:
    """`max` and `mean` of |d| in nats, and `tmpe`, the mean of exp|d| (see `megarl.observe.mismatch`), of two
    float32 `[tokens]`."""
    d = (found.double() - expected.double()).abs()
    return {"max": float(d.max()), "mean": float(d.mean()), "tmpe": float(d.exp().mean())}


def gradient_distances(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[dict[str, float], float]:
    """|found - expected| / |expected| (2-norms) by name, and of all together; NaN for what was not found or has another
    shape.  Computed where `expected` is."""
    total = norm(expected)
    each, squares = {}, 0.0
    for name, gradient in expected.items():
        if name not in found or found[name].shape != gradient.shape:
            each[name] = squares = math.nan
            continue
        distance = float((found[name].to(gradient.device).double() - gradient.double()).norm())
        each[name] = distance / max(float(gradient.double().norm()), _SILENT * total, 1e-30)
        squares += distance**2
    return each, math.sqrt(squares) / max(total, 1e-30)


def norm(gradients: Mapping[str, Tensor]) -> float:
    """2-norm over all of them."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def gradient_check(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bounds: Bounds) -> Check:
    """The weight that is closest to its bound, or furthest beyond it, stands for all."""
    each, together = gradient_distances(found, expected)

    def of(weight: str) -> float:
        return bounds.gradient_of.get(weight, bounds.gradient)

    def excess(weight: str) -> float:
        return math.inf if math.isnan(each[weight]) else each[weight] / of(weight)

    worst = max(each, key=excess)
    return Check(
        name,
        f"gradients of {len(each)} weights",
        {"worst": each[worst], "together": together},
        {"worst": of(worst), "together": bounds.gradient},
        note=worst,
    )
