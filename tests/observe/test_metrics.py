import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.errors import UserError
from megarl.observe.metrics import MetricsLog, read_metrics


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir)]


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard would show."""
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]


def write(run_dir: Path, resume_step: int, last: int, **values: float) -> None:
    """Steps from `resume_step + 1` to `last`."""
    with MetricsLog(run_dir, resume_step) as log:
        for step in range(resume_step + 1, last + 1):
            log.write(step, values or {"reward/mean": step / 10})


def test_a_line_is_a_json_object_that_begins_with_its_step(tmp_path):
    with MetricsLog(tmp_path / "run", 0) as log:
        log.write(1, {"reward/mean": 0.123456789, "tokens": 1234567, "source": "digits", "eval/accuracy": None})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 1, "reward/mean": 0.123457, "tokens": 1234567, "source": "digits", "eval/accuracy": null}\n'
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_becomes_null(tmp_path, value):
    write(tmp_path, 0, 1, loss=value)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None}]


@pytest.mark.parametrize(
    ("value", "kept"), [(1234567.8, 1234570.0), (-9.87654321e-9, -9.87654e-9), (0.1 + 0.2, 0.3), (2.0, 2.0)]
)
def test_floats_keep_six_significant_digits(tmp_path, value, kept):
    write(tmp_path, 0, 1, loss=value)
    assert read_metrics(tmp_path)[0]["loss"] == kept


def test_a_step_is_on_disk_when_write_returns(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in (1, 2, 3):
            log.write(step, {"reward/mean": 0.5})
        assert steps(tmp_path) == [1, 2, 3]
        assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_a_value_named_step_is_refused(tmp_path):
    with MetricsLog(tmp_path, 0) as log, pytest.raises(TypeError, match="step"):
        log.write(1, {"step": 2})


def test_tensorboard_gets_the_numbers_only(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.write(1, {"reward/mean": 0.5, "tokens": 7, "source": "digits", "loss": float("nan")})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "tokens"]


def test_resuming_forgets_later_steps_in_both_logs(tmp_path):
    write(tmp_path, 0, 7)
    write(tmp_path, 4, 6, **{"reward/mean": 9.0})
    expected = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 9.0), (6, 9.0)]
    assert [(line["step"], line["reward/mean"]) for line in read_metrics(tmp_path)] == expected
    assert scalars(tmp_path, "reward/mean") == expected


def test_a_new_run_in_an_old_folder_begins_anew(tmp_path):
    write(tmp_path, 0, 3)
    with MetricsLog(tmp_path, 0):
        assert steps(tmp_path) == []


def test_an_evaluation_before_training_is_not_doubled_by_a_restart(tmp_path):
    for accuracy in (0.1, 0.2):  # killed before its first checkpoint, started again
        with MetricsLog(tmp_path, 0) as log:
            log.write(0, {"eval/accuracy": accuracy})
            log.write(1, {"reward/mean": accuracy})
    assert [(line["step"], line.get("eval/accuracy")) for line in read_metrics(tmp_path)] == [
        (0, 0.2),
        (1, None),
    ]
    assert scalars(tmp_path, "eval/accuracy") == [(0, 0.2)]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), total=st.integers(1, 6))
def test_a_log_cut_anywhere_resumes_without_gap_or_double(data, total):
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        write(run_dir, 0, total)
        path = run_dir / "metrics.jsonl"
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)), label="bytes that survive")
        path.write_bytes(whole[:cut])
        survivors = steps(run_dir)
        assert survivors == list(range(1, len(survivors) + 1))
        checkpoint = data.draw(st.integers(0, len(survivors)), label="checkpoint")
        write(run_dir, checkpoint, total)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("tail", [b'{"step": 2, "rew', b"\0\0\0\0", b"\0\0\0\n", b"\xff\xfe{\n"])
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    write(tmp_path, 0, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert steps(tmp_path) == [1]
    write(tmp_path, 1, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is damaged"):
        read_metrics(tmp_path)


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="elsewhere is not the folder of a run: it has no metrics.jsonl"):
        read_metrics(tmp_path / "elsewhere")


def test_a_failed_rewrite_keeps_the_old_log(tmp_path, monkeypatch):
    write(tmp_path, 0, 3)

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="disk full"):
        MetricsLog(tmp_path, 1)
    assert steps(tmp_path) == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]
