"""Which Megatron is installed and which one a recipe is pinned to; every place that names either names the same."""

import ast
import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import copy, rmtree

import pytest

from megarl.check import main
from megarl.errors import UserError
from megarl.pins import PACKAGES, check_pins, installed
from megarl.platform.patches import all_patches
from megarl.recipe import load_recipe
from megarl.startup import keep_recipe, refuse_other_recipe

ROOT = Path(__file__).parent.parent
VARIANTS = ROOT / "recipes" / "variants"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE, BRIDGE = (package.distribution for package in PACKAGES.values())
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=megarl", "-c", "user.email=megarl@localhost", "-c", "safe.directory=*")
    result = subprocess.run(["git", "-C", folder, *author, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# Every place


def by_package(name: str) -> dict[str, str]:
    """What a shipped recipe is pinned to, by distribution."""
    pins = load_recipe(VARIANTS / f"{name}.yaml").pins.model_dump()
    return {package.distribution: pins[key] for key, package in PACKAGES.items()}


def releases() -> dict[str, str]:
    """What is installed where nothing is checked out."""
    exact = (requirement.split("==") for requirement in PROJECT["tool"]["megarl"]["dependencies"])
    return {name: version for name, version in exact if name in (CORE, BRIDGE)}


def table() -> dict[str, dict[str, str]]:
    """That of 3rdparty/README.md, by folder and head."""
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "3rdparty" / "README.md").read_text(), re.MULTILINE)
    heads, _, *rows = ([cell.strip(" `<>") for cell in row.split("|")] for row in rows)
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


def gitlinks() -> dict[str, str]:
    """Commit by folder, as git has it."""
    if not (ROOT / ".git").exists():  # an archive has no links: its README says what they were
        return {f"3rdparty/{folder}": row["linked"][:40] for folder, row in table().items()}
    entries = (line.split() for line in git(ROOT, "ls-files", "--stage", "3rdparty").splitlines())
    return {path: commit for mode, commit, _, path in entries if mode == "160000"}


def test_every_place_names_the_same_releases():
    assert set(releases()) == {CORE, BRIDGE}
    named = [ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "3rdparty" / "README.md"]
    named += [ROOT / "docs" / "design.md", ROOT / "megarl" / "platform" / "patches" / "__init__.py"]
    others = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("megarl/**/*.py"), ROOT / "Makefile"]
    for file in (*named, *others):
        found = set(re.findall(r"\b(megatron-(?:core|bridge))==(\d[\w.]*\d)", file.read_text()))
        assert found <= releases().items(), file
        assert file not in named or found == set(releases().items()), file
    assert by_package("pinned_packages") == releases()
    for patch in all_patches():
        name, _, version = patch.package.partition("==")
        assert name == "torch" or releases()[name] == version, patch.name


def test_uv_takes_the_version_from_the_constraints():
    """An override with a version of its own would keep out what is checked out."""
    overrides = [line for line in PROJECT["tool"]["uv"]["override-dependencies"] if line.startswith("megatron")]
    assert overrides == [CORE]


def test_every_place_names_the_same_commits():
    linked, development = by_package("pinned_submodules"), by_package("pinned_development")
    assert gitlinks() == {package.submodule: linked[package.distribution] for package in PACKAGES.values()}
    for package in PACKAGES.values():
        row = table()[package.submodule.removeprefix("3rdparty/")]
        assert row["linked"][:40] == linked[package.distribution]
        assert row["development"] == development[package.distribution]
    known = {*linked.values(), *development.values()}
    for file in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.yaml")):
        assert set(re.findall(r"\b[0-9a-f]{40}\b", file.read_text())) <= known, file


def test_every_place_names_the_same_folders_and_repositories():
    modules = configparser.ConfigParser()
    modules.read_string(re.sub(r"^\s+", "", (ROOT / ".gitmodules").read_text(), flags=re.MULTILINE))
    assert {modules[name]["path"] for name in modules.sections()} == set(gitlinks())
    for name in modules.sections():
        assert name == f'submodule "{modules[name]["path"]}"'
        row = table()[Path(modules[name]["path"]).name]
        assert modules[name]["url"] == f"{row['repository']}.git"
    (replaced,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "SUBMODULES"
    )
    assert replaced == {package.distribution: package.submodule for package in PACKAGES.values()}


# What is checked out is what is installed


@pytest.fixture
def clone(tmp_path):
    """What decides what is installed, with the folders of the submodules empty."""
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "Makefile", "README.md", "LICENSE"):
        copy(ROOT / name, tmp_path)
    for package in PACKAGES.values():
        (tmp_path / package.submodule).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("checked_out", [(), ("megatron_lm",), ("megatron_lm", "megatron_bridge")])
