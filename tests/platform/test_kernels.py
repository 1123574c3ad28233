"""Kernels, and the package that is not NVIDIA's apex."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from megarl.errors import UserError
from megarl.platform.kernels import Kernels, kernels, refuse_foreign_apex
from tests.commands import ROOT


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package named `apex` importable, with the given modules."""

    def make(*modules):
        folder = tmp_path / "site" / "apex"
        for module in ("", *modules):
            (folder / module).mkdir(parents=True, exist_ok=True)
            (folder / module / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(folder.parent))
        importlib.invalidate_caches()
        return folder

    return make


def test_no_apex():
    refuse_foreign_apex()


def test_foreign_apex(package):
    """By name, with where it is and what to do, in one line."""
    folder = package("lib", "interfaces")
    with pytest.raises(UserError) as refused:
        refuse_foreign_apex()
    line = str(refused.value)
    assert str(folder) in line and "pip uninstall apex" in line and "\n" not in line


def test_nvidia_apex(package):
    package("normalization", "optimizers")
    refuse_foreign_apex()


def test_refused_before_megatron(package, tmp_path):
    """In a fresh process: the import that prepares Megatron refuses, and Megatron is not imported."""
    folder = package("lib")
    code = (
        "import sys\n"
        "try:\n    import megarl.platform.prepare\n"
        "except Exception as error:\n    print(type(error).__name__, 'megatron.core' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(folder.parent)}, capture_output=True, text=True
    )
    assert out.stdout.split() == ["UserError", "False"], out.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_kernels_of_a_cpu():
    found = kernels()
    assert found == Kernels("cpu", "torch", "torch")
    assert (found.gpu, found.te, found.collectives) == (False, False, "gloo")
    assert str(found).startswith("CPU, ")


def test_kernels_of_a_gpu():
    found = Kernels("cuda", "transformer_engine", "flash-attn-4")
    assert (found.gpu, found.te, found.collectives) == (True, True, "nccl")


def test_transformer_engine_for_other_machines(tmp_path):
    """One that is installed where no GPU is, as on the login node of a cluster, is not touched."""
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    code = (
        "import megarl.platform.prepare\n"
        "from megatron.core.extensions.transformer_engine import HAVE_TE\n"
        "print(HAVE_TE)\n"
        "try:\n    import transformer_engine.pytorch\n"
        "except ImportError:\n    print('hidden')\n"
    )
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, text=True)
    assert out.stdout.split() == ["False", "hidden"], out.stderr
