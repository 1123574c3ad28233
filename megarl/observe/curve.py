"""The learning curve of a run, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megarl.observe.files import replacing
from megarl.observe.metrics import Value, read_metrics

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _ORANGE, _GREEN, _VIOLET = "#2563eb", "#ea580c", "#0f766e", "#7c3aed"

Lines = Sequence[dict[str, Value]]


def draw_curve(run_dir: Path) -> Path:
    """Draw `run_dir/curve.png` from `run_dir/metrics.jsonl` and return its path.

    Above: training reward and accuracy, faint for each step and bold as a running mean, held-out accuracy
    where it was taken, and chance.  Below, on logarithmic axes: the mismatch between engine and trainer,
    and, if logged, the policy's entropy and KL to the reference policy (`policy/entropy`, `policy/kl`).

    May be called during the run: it takes under a second, leaves pyplot's global state alone, and a viewer
    never finds half a picture.  Raises UserError as `read_metrics` does.
    """
    lines = read_metrics(run_dir)
    draws = [_draw_learning, _draw_mismatch]
    if any(_points(lines, name)[0] for name in ("policy/entropy", "policy/kl")):
        draws.append(_draw_policy)
    heights = [3.8] + [1.5] * (len(draws) - 1)

    figure = Figure(figsize=(9, sum(heights) + 1.2), dpi=120, layout="constrained")
    panels = figure.subplots(len(draws), 1, sharex=True, height_ratios=heights)
    for draw, axes in zip(draws, panels, strict=True):
        draw(axes, lines)
        _dress(axes)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.align_ylabels(panels)
    title = _title(run_dir.resolve().name, lines)
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=12, weight="bold", parse_math=False)

    path = run_dir / "curve.png"
    with replacing(path) as file:
        figure.savefig(file, format="png")
    return path


def _title(run: str, lines: Lines) -> str:
    steps, accuracy = _points(lines, "eval/accuracy")
    return f"{run}: held-out accuracy {accuracy[-1]:.3f} at step {steps[-1]}" if steps else run


def _draw_learning(axes: Axes, lines: Lines) -> None:
    window = len(lines) // 30 * 2 + 1
    for name, label, colour in (
        ("reward/mean", "training reward", _ORANGE),
        ("reward/accuracy", "training accuracy", _BLUE),
    ):
        steps, values = _points(lines, name)
        if not steps:
            continue
        if window > 1:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, _running_mean(values, window), color=colour, linewidth=1.8, label=label)
    steps, values = _points(lines, "eval/accuracy")
    if steps:
        axes.plot(steps, values, "o", color=_INK, markersize=5.5, zorder=3, label="held-out accuracy")
    _, chance = _points(lines, "eval/chance")
    if chance:
        label = f"chance {chance[-1]:.3f}"
        axes.axhline(chance[-1], color=_MUTED, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylabel("reward, accuracy" + (f"\nbold: mean of {window} steps" if window > 1 else ""))
    if all(0 <= value <= 1 for line in axes.lines for value in line.get_ydata()):
        axes.set_ylim(-0.03, 1.03)


def _draw_mismatch(axes: Axes, lines: Lines) -> None:
    axes.set_ylabel("mismatch\nnats")
    _draw_log(
        axes,
        lines,
        ("mismatch/max", "largest |trainer - engine|", _VIOLET),
        ("mismatch/mean", "mean |trainer - engine|", _GREEN),
    )
    if _points(lines, "mismatch/max")[0] and not axes.lines:
        axes.text(0.5, 0.5, "no mismatch: 0 at every step", transform=axes.transAxes, ha="center", color=_MUTED)


def _draw_policy(axes: Axes, lines: Lines) -> None:
    axes.set_ylabel("policy\nnats")
    _draw_log(
        axes,
        lines,
        ("policy/entropy", "entropy", _BLUE),
        ("policy/kl", "KL to the reference policy", _ORANGE),
    )


def _draw_log(axes: Axes, lines: Lines, *curves: tuple[str, str, str]) -> None:
    """Draw (metric, label, colour) on a logarithmic axis; what is not positive leaves a gap."""
    for name, label, colour in curves:
        steps, values = _points(lines, name)
        if any(value > 0 for value in values):
            positive = [value if value > 0 else float("nan") for value in values]
            axes.plot(steps, positive, color=colour, linewidth=1.3, label=label)
    if axes.lines:
        axes.set_yscale("log")
    else:
        axes.set_yticks([])


def _dress(axes: Axes) -> None:
    axes.margins(x=0.01)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.tick_params(which="both", color=_MUTED, labelcolor=_INK, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    if axes.get_legend_handles_labels()[0]:
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}  # covers no curve
        axes.legend(ncols=4, frameon=False, fontsize=9, labelcolor=_INK, **above)


def _points(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it was logged and finite."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean of `window` (odd) values, of fewer at both ends."""
    half = window // 2
    spans = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]
