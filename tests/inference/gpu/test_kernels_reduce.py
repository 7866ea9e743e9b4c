"""Statistics of one pass against tensors/stats.py, numpy and themselves.

Seen red, each alone: the last piece left out, a NaN counted as finite, pieces joined without their
origins, the counter not put back.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda import RESULT, WORKSPACE, launch_stats, to_stats
from aprfmt.inference.fast.cuda import pass_statistics as pending
from aprfmt.inference.fast.cupy_backend import CupyBackend
from aprfmt.tensors.stats import Stats, compute_stats

NUMPY = {
    "float32": np.float32, "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16, "float16": np.float16,
}  # fmt: skip
LENGTHS = (1, 2, 7, 31, 32, 33, 255, 1025, 4095, 4096, 4097, 3 * 4096 + 5, 60_001)


def measured(machine: Any, x: np.ndarray, room: Any = None) -> tuple[Stats, np.ndarray]:
    m = machine
    bits = x.view(f"u{x.itemsize}")
    data, result = m.put(bits), m.put(np.full(RESULT, 7.0))
    room = m.put(np.zeros(WORKSPACE)) if room is None else room
    launch_stats(m.flat(data, x.dtype.name), m.flat(result), m.flat(room))
    found = m.get(result)
    return to_stats(x.size, found), found


def assert_close(found: Stats, wanted: Stats) -> None:
    for name in ("count", "nan", "inf", "zeros", "min", "max", "absmax"):
        assert getattr(found, name) == getattr(wanted, name), name
    scale = (wanted.absmax or 0.0) + 1e-300
    for name in ("mean", "std", "l2"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12 * scale), name


@pytest.mark.parametrize("dtype", NUMPY)
def test_equals_the_one_statistics_function(machine: Any, dtype: str) -> None:
    random = np.random.default_rng(0)
    for count in LENGTHS:
        x = (random.standard_normal(count) * 3 + 0.7).astype(NUMPY[dtype])
        x[random.integers(0, count, count // 7)] = 0
        found, _ = measured(machine, x)
        assert_close(found, compute_stats(x))


def test_values_that_are_not_finite(machine: Any) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal(20_000).astype(np.float32)
    x[::97], x[5::131], x[3::211] = np.nan, np.inf, -np.inf
    x[0] = np.nan  # what deviations would be taken from
    found, _ = measured(machine, x)
    assert_close(found, compute_stats(x))
    found, _ = measured(machine, np.full(5000, np.nan, np.float32))
    assert found == compute_stats(np.full(5000, np.nan, np.float32))


def test_constants_and_a_large_mean(machine: Any) -> None:
    found, _ = measured(machine, np.full(30_000, np.float32(0.1)))
    assert found.std == 0.0
    x = (1e4 + np.random.default_rng(2).standard_normal(50_000)).astype(np.float32)
    found, _ = measured(machine, x)
    assert found.std == pytest.approx(x.astype(np.float64).std(), rel=1e-9)


def test_the_same_bits_every_time_and_from_a_used_workspace(machine: Any) -> None:
    x = np.random.default_rng(3).standard_normal(40_000).astype(np.float32)
    room = machine.put(np.zeros(WORKSPACE))
    first = measured(machine, x, room)[1]
    for _ in range(3):
        np.testing.assert_array_equal(measured(machine, x, room)[1][:8], first[:8])


def test_arrays_that_do_not_fit_are_refused(machine: Any) -> None:
    m = machine
    room, a = m.put(np.zeros(WORKSPACE)), m.put(np.zeros(4, np.float32))
    with pytest.raises(CodecError, match="a result of 4"):
        launch_stats(m.flat(a), m.flat(a), m.flat(room))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_arrays_in_one_launch_are_each_alone_bit_for_bit(
    machine: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches end by jobs, by pieces, by bytes held, and where another dtype comes between."""
    monkeypatch.setattr(pending, "JOBS", 7)
    monkeypatch.setattr(pending, "PIECES", 20)
    monkeypatch.setattr(pending, "KEPT", 200_000)
    random = np.random.default_rng(6)
    b = CupyBackend("cuda", dtype)
    waiting, wanted = b.pending(), []
    for n, count in enumerate((1, 33, 60_001, 4096, 5, 9, 12_289, 1, 2, 3, 4, 5, 6, 7, 8, 30_000)):
        x = random.standard_normal(count).astype(np.float32)
        x[count // 2] = np.nan if n == 3 else x[count // 2]
        if n % 5 == 4:  # what is routed on the host
            ids = np.arange(count)
            waiting.add(ids)
            wanted.append(compute_stats(ids))
            continue
        placed = b.array(x)
        waiting.add(placed)
        wanted.append(b.stats(placed))
        wide = b.array(x) if dtype == "float32" else b.wide(placed)
        waiting.add(wide)
        wanted.append(b.stats(wide))
    found = waiting.read()
    assert repr(found) == repr(wanted)
    assert repr(waiting.read()) == repr(wanted)
