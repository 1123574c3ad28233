"""One process is one rank, and starts but once, whichever tests it runs."""

import pytest


@pytest.fixture(scope="session")
def one_rank():
    """This process as a job of one rank, whose engines may capture CUDA graphs."""
    from megarl.platform import launch

    launch.start({}, 7, cuda_graphs=True)
