"""`megarl.train` from the command line: what a run leaves behind, refuses, survives and learns."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megarl.data.generators.digits import write_digits
from megarl.models.tiny_processor import build_tiny_processor
from tests import commands, tiny
from tests.distributed import TP2, Layout

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "recipes" / "digits.yaml"
STEPS = 16
LAST_LINE = re.compile(r"held-out accuracy (\d\.\d{3}) \(chance (\d\.\d{3})\), (\d+) steps, (\d+) s, run in (\S+)")
RESULTS = re.compile(r"(reward|rollout|policy|optimizer|mismatch|eval)/")
"""Metrics that the same run gives again; times are others."""


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The data folder, made once."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    write_digits(folder, scans=200)  # every run looks at each of them
    return folder


@pytest.fixture(scope="session")
def recipe(tmp_path_factory, digits):
    """The digits recipe cut down to seconds."""
    path = tmp_path_factory.mktemp("recipe") / "short.yaml"
    values = {
        "extends": str(DIGITS),
        "steps": STEPS,
        "data": {"path": str(digits)},
        "warmup": {"steps": 8, "batch_size": 16},
        "algorithm": {"prompts_per_step": 8, "group_size": 4},
        "evaluation": {"every": 4, "max_prompts": 16},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory, recipe):
    """Folder and output of an uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    result = commands.run("megarl.train", recipe, f"run_dir={folder}")
    assert result.code == 0, result.err
    return folder, result


def metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k == "step" or RESULTS.match(k)} for line in metrics(folder)]


# A whole run


def test_last_line(finished):
    folder, result = finished
    match = LAST_LINE.fullmatch(result.out.splitlines()[-1])
    assert match, result.out
    last = metrics(folder)[-1]
    assert float(match[1]) == pytest.approx(last["eval/accuracy"], abs=6e-4)
    assert float(match[2]) == pytest.approx(last["eval/chance"], abs=6e-4)
    assert (int(match[3]), match[5]) == (STEPS, str(folder))


def test_nothing_on_stderr(finished):
    """What is printed there is for failures: no chatter of the libraries."""
    assert finished[1].err == ""


def test_metrics(finished):
    lines = metrics(finished[0])
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 4, 8, 12, 16]
    for line in lines[1:]:
        assert 0 <= line["reward/mean"] <= 1.1
        assert 0 < line["mismatch/max"] < 1e-5  # engine and trainer agree, and are two computations
        assert line["rollout/tokens"] >= 32
        assert line["optimizer/skipped_updates"] == 0
        assert all(line[f"time/{phase}"] > 0 for phase in ("rollout", "reward", "score", "train"))
    assert 0 < lines[1]["policy/kl"] < lines[-1]["policy/kl"]  # the reference is the policy that RL began with


def test_run_folder(finished):
    folder = finished[0]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    kept = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (kept["steps"], kept["rollout"]["block_size_tokens"]) == (STEPS, 64)  # defaults included
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", f"rl_{STEPS:06d}"]
    assert not list(folder.rglob("*.partial")) and not list(folder.glob("rejected_*"))
    checked = [json.loads((folder / f"data_{split}.json").read_text()) for split in ("train", "test")]
    assert [(report["rows"], report["accepted"]) for report in checked] == [(160, 160), (40, 40)]
    assert len({report["content_sha256"] for report in checked}) == 2


