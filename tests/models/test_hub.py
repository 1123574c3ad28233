"""Models by their names on the Hugging Face hub, fetched from one on this machine, and what is refused."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.check import refuse
from megarl.errors import UserError
from megarl.models import hub
from megarl.models.hf_config import hf_config
from megarl.recipe import load_recipe
from megarl.startup import architecture
from tests import commands
from tests.models.hub_server import COMMIT, Hub
from tests.test_train import DIGITS, from_folder

NAME = "owner/tiny-model"


@contextmanager
def settings(endpoint: str, cache: Path, offline: bool = False):
    """The library's environment variables, which it reads once, when it is imported."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    values = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": offline,
    }
    before = {name: getattr(constants, name) for name in values}
    close_session()
    for name, value in values.items():
        setattr(constants, name, value)
    try:
        yield
    finally:
        close_session()
        for name, value in before.items():
            setattr(constants, name, value)


@pytest.fixture
def served(checkpoint):
    return Hub({NAME: checkpoint, "owner/gated": checkpoint}, gated={"owner/gated"})


@pytest.fixture
def online(served, tmp_path):
    """This process's hub, with an empty cache; yields its address."""
    with served.serving() as address, settings(address, tmp_path / "cache"):
        yield address


def refusal(path: str, key: str = "model.path") -> str:
    start = time.monotonic()
    with pytest.raises(UserError) as refused:
        hf_config(path, None, key)
    assert time.monotonic() - start < 10
    said = str(refused.value)
    assert said.startswith(f"{key} = {path!r}: ") and "\n" not in said and len(said) < 500
    return said.removeprefix(f"{key} = {path!r}: ")


@pytest.mark.parametrize(
    "path, name",
    [
        ("Qwen/Qwen3-VL-2B-Instruct", True),
        ("Qwen/Qwen3-VL-2B-Instruct@refs/pr/3", True),
        ("nowhere", False),
        ("/data/nowhere", False),
        ("./data/nowhere", False),
        ("../nowhere", False),
        ("a/b/nowhere", False),
        ("a/b@", False),
    ],
)
def test_names(path, name):
    assert hub.on_hub(path) == name


def test_a_folder_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.on_hub(NAME)
    Path(NAME).mkdir(parents=True)
    assert not hub.on_hub(NAME) and hub.folder_with("config.json", NAME, "model.path") == Path(NAME)


def test_fetched(online, served, checkpoint, tmp_path):
    """The config alone where a recipe is checked, then everything; afterwards it is there without a network."""
    assert architecture(hf_config(NAME, None)) == architecture(hf_config(str(checkpoint), None))
    assert dict(served.sent) == {f"{NAME}/config.json": 1}
    folder = hub.fetch(NAME, "model.path", weights=True)
    assert folder.name == COMMIT
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == {f.name: f.read_bytes() for f in checkpoint.iterdir()}
    assert set(served.sent.values()) == {1}
    with settings("http://127.0.0.1:9", tmp_path / "cache", offline=True):
        assert hub.fetch(NAME, "model.path", weights=True) == folder
        assert hub.fetch(hub.at(NAME, COMMIT), "model.path", weights=True, cached=True) == folder
        assert hf_config(NAME, None).model_type == "qwen3_vl"


def test_a_processor_comes_without_weights(online):
    folder = hub.fetch(f"{NAME}@v1", "model.processor", weights=False)
    assert (folder / "tokenizer.json").exists() and not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "path, said",
    [
        ("owner/nothing", "there is none, or it is private: check the name"),
        ("owner/gated", "it is gated: accept its terms at http://127.0.0.1:"),
        (f"{NAME}@v9", "it has no revision 'v9'"),
        ("owner/a--b", "Cannot have -- or .. in repo_id"),
    ],
)
def test_refused_by_the_hub(online, path, said):
    assert said in refusal(path)
    assert refusal(path, "algorithm.reference").startswith("no such folder, and as a name on the Hugging Face hub: ")


def test_what_to_do_about_a_gated_model(online):
    assert refusal("owner/gated").endswith("/owner/gated, then log in (hf auth login) or set HF_TOKEN")


def test_no_config(online, served, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("")
    served.models["owner/empty"] = tmp_path / "empty"
    assert refusal("owner/empty") == "the model of that name on the Hugging Face hub has no config.json"


def test_no_network(tmp_path):
    """Said at once, without minutes of retries."""
    with settings("http://127.0.0.1:9", tmp_path):
        said = refusal(NAME)
    assert "http://127.0.0.1:9 does not answer ([Errno 111] Connection refused), and " in said
    assert said.endswith(f"fetch it where there is a network (hf download {NAME}), or give a folder")


def test_a_part_in_the_cache_is_not_enough(online, tmp_path):
    hf_config(NAME, None)
    with settings("http://127.0.0.1:9", tmp_path / "cache"), pytest.raises(UserError, match="does not have all of it"):
        hub.fetch(NAME, "model.path", weights=True)


def test_other_parts_of_a_recipe(online, tmp_path):
    """Each is looked for when the recipe is checked, under its own key."""
    from megarl.data.generators.digits import write_digits

    write_digits(tmp_path / "digits", scans=200)
    common = [f"data.path={tmp_path / 'digits'}", *from_folder(NAME)]
    refuse(load_recipe(DIGITS, common), 1)
    for key, more in (("model.processor", []), ("algorithm.reference", ["algorithm.kl_coefficient=0.1"])):
        refuse(load_recipe(DIGITS, [*common, *more, f"{key}={NAME}"]), 1)
        with pytest.raises(UserError, match=f"^{key} = 'owner/nothing': .* there is none, or it is private"):
            refuse(load_recipe(DIGITS, [*common, *more, f"{key}=owner/nothing"]), 1)


def test_offline_command(tmp_path):
    """The real one, with the library's own variable: one line, exit code 2."""
    overrides = [*from_folder(NAME), f"data.path={tmp_path}", "data.generator=digits"]
    result = subprocess.run(
        [sys.executable, "-m", "megarl.check", DIGITS, *overrides, f"data.path={tmp_path / 'absent'}"],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(commands.ROOT),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )
    said = commands.Result(result.returncode, result.stdout, result.stderr).refusal()
    assert said.startswith(f"model.path = '{NAME}': ") and "HF_HUB_OFFLINE is set, and " in said


# Runs


def _train(arguments: list[str]) -> int:
    endpoint, cache, *rest = arguments
    with settings(endpoint, Path(cache)):
        return commands._train(rest)


def test_run(served, tmp_path):
    """Two ranks of a node: each file comes once, the run's recipe keeps the name, and it is gone on with."""
    overrides = [*from_folder(NAME), f"run_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'digits'}"]
    overrides += [
        "data.generator_options={scans: 200}",
        "warmup=null",
        "optimizer.warmup_steps=0",
        "evaluation.every=0",
    ]
    overrides += ["algorithm.prompts_per_step=4", "evaluation.max_prompts=4"]
    with served.serving() as address:
        for steps in (1, 2):
            told = [address, tmp_path / "cache", DIGITS, *overrides, f"steps={steps}"]
            result = commands.fork(tmp_path, *told, main=_train, processes=2)
            assert result.code == 0, result.err
    assert set(served.sent.values()) == {1} and f"{NAME}/model.safetensors" in served.sent
    assert load_recipe(tmp_path / "run" / "recipe.yaml").model.path == NAME
    assert json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())["model_type"] == "qwen3_vl"
