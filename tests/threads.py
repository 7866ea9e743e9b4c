"""One thread: more do not speed up tiny products, and slow them on a busy machine."""

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
        blas.set_blas_threads(1)
    except BackendUnavailableError:
        pass  # numpy's BLAS has no such setting; the tests pass without it, too