def test_rollouts(finished, digits):
    """Prompt, picture, answer, completion, reward and both log-probabilities of each."""
    folder = finished[0]
    answers = {row["messages"][0]["content"][0]["image"]: row["answer"] for row in read_rows(digits / "train.jsonl")}
    assert len(list((folder / "rollouts").iterdir())) == STEPS
    for step in (1, STEPS):
        rows = read_rows(folder / "rollouts" / f"step_{step}.jsonl")
        assert len(rows) == 8 * 4
        assert len({row["prompt_index"] for row in rows}) == 8
        for row in rows:
            (picture,) = row["media"]
            assert answers[picture] == row["answer"]
            assert "<|image_pad|>" * 4 in row["prompt"] and row["prompt"].endswith("?")
            right = row["finished"] == "stop" and row["completion"] == row["answer"]
            well_formed = row["finished"] == "stop" and re.fullmatch("[0-9]", row["completion"]) is not None
            assert row["reward"] == pytest.approx(right + 0.1 * well_formed)
            assert len(row["ids"]) == len(row["engine_logprobs"]) == len(row["trainer_logprobs"]) <= 2
            for engine, trainer in zip(row["engine_logprobs"], row["trainer_logprobs"], strict=True):
                assert engine == pytest.approx(trainer, abs=1e-5) and engine < 0
        line = metrics(folder)[step]
        assert line["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows), abs=1e-5)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_exported_checkpoint(finished, digits):
    """transformers loads it and answers as the run's last evaluation did."""
    from transformers import AutoProcessor

    from megarl.data.prompts import load_prompts
    from megarl.media.encoder import Encoder
    from megarl.models.qwen3_vl.positions import mrope_positions

    folder = finished[0] / "checkpoint"
    processor = AutoProcessor.from_pretrained(folder)
    model = tiny.Reference(folder)
    prompts, _ = load_prompts(digits / "test.jsonl")
    encoder = Encoder(processor, mrope_positions, 128)
    correct = 0
    for prompt in prompts[:16]:
        ids = model.greedy(encoder.encode(prompt), 2).tolist()
        stopped = ids[-1] == processor.tokenizer.eos_token_id
        correct += stopped and processor.tokenizer.decode(ids[:-1]).strip() == prompt.answer
    assert correct / 16 == pytest.approx(metrics(finished[0])[-1]["eval/accuracy"], abs=1e-5)


def test_finished_run_again(finished, recipe, tmp_path):
    """The same command once more ends at once with the same last line and adds nothing."""
    before = metrics(finished[0])
    result = commands.fork(tmp_path, recipe, f"run_dir={finished[0]}")
    assert result.code == 0, result.err
    assert metrics(finished[0]) == before
    again, first = (LAST_LINE.fullmatch(r.out.splitlines()[-1]) for r in (result, finished[1]))
    assert again.group(1, 2, 3, 5) == first.group(1, 2, 3, 5)


def test_torchrun(finished, recipe, tmp_path):
    """torchrun with 2 processes gives, to rounding, what one process gives: weights, draws, minibatches, updates."""
    layout = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    result = commands.run("megarl.train", recipe, f"run_dir={tmp_path / 'run'}", *layout, processes=2)
    assert result.code == 0, result.err
    assert len(LAST_LINE.findall(result.out)) == 1
    found, expected = results(tmp_path / "run"), results(finished[0])
    assert [line["step"] for line in found] == list(range(STEPS + 1))
    assert_equal_steps(found, expected)


def assert_equal_steps(found: list[dict], expected: list[dict]) -> None:
    """The rewards of five steps, and the first update."""
    assert found[0] == expected[0]
    for step in range(1, 6):
        for key in ("reward/mean", "reward/accuracy", "rollout/tokens"):
            assert found[step][key] == pytest.approx(expected[step][key], abs=1e-4), step
    for key in ("policy/loss", "policy/entropy", "optimizer/grad_norm"):
        assert found[1][key] == pytest.approx(expected[1][key], rel=1e-2)


RESHARDED = {
    "tp2 to tp1": [
        "parallel.tensor_model_parallel_size=2",
        "rollout.parallel.tensor_model_parallel_size=1",
        "rollout.verify_sync=true",
    ],
    "dp2 to tp2": ["rollout.parallel.tensor_model_parallel_size=2"],
}


@pytest.mark.slow
def test_resume_into_another_layout_of_the_engines(finished, recipe, tmp_path):
    """A run with resharded rollouts is stopped and started again: the engine samples with the weights that were saved,
    and the run ends as one that was never stopped."""
    command = ("megarl.train", recipe, f"run_dir={tmp_path / 'run'}", *RESHARDED["tp2 to tp1"])
    process = commands.start(*command, processes=2)
    commands.wait_for(lambda: len(metrics(tmp_path / "run")) > 3, process, 120)
    os.kill(process.pid, signal.SIGTERM)
    commands.finish(process, 60)
    assert 3 < len(metrics(tmp_path / "run")) <= STEPS
    result = commands.run(*command, processes=2)
    assert result.code == 0, result.err
    assert re.search(r"resumed after rl step \d+", result.out)
    found, expected = results(tmp_path / "run"), results(finished[0])
    assert [line["step"] for line in found] == list(range(STEPS + 1))
    for line in found[1:]:
        assert line["mismatch/max"] < 1e-5
    for step in range(1, 6):
        assert found[step]["reward/mean"] == pytest.approx(expected[step]["reward/mean"], abs=1e-4), step


# With so large an epsilon a weight whose gradient is nothing but rounding moves by no more than rounding; else Adam
# takes a whole step with it, in every layout another way, and sooner or later a draw falls to another token.
FIVE_STEPS = ["steps=5", "evaluation.every=5", "checkpoint.every=0", "optimizer.adam_eps=1.0e-3"]
EXPERTS = {
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "vision_config": {"model_type": "qwen3_vl_moe"},
}


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory, recipe):
    """By whether there are experts: the recipe, and what five steps of one process gave."""
    made = {}

    def run(experts: bool) -> tuple[Path, list[dict]]:
        if experts not in made:
            folder = tmp_path_factory.mktemp("one_rank")
            path = folder / "recipe.yaml"
            model = {"model": {"config": EXPERTS}} if experts else {}
            path.write_text(yaml.safe_dump({"extends": str(recipe), **model}))
            result = commands.fork(folder, path, f"run_dir={folder / 'run'}", *FIVE_STEPS)
            assert result.code == 0, result.err
            made[experts] = path, results(folder / "run")
        return made[experts]

    return run


