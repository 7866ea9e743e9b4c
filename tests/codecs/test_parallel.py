"""Splitting work between threads."""

import itertools
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import parallel
from aprfmt.errors import CodecError
from tests.benchmarks.measure import aligned_array
from tests.patience import PATIENCE


def void(call: Callable[[], object]) -> None:
    call()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("block", [1, 32, 256, 210])
@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 18, (1 << 20) + 256, 3_000_017])
def test_parts_cover_everything_once_at_block_boundaries(
    count: int, block: int, threads: int
) -> None:
    parts = parallel.split_range(count, block, threads)
    assert 1 <= len(parts) <= threads
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(start % block == 0 and start % 1024 == 0 for start, _ in parts)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F16", "APR_Q4"])
def test_decoding_in_threads_gives_the_same_numbers(name: str) -> None:
    native = pytest.importorskip(
        "aprfmt.codecs.native", reason="NOT-RUN: no C extension", exc_type=ImportError
    )
    golden = pytest.importorskip("aprfmt.codecs.native.golden")
    row = ENCODINGS[name]
    count = (1 << 21) + 3 * 1024 + (row.block_size // 2 if row.flat else 0)
    raw = np.tile(
        np.frombuffer(golden.raw_bytes(64 * row.type_size), np.uint8),
        count // row.block_size // 64 + 2,
    )
    raw = raw[: -(-count // row.block_size) * row.type_size]
    alone, split = np.empty(count, np.float32), aligned_array(count)
    native.KERNELS[name](raw, alone)
    for threads in (2, 3):
        split.fill(-1)
        parallel.parallel_decode(
            native.KERNELS[name], raw, split, row.block_size, row.type_size, threads
        )
        assert split.tobytes() == alone.tobytes()
    for store in (parallel.STORE_FRESH, 1):
        split.fill(0)
        parallel.parallel_decode(
            native.KERNELS[name], raw, split, row.block_size, row.type_size, 2, store
        )
        assert split.tobytes() == alone.tobytes()
    with pytest.raises(CodecError, match=f"{name}: found"):
        parallel.parallel_decode(
            native.KERNELS[name], raw[:-1], split, row.block_size, row.type_size, 2
        )


def test_tasks_run_on_several_threads_at_a_time() -> None:
    meet = threading.Barrier(3, timeout=PATIENCE)
    parallel.run_tasks([lambda: void(meet.wait)] * 3, 3)
    seen = set()
    parallel.run_tasks([lambda: seen.add(threading.get_ident()) for _ in range(50)], 1)
    assert seen == {threading.get_ident()}


def test_an_error_of_a_task_comes_out() -> None:
    done = []

    def fail() -> None:
        raise CodecError("broken")

    for threads in (1, 2):
        tasks = [fail, *[lambda: done.append(1)] * 5]
        with pytest.raises(CodecError, match="broken"):
            parallel.run_tasks(tasks[::-1], threads)
    assert done


def test_a_task_that_splits_again_runs_its_parts_itself() -> None:
    inner: list[int] = []

    def outer() -> None:
        me = threading.get_ident()
        parallel.run_tasks([lambda: inner.append(threading.get_ident() == me)] * 4, 4)

    parallel.run_tasks([outer] * 3, 3)
    assert inner == [True] * 12


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT-RUN: no fork here")
def test_a_forked_child_has_threads_of_its_own() -> None:
    here = threading.Barrier(3, timeout=PATIENCE)
    parallel.run_tasks([lambda: void(here.wait)] * 3, 3)  # the parent has threads now
    child = os.fork()
    if child == 0:
        code = 1
        try:
            meet = threading.Barrier(2, timeout=PATIENCE)
            parallel.run_tasks([lambda: void(meet.wait)] * 2, 2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
