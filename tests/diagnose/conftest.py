"""One thread: tiny products gain nothing from more."""

import pytest
import torch

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.backends import blas


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    try:
        blas.set_threads(1)
    except BackendUnavailableError:
        pass  # numpy's BLAS cannot be told; the tests hold all the same
