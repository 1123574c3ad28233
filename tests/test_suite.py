"""The suite itself: every test is in a job of CI, and what is installed is what is pinned."""

import ast
import re
import tomllib
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest

from megarl.pins import PACKAGES

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = PROJECT["tool"]["megarl"]["dependencies"]
JOB_MARKS = ("slow", "learning", "gpu")
"""The marks that the jobs select by; a test may have any of them."""
FOREIGN = ("3rdparty", "runs", "build", "dist")
"""Folders whose files are not of this repository."""


def jobs() -> dict[str, str]:
    """Make target and `-m` expression of each call of pytest in the Makefile."""
    found, target = {}, None
    for line in (ROOT / "Makefile").read_text().splitlines():
        if heading := re.match(r"([\w-]+):", line):
            target = heading[1]
        elif "pytest" in line and line.startswith("\t$(BIN)"):
            # No paths, no -k, no --ignore: only marks may keep a test out of a job.
            call = re.fullmatch(r'\t\$\(BIN\)/python -m pytest -m "([a-z ]+)" \$\(ARGS\)', line)
            assert call, f"make {target} calls pytest in a way that this test cannot judge: {line.strip()}"
            found[target] = call[1]
    return found


def selects(expression: str, marks: set[str]) -> bool:
    return eval(expression, {"__builtins__": {}}, {mark: mark in marks for mark in JOB_MARKS})


def test_only_the_marks_of_jobs_are_declared():
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert tuple(marker.partition(":")[0] for marker in options["markers"]) == JOB_MARKS
    assert "--strict-markers" in options["addopts"].split()  # any other mark ends the collection
    assert options["testpaths"] == ["tests"]


@pytest.mark.parametrize("has", list(product([False, True], repeat=len(JOB_MARKS))))
def test_every_combination_of_marks_is_in_one_job(has):
    marks = {mark for mark, present in zip(JOB_MARKS, has, strict=True) if present}
    chosen = [target for target, expression in jobs().items() if selects(expression, marks)]
    assert len(chosen) == 1, f"a test marked {marks or 'with nothing'} runs in {chosen or 'no job'}"


def test_ci_runs_every_job():
    calls = re.findall(r"^( *)make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert calls.pop(0) == ("", "slurm-packages")  # else the tests of a real Slurm would be skipped
    assert sorted(target for _, target in calls) == sorted(jobs())
    for target in (target for indent, target in calls if indent):  # under a condition: is there a GPU, is there time
        assert not any(selects(jobs()[target], marks) for marks in (set(), {"slow"}))


def test_readme_gives_the_command_that_ci_begins_with():
    assert re.search(r"^ +make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_tests_are_where_pytest_looks():
    hidden = []
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in FOREIGN:
            for file in folder.rglob("*.py"):
                collected = folder.name == "tests" and file.name.startswith("test_")
                if not collected and any(map(is_test, ast.parse(file.read_text()).body)):
                    hidden.append(str(file.relative_to(ROOT)))
    assert hidden == []


def is_test(node: ast.stmt) -> bool:
    return (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")) or (
        isinstance(node, ast.ClassDef) and node.name.startswith("Test")
    )


def pins() -> dict[str, str]:
    """Version by name in constraints.txt."""
    return dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())


def test_direct_dependencies_are_exact_and_agree_with_the_constraints():
    project = PROJECT["project"]
    lists = [PROJECT["build-system"]["requires"], DEPENDENCIES, *project["optional-dependencies"].values()]
    for requirement in (requirement for requirements in lists for requirement in requirements):
        match = re.fullmatch(r"([a-z0-9.-]+)(?:\[[a-z0-9_,]+\])?==([a-z0-9.]+)", requirement)
        assert match, f"{requirement}: not an exact version"
        assert pins()[match[1]] == match[2]
    assert "apex" not in pins()  # PyPI's is a web toolkit that breaks Megatron


def test_installed_versions_are_the_pinned_ones():
    replaced = {
        package.distribution for package in PACKAGES.values() if (ROOT / package.submodule / "pyproject.toml").exists()
    }
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in [*DEPENDENCIES, *extras["test"], *extras["quant"]]:
        name, _, pinned = requirement.partition("==")
        assert name in replaced or version(name) == pinned, f"{name}: run make setup"
