"""Kernels run emulated wherever there is a C++ compiler, and on a GPU where there is one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.inference.gpu import machine as machines


@pytest.fixture(scope="module", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where the kernels of a test run."""
    if request.param == "gpu":
        if not machines.gpu():
            pytest.skip("NOT-RUN: no cupy, or no GPU that it finds")
        yield machines.Gpu()
        return
    if machines.compiler() is None:
        pytest.skip("NOT-RUN: no C++ compiler for an x86-64 processor")
    with machines.on_this_machine() as here:
        yield here