def test_what_is_checked_out_is_required(clone, checked_out):
    for key in checked_out:
        (clone / PACKAGES[key].submodule / "pyproject.toml").touch()
    subprocess.run([sys.executable, "setup.py", "--quiet", "egg_info"], cwd=clone, check=True, capture_output=True)
    required = (clone / "megarl.egg-info" / "requires.txt").read_text().split("\n\n")[0].splitlines()
    expected = {f"{name}=={version}" for name, version in releases().items()}
    for key in checked_out:
        name, folder = PACKAGES[key].distribution, PACKAGES[key].submodule
        expected = {one for one in expected if not one.startswith(name)} | {f"{name}@ file://{clone}/{folder}"}
    found = {line.replace(" @", "@") for line in required if line.startswith("megatron")}
    assert found == expected
    assert len(required) == len(PROJECT["tool"]["megarl"]["dependencies"])


def test_make_notices_what_is_checked_out_and_what_no_longer_is(clone):
    def setup() -> str:
        # Of a run of its own, whatever make runs the tests.
        environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        command = ["make", "--dry-run", "setup", "BIN=bin", "EXTRAS=test,dev"]
        return subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True, env=environment).stdout

    def done() -> None:
        for file in (clone, *clone.rglob("*")):
            os.utime(file, (1, 1))
        os.utime(stamp, (2, 2))

    stamp = clone / ".venv" / ".installed-test,dev"
    for file in (clone / "bin" / "uv", clone / "bin" / "pip", stamp):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    done()
    assert "uv" not in setup()
    bridge = clone / PACKAGES["megatron_bridge"].submodule
    (bridge / "pyproject.toml").touch()
    assert "sed '/^megatron-bridge==/d;' constraints.txt" in setup()
    assert f"--override <(printf -- '-e %s\\n' {bridge})" in setup()
    done()
    assert "uv" not in setup()
    rmtree(bridge)
    bridge.mkdir()
    assert "sed '' constraints.txt" in setup() and "--override" not in setup()


