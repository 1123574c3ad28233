"""Dependencies, of which a submodule that is checked out under 3rdparty/ takes the place of its release."""

import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
SUBMODULES = {"megatron-core": "3rdparty/Megatron-LM", "megatron-bridge": "3rdparty/Megatron-Bridge"}


def from_submodule(requirement: str) -> str:
    """The requirement of the submodule's folder; or the one that is given, where there is none or it is empty."""
    name = requirement.partition("==")[0]
    if name in SUBMODULES and (ROOT / SUBMODULES[name] / "pyproject.toml").exists():
        return f"{name} @ {(ROOT / SUBMODULES[name]).as_uri()}"
    return requirement


project = tomllib.loads((ROOT / "pyproject.toml").read_text())
setup(install_requires=[from_submodule(requirement) for requirement in project["tool"]["megarl"]["dependencies"]])
