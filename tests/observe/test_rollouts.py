import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.observe.rollouts import RolloutRow, append_rows, write_rollouts

ROW = RolloutRow(
    prompt_index=3,
    source="digits",
    prompt="<image> Which digit? \u2028 中",
    media=("a.png", "train.parquet row 7 videos[0]"),
    answer="7",
    completion="It is 7.",
    reward=1.0,
    advantage=0.70710678,
    finished="stop",
    ids=(5, 6),
    engine_logprobs=(-0.12345678, -1e-9),
    trainer_logprobs=(-0.12345699, float("-inf")),
)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_row_is_a_line_with_all_its_fields(tmp_path):
    path = tmp_path / "rollouts" / "step_4.jsonl"
    write_rollouts(path, [ROW, replace(ROW, prompt_index=4)])
    first, second = read(path)
    assert second["prompt_index"] == 4
    assert first == {
        "prompt_index": 3,
        "source": "digits",
        "prompt": "<image> Which digit? \u2028 中",
        "media": ["a.png", "train.parquet row 7 videos[0]"],
        "answer": "7",
        "completion": "It is 7.",
        "reward": 1.0,
        "advantage": 0.707107,
        "finished": "stop",
        "ids": [5, 6],
        "engine_logprobs": [-0.123457, 0.0],
        "trainer_logprobs": [-0.123457, None],
        "turns": 1,
    }
    assert b"-0.0," not in path.read_bytes()


def test_text_stays_legible_and_lone_surrogates_survive(tmp_path):
    write_rollouts(tmp_path / "r.jsonl", [replace(ROW, completion="中 \ud83d")])
    assert "中".encode() in (tmp_path / "r.jsonl").read_bytes()
    assert read(tmp_path / "r.jsonl")[0]["completion"] == "中 \ud83d"


def test_a_row_that_was_not_scored(tmp_path):
    write_rollouts(tmp_path / "r.jsonl", [replace(ROW, trainer_logprobs=None)])
    assert read(tmp_path / "r.jsonl")[0]["trainer_logprobs"] is None


def test_an_empty_completion(tmp_path):
    write_rollouts(tmp_path / "r.jsonl", [replace(ROW, ids=(), engine_logprobs=(), trainer_logprobs=())])
    assert read(tmp_path / "r.jsonl")[0]["trainer_logprobs"] == []


@pytest.mark.parametrize("field", ["ids", "engine_logprobs", "trainer_logprobs"])
def test_per_token_lengths_must_agree(field):
    with pytest.raises(ValueError, match=f"prompt 3: per-token lengths differ.*'{field}': 1"):
        replace(ROW, **{field: (1,)})


def test_no_half_file_is_ever_seen(tmp_path):
    path = tmp_path / "step_1.jsonl"
    write_rollouts(path, [ROW])
    before = path.read_bytes()

    def rows():
        yield replace(ROW, answer="another")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_rollouts(path, rows())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_added(tmp_path):
    """Whatever a completion holds is one line."""
    path = tmp_path / "failures.jsonl"
    append_rows(path, [{"step": 1, "completion": "a\nb\u2028\ud800"}])
    append_rows(path, [{"step": 2}, {"step": 3}])
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert found == [{"step": 1, "completion": "a\nb\u2028\ud800"}, {"step": 2}, {"step": 3}]