# What is installed


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Leaves what an installer leaves of a package, and of no other one."""

    def install(version: str, record: dict | None = None, name: str = CORE) -> None:
        folder = tmp_path / "site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
        if record is not None:
            (folder / "direct_url.json").write_text(json.dumps(record))

    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    return install


@pytest.fixture
def submodule(tmp_path):
    """A repository inside of another one, with a commit each."""
    folder = tmp_path / "clone" / "with a space" / "Megatron-LM"
    folder.mkdir(parents=True)
    for repository in (tmp_path / "clone", folder):
        git(repository, "init")
        (repository / "tracked").touch()
        git(repository, "add", "tracked")
        git(repository, "commit", "--message", "a commit")
    return folder


def of_folder(folder: Path, **editable: bool) -> dict:
    return {"url": folder.as_uri(), "dir_info": editable}


def refusal(pin: str, key: str = "megatron_lm") -> str:
    with pytest.raises(UserError) as caught:
        check_pins({key: pin})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_release(install):
    install("0.19.2")
    check_pins({"megatron_lm": "0.19.2", "megatron_bridge": None})
    assert refusal("0.19.1") == (
        "pins.megatron_lm = '0.19.1': megatron-core is installed as release 0.19.2, of which no commit is known; "
        "run python -m pip install --no-deps megatron-core==0.19.1"
    )


def test_a_release_is_no_commit(install):
    install("0.6.2", name=BRIDGE)
    assert refusal(COMMIT, "megatron_bridge") == (
        f"pins.megatron_bridge = '{COMMIT}': megatron-bridge is installed as release 0.6.2, of which no commit is "
        "known; run git submodule update --init 3rdparty/Megatron-Bridge && "
        f"git -C 3rdparty/Megatron-Bridge fetch origin {COMMIT} && "
        f"git -C 3rdparty/Megatron-Bridge checkout {COMMIT} && make setup"
    )


def test_a_wheel_is_a_release(install):
    install("0.19.2", {"url": "file:///wheels/megatron_core-0.19.2-py3-none-any.whl", "archive_info": {}})
    check_pins({"megatron_lm": "0.19.2"})


def test_a_commit_of_a_repository(install):
    record = {"url": "https://github.com/NVIDIA/Megatron-LM.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}
    install("0.19.2", record)
    check_pins({"megatron_lm": COMMIT})
    assert f"megatron-core is installed from commit {COMMIT}; run python -m pip" in refusal("0.19.2")


@pytest.mark.parametrize("editable", [{"editable": True}, {}])
def test_a_commit_that_is_checked_out(install, submodule, editable):
    commit = git(submodule, "rev-parse", "HEAD")
    install(f"0.19.0+{commit[:7]}", of_folder(submodule, **editable))
    check_pins({"megatron_lm": commit})
    assert refusal("0.19.0") == (
        f"pins.megatron_lm = '0.19.0': megatron-core is installed from {submodule} at commit {commit}; run "
        "git submodule deinit 3rdparty/Megatron-LM && python -m pip install --no-deps megatron-core==0.19.0"
    )
    assert f"at commit {commit}; run git submodule update" in refusal(COMMIT)
    git(submodule, "tag", "v1")  # by its commit all the same
    check_pins({"megatron_lm": commit})


def test_a_commit_with_changes_is_another_one(install, submodule):
    commit = git(submodule, "rev-parse", "HEAD")
    install("0.19.0", of_folder(submodule, editable=True))
    (submodule / "tracked").write_text("changed")
    assert f"at commit {commit}-dirty; run" in refusal(commit)


def test_a_folder_that_has_moved_on(install, submodule):
    """An editable one runs what is there; a copy does not."""
    before = git(submodule, "rev-parse", "HEAD")
    install(f"0.19.0+{before[:8]}", of_folder(submodule))
    install(f"0.6.0+{before[:8]}", of_folder(submodule, editable=True), name=BRIDGE)
    git(submodule, "commit", "--allow-empty", "--message", "another")
    now = git(submodule, "rev-parse", "HEAD")
    for pin in (before, now):
        assert f"is installed as a copy of {submodule} at commit {before[:8]}, which is at {now} now" in refusal(pin)
    check_pins({"megatron_bridge": now})


def test_a_folder_without_a_repository_has_no_commit(install, submodule):
    outer = git(submodule.parent, "rev-parse", "HEAD")
    rmtree(submodule / ".git")
    install("0.19.0", of_folder(submodule, editable=True))
    assert "at commit unknown; run" in refusal(outer)
    rmtree(submodule)
    assert "at commit unknown; run" in refusal(outer)


def test_nothing(install):
    assert installed(CORE) is None
    assert refusal("0.19.2").startswith(
        "pins.megatron_lm = '0.19.2': megatron-core is not installed; run python -m pip"
    )
    check_pins({"megatron_lm": None})


# Recipes


@pytest.mark.parametrize("pin", ["0.19.2", "0.20.0rc1", "1.0.post2", "0.20.0.dev3", COMMIT])
def test_pins_that_are_accepted(pin):
    assert load_recipe(VARIANTS / "pinned_packages.yaml", [f"pins.megatron_lm='{pin}'"]).pins.megatron_lm == pin


@pytest.mark.parametrize(
    "pin", ["v0.19.2", "core_v0.19.0", "main", "19", COMMIT[:-1], COMMIT + "0", COMMIT.upper(), "0.19.2+5be9626", ""]
)
def test_pins_that_are_refused(pin):
    with pytest.raises(UserError, match="should be a commit of 40 hex digits or a release, such as 1.2.3") as caught:
        load_recipe(VARIANTS / "pinned_packages.yaml", [f"pins.megatron_lm='{pin}'"])
    assert str(caught.value).startswith(f"pins.megatron_lm = {pin!r}: ")


@pytest.mark.parametrize("recipe", sorted(VARIANTS.glob("pinned_*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_go_with_what_they_are_pinned_to(recipe, capsys):
    """In an installation with the releases one of them does; with submodules another one, or none."""
    pins = load_recipe(recipe).pins.model_dump()
    others = [key for key, pin in pins.items() if installed(PACKAGES[key].distribution).pin != pin]
    if others:
        assert main([str(recipe)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.fullmatch(rf"megarl: error: pins\.{others[0]} = '{pins[others[0]]}': .*\n", captured.err)
    else:
        check_pins(pins)


def test_a_run_goes_on_with_other_pins(tmp_path):
    recipe = VARIANTS / "pinned_packages.yaml"
    keep_recipe(load_recipe(recipe), tmp_path)
    refuse_other_recipe(load_recipe(recipe, [f"pins.megatron_lm='{COMMIT}'", "pins.megatron_bridge=null"]), tmp_path)


def test_command_refuses_with_one_line_and_code_2():
    command = [sys.executable, "-m", "megarl.check", str(VARIANTS / "pinned_packages.yaml"), "pins.megatron_lm=0.0.1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"megarl: error: pins\.megatron_lm = '0\.0\.1': megatron-core is installed .*\n", result.stderr)