QUICK = [Layout(2, 1), Layout(2, 1, context_parallel=2), Layout(2, 1, expert_parallel=2)]
SLOW = [
    TP2,
    Layout(4, 2, sequence_parallel=True),
    Layout(4, 1, context_parallel=4),
    Layout(4, 2, context_parallel=2),
    Layout(4, 1, context_parallel=2, expert_parallel=2),
    Layout(4, 2, sequence_parallel=True, expert_parallel=2, expert_tensor_parallel=2),
]


@pytest.mark.parametrize(
    "layout",
    [
        *[pytest.param(layout, id=layout.name) for layout in QUICK],
        *[pytest.param(layout, id=layout.name, marks=pytest.mark.slow) for layout in SLOW],
    ],
)
def test_layouts(one_rank, tmp_path, layout):
    """Every layout gets the rewards that one process gets: rollouts are drawn alike, so none is replayed."""
    recipe, expected = one_rank(layout.expert_parallel > 1)
    arguments = [recipe, f"run_dir={tmp_path / 'run'}", *FIVE_STEPS, *layout.arguments]
    result = commands.fork(tmp_path, *arguments, processes=layout.world_size, timeout=300)
    assert result.code == 0, result.err
    found = results(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(6))
    assert_equal_steps(found, expected)


@pytest.mark.parametrize("layout", ["tp2 to tp1", pytest.param("dp2 to tp2", marks=pytest.mark.slow)])
def test_layouts_of_the_engines(one_rank, tmp_path, layout):
    """The same with engines in a layout of their own, whose weights are copies."""
    recipe, expected = one_rank(False)
    arguments = [recipe, f"run_dir={tmp_path / 'run'}", *FIVE_STEPS, *RESHARDED[layout]]
    result = commands.fork(tmp_path, *arguments, processes=2, timeout=300)
    assert result.code == 0, result.err
    assert_equal_steps(results(tmp_path / "run"), expected)
    assert all(line["sync/bytes"] > 0 and line["time/sync"] > 0 for line in metrics(tmp_path / "run")[1:])


@pytest.mark.slow
def test_killed_rank(recipe, tmp_path):
    """A rank that is killed in mid-run ends the job within 30 seconds; the screen says which, and nobody is left."""
    folder = tmp_path / "run"
    process = commands.start("megarl.train", recipe, f"run_dir={folder}", "steps=10000", processes=2)
    commands.wait_for(lambda: len(metrics(folder)) > 2, process, 240)
    workers = {worker.environ()["RANK"]: worker for worker in psutil.Process(process.pid).children()}
    assert workers.keys() == {"0", "1"}
    workers["1"].kill()
    begin = time.monotonic()
    result = commands.finish(process, 60)
    assert time.monotonic() - begin < 30
    assert result.code != 0
    assert re.search(r"rank +: 1 .*\n *exitcode +: -9", result.err), result.err
    assert psutil.wait_procs(workers.values(), 5)[1] == []


