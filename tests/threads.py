"""One thread: tiny products gain nothing from more, and lose much on a busy machine."""

from importlib.util import find_spec

import pytest

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.backends import blas


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Give torch and numpy's BLAS one thread each for the suite whose conftest imports this."""
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
    try:
        blas.set_threads(1)
    except BackendUnavailableError:
        pass  # numpy's BLAS cannot be told; the tests hold all the same
