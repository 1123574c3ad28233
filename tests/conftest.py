"""Fixtures of all tests."""

import inspect
import os
import sys

import pytest
from hypothesis import settings

from tests import tiny
from tests.distributed import Ranks

# A deadline for one example tells of other work on the machine, not of the code.
settings.register_profile("megarl", deadline=None)
# CI judges a change, and is no place to find what was wrong before it.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "megarl")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "ranks(world_size, tensor_parallel=1, timeout=120): the body runs on every rank of a real job"
    )
    config.stash[_RANKS] = Ranks()


def pytest_unconfigure(config):
    config.stash[_RANKS].end()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    names = inspect.signature(pyfuncitem.function).parameters.keys() & pyfuncitem.funcargs.keys()
    values = {name: pyfuncitem.funcargs[name] for name in names}
    where = pyfuncitem.module.__name__, pyfuncitem.originalname
    pyfuncitem.config.stash[_RANKS].run_named(*where, (), values, *mark.args, **mark.kwargs)
    return True


_RANKS = pytest.StashKey[Ranks]()


@pytest.fixture(autouse=True)
def own_process(request):
    """Megatron's patches, which change what transformers computes, stay out of the tests' own process: an import, or an
    answer of a rank whose class lies beside one, would bring them in."""
    clean = _PATCHES not in sys.modules
    yield
    if clean and _PATCHES in sys.modules and not request.node.get_closest_marker("gpu"):
        pytest.fail(
            f"{_PATCHES} was imported into the tests' own process: what compares with transformers is wrong now"
        )


_PATCHES = "megarl.platform.prepare"


@pytest.fixture(scope="session")
def ranks(pytestconfig):
    """Runs a module-level function on every rank of a job, see `tests.distributed.Ranks.run`."""
    return pytestconfig.stash[_RANKS]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of the tiny Qwen3-VL checkpoint."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "untied", tied=False)


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory):
    """The same with the output layer tied to the embeddings."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "tied", tied=True)


@pytest.fixture(scope="session")
def mixture_checkpoint(tmp_path_factory):
    """Folder of the tiny mixture of experts."""
    return tiny.write_mixture_checkpoint(tmp_path_factory.mktemp("tiny") / "mixture")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory, checkpoint):
    """`tests.tiny.make_prompts`: encoded prompts by name."""
    return tiny.make_prompts(tmp_path_factory.mktemp("pictures"), checkpoint)


@pytest.fixture(scope="session")
def reference(checkpoint):
    """transformers with the tiny checkpoint."""
    return tiny.Reference(checkpoint)


@pytest.fixture(scope="session")
def mixture_reference(mixture_checkpoint):
    """transformers with the tiny mixture of experts."""
    return tiny.Reference(mixture_checkpoint)
