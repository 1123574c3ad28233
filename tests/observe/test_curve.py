import subprocess
import sys

import pytest
from PIL import Image

from megarl.errors import UserError
from megarl.observe.curve import draw_curve
from megarl.observe.metrics import MetricsLog


def run(run_dir, lines):
    with MetricsLog(run_dir, 0) as log:
        for step, values in enumerate(lines, start=1):
            log.write(step, values)
    return run_dir


def colours(path) -> set[str]:
    """Of all pixels."""
    with Image.open(path) as image:
        return {"#{:02x}{:02x}{:02x}".format(*rgb) for _, rgb in image.convert("RGB").getcolors(1 << 24)}


BLUE, ORANGE, GREEN, VIOLET, INK = "#2563eb", "#ea580c", "#0f766e", "#7c3aed", "#1f2933"


def test_every_curve_is_drawn(tmp_path):
    values = [
        {"reward/mean": 0.2, "reward/accuracy": 0.1, "mismatch/max": 1e-3, "mismatch/mean": 1e-5},
        {"reward/mean": 0.6, "reward/accuracy": 0.5, "mismatch/max": 2e-3, "mismatch/mean": 2e-5},
    ]
    values[-1] |= {"eval/accuracy": 0.5, "eval/chance": 0.1}
    path = draw_curve(run(tmp_path, values))
    assert path == tmp_path / "curve.png"
    assert {BLUE, ORANGE, GREEN, VIOLET, INK} <= colours(path)


def test_policy_metrics_get_a_panel_of_their_own(tmp_path):
    without = draw_curve(run(tmp_path / "without", [{"reward/accuracy": 0.5}]))
    with_policy = draw_curve(run(tmp_path / "with", [{"reward/accuracy": 0.5, "policy/entropy": 1.0}]))
    assert Image.open(with_policy).height > Image.open(without).height


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{}],
        [{"reward/accuracy": 0.5}],
        [{"reward/accuracy": None, "mismatch/max": None, "eval/accuracy": 0.5}],
        [{"mismatch/max": 0.0, "mismatch/mean": 0.0, "policy/kl": 0.0}] * 3,
        [{"mismatch/max": 0.0}, {"mismatch/max": 1e-3}],
        [{"reward/mean": -1.5}, {"reward/mean": 3.0}],
        [{"reward/accuracy": step / 100} if step % 7 else {} for step in range(100)],
    ],
    ids=["nothing", "no metric", "one step", "nulls", "bitwise equal", "some zeros", "wide reward", "holes"],
)
def test_any_log_can_be_drawn(tmp_path, lines):
    draw_curve(run(tmp_path / "run with $ and _", lines))


def test_drawing_needs_neither_pyplot_nor_torch(tmp_path):
    """The first holds global state; without the second `python -m megarl.report` starts at once."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/accuracy": 0.5}\n')
    code = """
import sys
from pathlib import Path
from megarl.observe.curve import draw_curve
draw_curve(Path(sys.argv[1]))
assert not {"torch", "matplotlib.pyplot"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_the_old_picture_is_replaced(tmp_path):
    run(tmp_path, [{"reward/accuracy": 0.5}])
    first = draw_curve(tmp_path).read_bytes()
    run(tmp_path, [{"reward/accuracy": 0.5}, {"reward/accuracy": 0.9}])
    assert draw_curve(tmp_path).read_bytes() != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl", "tensorboard"]


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl"):
        draw_curve(tmp_path)