def test_offload(finished, recipe, tmp_path):
    """The state is away whenever rollouts are sampled, and the run is the same to the bit."""
    result = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", "training.offload=optimizer")
    assert result.code == 0, result.err
    assert results(tmp_path / "run") == results(finished[0])
    ours, theirs = (tiny.Reference(f / "checkpoint").model.state_dict() for f in (tmp_path / "run", finished[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    left, stayed = ([m["memory/offloaded_bytes"] for m in metrics(f)[1:]] for f in (tmp_path / "run", finished[0]))
    moments = 2 * 4 * sum(p.numel() for p in tiny.Reference(finished[0] / "checkpoint").model.parameters())
    assert set(stayed) == {0}
    # The fresh optimizer of the first step has none yet.
    assert all(moments <= size < 1.1 * moments for size in left[1:]), (left, moments)


# Stopped and started again


@pytest.mark.parametrize("after", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_stop_and_resume(finished, recipe, tmp_path, after):
    """SIGTERM in the warm-up (or just behind it) and later; the same command then goes on at the saved step and
    ends as a run that was never stopped."""
    folder = tmp_path / "run"
    command = ("megarl.train", recipe, f"run_dir={folder}")
    process = commands.start(*command)
    if after:
        commands.wait_for(lambda: len(metrics(folder)) > after, process, 120)
        os.killpg(process.pid, signal.SIGTERM)  # as torchrun does: whatever helpers there are get it too
    else:
        while not process.stdout.readline().startswith("warm-up 1/"):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    stopped = commands.finish(process, 60)
    assert stopped.code == 0, stopped.err
    said = re.search(r"stopped after (warm-up|rl) step (\d+): the same command continues from there", stopped.out)
    assert said, stopped.out
    assert not LAST_LINE.search(stopped.out)
    if after:
        assert said[1] == "rl" and after <= int(said[2]) < STEPS
        assert [line["step"] for line in metrics(folder)] == list(range(int(said[2]) + 1))

    resumed = commands.fork(tmp_path, *command[1:])
    assert resumed.code == 0, resumed.err
    assert f"resumed after {said[1]} step {said[2]}" in resumed.out
    assert results(folder) == results(finished[0])
    assert sorted(p.name for p in (folder / "rollouts").iterdir()) == sorted(
        p.name for p in (finished[0] / "rollouts").iterdir()
    )
    ours, theirs = (tiny.Reference(f / "checkpoint").model.state_dict() for f in (folder, finished[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_stop_and_resume_torchrun(finished, recipe, tmp_path):
    """The signal goes to torchrun, as a scheduler sends it."""
    folder = tmp_path / "run"
    command = ("megarl.train", recipe, f"run_dir={folder}")
    process = commands.start(*command, processes=2)
    commands.wait_for(lambda: len(metrics(folder)) > 2, process, 180)
    process.send_signal(signal.SIGTERM)
    stopped = commands.finish(process, 60)
    said = re.search(r"stopped after rl step (\d+)", stopped.out)
    assert said, (stopped.out, stopped.err)
    resumed = commands.run(*command, processes=2)
    assert resumed.code == 0, resumed.err
    assert f"resumed after rl step {said[1]}" in resumed.out
    assert [line["step"] for line in metrics(folder)] == list(range(STEPS + 1))


# Refusals


def test_refusal_before_megatron(tmp_path):
    """From the command line in full; nothing heavy is imported, so it takes seconds."""
    result = commands.run("megarl.train", DIGITS, "optimizer.learning_rat=1", cwd=tmp_path, timeout=60)
    line = result.refusal()
    assert "optimizer.learning_rat" in line and "did you mean 'optimizer.learning_rate'?" in line
    assert result.out == "" and not list(tmp_path.iterdir())


def test_refusal_after_megatron(tmp_path):
    """From the command line in full: no other line on stderr, of Megatron's imports either."""
    overrides = ["data.generator=null", f"data.path={tmp_path / 'nowhere'}", f"run_dir={tmp_path / 'run'}"]
    line = commands.run("megarl.train", DIGITS, *overrides).refusal()
    assert "data.path" in line and str(tmp_path / "nowhere") in line


def test_refusal_two_processes(tmp_path):
    """Two workers, one line."""
    overrides = ["parallel.tensor_model_parallel_size=4", f"run_dir={tmp_path / 'run'}"]
    result = commands.run("megarl.train", DIGITS, *overrides, processes=2, timeout=90)
    ours = [line for line in result.err.splitlines() if line.startswith("megarl: ")]
    assert len(ours) == 1 and "parallel.tensor_model_parallel_size = 4" in ours[0] and "2" in ours[0]
    assert re.search(r"exitcode *: *2", result.err)


def _broken_on_one_rank(arguments: list[str]) -> int:
    from megarl.platform import launch
    from megarl.train import train

    if launch.rank() == 1:
        sys.modules["megarl.session"] = None
    return launch.command(train, arguments)


def test_import_that_fails_on_one_rank(recipe, tmp_path):
    """As where a node of a cluster has a broken installation: the other rank does not wait for it."""
    begun = time.monotonic()
    arguments = [recipe, f"run_dir={tmp_path / 'run'}"]
    result = commands.fork(tmp_path, *arguments, main=_broken_on_one_rank, processes=2, timeout=60)
    assert time.monotonic() - begun < 20
    assert result.code == 1
    assert "megarl: rank 1 failed: ModuleNotFoundError: import of megarl.session halted" in result.err
    assert "Traceback" in (tmp_path / "stderr.1").read_text()


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["steps=three"], ["steps", "three", "integer"]),
        (["parallel.tensor_model_parallel_size=2"], ["parallel.tensor_model_parallel_size = 2", "world size", "1"]),
        (["model.init_std=-1"], ["model.init_std", "-1"]),
        (["rollout.stop=['<|nothing|>']"], ["rollout.stop", "<|nothing|>"]),
        (["model.config.text_config.hidden_sise=3"], ["hidden_sise"]),
        (["rollout.max_new_tokens=1"], ["warmup", "answer '0' has 2 tokens", "rollout.max_new_tokens = 1"]),
        (["data.max_prompt_tokens=4"], ["train.jsonl", "160 of 160", "max_prompt_tokens = 4"]),
    ],
    ids=str,
)
def test_refused_values(recipe, tmp_path, overrides, words):
    line = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", *overrides).refusal()
    for word in words:
        assert word in line


def test_no_arguments(tmp_path):
    assert "usage" in commands.fork(tmp_path).refusal()


def test_recipe_that_extends_itself(tmp_path):
    path = tmp_path / "circle.yaml"
    path.write_text("extends: circle.yaml\n")
    assert "circle" in commands.fork(tmp_path, path).refusal()


def test_folder_of_another_recipe(finished, recipe, tmp_path):
    """Named by key, old and new value; the folder stays as it is."""
    before = sorted(finished[0].rglob("*"))
    line = commands.fork(tmp_path, recipe, f"run_dir={finished[0]}", "optimizer.learning_rate=0.5").refusal()
    assert "optimizer.learning_rate: 0.0015 -> 0.5" in line and str(finished[0]) in line
    assert sorted(finished[0].rglob("*")) == before


def test_unsupported_architecture(recipe, tmp_path):
    folder = tmp_path / "mistral"
    build_tiny_processor(folder, tiny.ALPHABET, 128, 4, 2, 2, 256, 256)
    (folder / "config.json").write_text(json.dumps({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}))
    line = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", *from_folder(folder)).refusal()
    assert "mistral" in line.lower() and "qwen3_vl" in line


def test_no_checkpoint(recipe, tmp_path):
    folder = tmp_path / "nowhere"
    line = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", *from_folder(folder)).refusal()
    assert str(folder) in line


def from_folder(folder: Path) -> list[str]:
    return [f"model.path={folder}", "model.config=null", "model.init_std=null", "model.tiny_processor=null"]


@pytest.mark.parametrize("key", ["model.path", "algorithm.reference"])
def test_weights_that_are_not_those_of_the_config(finished, recipe, tmp_path, key):
    folder = shutil.copytree(finished[0] / "checkpoint", tmp_path / "folder")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.bias"] = weights.pop("lm_head.weight")[:, 0].contiguous()
    save_file(weights, folder / "model.safetensors")
    teacher = [f"algorithm.reference={folder}", "algorithm.kl_coefficient=1.0"]
    overrides = from_folder(folder) if key == "model.path" else teacher
    line = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", *overrides).refusal()
    assert line == (
        f"{folder}: of the weights of the qwen3_vl in config.json, 1 are missing (lm_head.weight); "
        "1 are in no such model (lm_head.bias)"
    )


def test_a_config_with_other_media_tokens(finished, recipe, tmp_path):
    folder = shutil.copytree(finished[0] / "checkpoint", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    token, config["image_token_id"] = config["image_token_id"], config["video_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    line = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", *from_folder(folder)).refusal()
    assert line == (f"the tokenizer gives '<|image_pad|>' the id {token}: config.json has image_token_id = {token + 1}")


def test_tokenizer_without_media_token(recipe, tmp_path):
    folder = tmp_path / "processor"
    build_tiny_processor(folder, tiny.ALPHABET, 128, 4, 2, 2, 256, 256)
    for file in folder.glob("*.json"):
        text = file.read_text().replace("<|image_pad|>", "<|other_pad|>")
        file.write_text(text)
    overrides = [f"model.processor={folder}", "model.tiny_processor=null"]
    line = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", *overrides).refusal()
    assert "<|image_pad|>" in line


# Pictures that cannot be read


@pytest.fixture
def damaged(digits, tmp_path):
    """A data folder of 20 training rows, and a function that breaks the pictures of the first so many."""
    folder = tmp_path / "digits"
    shutil.copytree(digits, folder)
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)[:20]
    (folder / "train.jsonl").write_text("".join(rows))

    def damage(count: int) -> list[str]:
        names = [json.loads(row)["messages"][0]["content"][0]["image"] for row in rows[:count]]
        for place, path in enumerate(folder / name for name in names):
            path.write_bytes(path.read_bytes()[:40] if place % 2 else b"not a picture")
        return names

    return folder, damage


def test_a_few_bad_pictures(recipe, damaged, tmp_path):
    """Dropped by name and counted, and the run goes on without them."""
    folder, damage = damaged
    names = damage(2)
    overrides = [f"run_dir={tmp_path / 'run'}", f"data.path={folder}", "steps=1", "optimizer.warmup_steps=0"]
    result = commands.fork(tmp_path, recipe, *overrides)
    assert result.code == 0, result.err
    assert "rejected_train.jsonl" in result.out
    rejected = read_rows(tmp_path / "run" / "rejected_train.jsonl")
    assert [row["row"] for row in rejected] == [1, 2]
    for row, name in zip(rejected, names, strict=True):
        assert name in row["reason"] and row["item"] == "messages[0].content[0].image"
    used = {row["media"][0] for row in read_rows(tmp_path / "run" / "rollouts" / "step_1.jsonl")}
    assert used and not used & set(names)

    # It has begun with these rows, and goes on with no others.
    with (folder / "train.jsonl").open("a") as file:
        file.write((folder / "train.jsonl").read_text().splitlines(keepends=True)[-1])
    line = commands.fork(tmp_path, recipe, *overrides).refusal()
    assert "the data of the split 'train' is not what the run in" in line and "SHA-256" in line


def test_too_many_bad_pictures(recipe, damaged, tmp_path):
    folder, damage = damaged
    names = damage(3)
    line = commands.fork(tmp_path, recipe, f"run_dir={tmp_path / 'run'}", f"data.path={folder}").refusal()
    assert "3 of 20 rows were rejected" in line and "accepts 2" in line and names[0] in line


# Phases on their own


def test_warm_up_only(recipe, tmp_path):
    """`steps: 0`: warm-up, evaluation and the exported checkpoint."""
    overrides = [f"run_dir={tmp_path / 'run'}", "steps=0"]
    result = commands.fork(tmp_path, recipe, *overrides)
    assert result.code == 0, result.err
    assert LAST_LINE.fullmatch(result.out.splitlines()[-1])
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").exists()


def test_from_an_exported_checkpoint(finished, recipe, tmp_path):
    """A run may start from what another one exported; bad luck with random weights is not involved."""
    overrides = [f"run_dir={tmp_path / 'run'}", *from_folder(finished[0] / "checkpoint"), "warmup=null", "steps=1"]
    result = commands.fork(tmp_path, recipe, *overrides, "optimizer.warmup_steps=0")
    assert result.code == 0, result.err
    first, last = metrics(tmp_path / "run")[0], metrics(finished[0])[-1]
    assert first["eval/accuracy"] == last["eval/accuracy"]


# Learning


@pytest.mark.learning
def test_digits_are_learnt(tmp_path):
    """The recipe of the README, on 2 processes."""
    overrides = [f"run_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}"]
    result = commands.run("megarl.train", DIGITS, *overrides, processes=2, timeout=900)
    assert result.code == 0, result.err
    accuracy, chance = map(float, LAST_LINE.fullmatch(result.out.splitlines()[-1]).group(1, 2))
    assert chance < 0.15
    assert accuracy >= 0.85
