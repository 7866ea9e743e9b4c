"""How ranks divide an array, which pair of runs is cut out, and where a run is made."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.base.dump_names import RANK
from aprfmt.errors import BackendUnavailableError, FormatError
from aprfmt.inference import device
from aprfmt.inference.cuda_driver import NOT_ELSEWHERE
from aprfmt.inference.engines import rank_joining
from aprfmt.inference.engines.dump_folders import _Axes
from aprfmt.inference.engines.rank_dims import Division
from aprfmt.inference.engines.rank_joining import JoinedArray
from aprfmt.inference.parity import bundle, operations

# --- divisions ------------------------------------------------------------------------------------


def test_an_axis_of_a_division_has_the_name_that_the_ranks_use() -> None:
    divided = (Division("tp", 1), Division("cp", 0, "zigzag"))
    both = _Axes({"tp": [0, 1], "context": [0, 1]}, {"cp": "context"})
    assert both.rename_divisions(None) is None and both.rename_divisions(()) == ()
    assert both.rename_divisions(divided) == (Division("tp", 1), Division("context", 0, "zigzag"))
    # Files that say a number only: it is that of the one axis that divides.
    numbered = _Axes({RANK: [0, 1]}, {})
    assert numbered.rename_divisions(divided[:1]) == (Division(RANK, 1),)
    assert numbered.rename_divisions((Division("tp", 1), Division("tp", 0))) == (
        Division(RANK, 1),
        Division(RANK, 0),
    )
    with pytest.raises(FormatError, match="dims divide an array among cp and tp ranks, and its"):
        numbered.rename_divisions(divided)


def test_parts_are_joined_along_the_dimension_that_is_said() -> None:
    """In both directions, from both ends, or summed; not along one that no part has."""
    values = np.arange(24.0, dtype=np.float32).reshape(4, 6)

    def rows(parts: Any) -> list[JoinedArray]:
        return [JoinedArray("x", x.shape, "float32", partial(np.array, x)) for x in parts]

    def joined(parts: Any, dimension: int, how: Any = "parts") -> Any:
        made = rank_joining._join_by_dims("x", rows(parts), Division("tp", dimension, how))
        assert made.shape == made.read().shape
        return made

    down, across = np.split(values, 2, 0), np.split(values, 2, 1)
    assert np.array_equal(joined(down, 0).read(), values) and joined(down, 0).how == "rows"
    assert np.array_equal(joined(across, 1).read(), values)
    assert joined(across, 1).how == "columns"
    ends = [values[[0, 3]], values[[1, 2]]]
    assert np.array_equal(joined(ends, 0, "zigzag").read(), values)
    assert np.array_equal(joined([values, 2 * values], 0, "partial").read(), 3 * values)
    alone = joined([values], 1)
    assert np.array_equal(alone.read(), values)
    batch = joined([x[None] for x in down], 1)
    assert batch.how == "rows" and batch.shape == (1, 4, 6)
    for dimension in (2, 5):
        with pytest.raises(FormatError, match=rf"dimension {dimension} of shape \[2, 6\]"):
            joined(down, dimension)
    with pytest.raises(FormatError, match="1 rows of a rank are no two equal chunks"):
        joined(np.split(values, 4, 0), 0, "zigzag")


# --- operations of two runs -----------------------------------------------------------------------


def test_an_operation_is_bounded_by_the_arithmetic_of_both_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TF32 rounds what goes in as float16 does; a point without a record is float32's."""
    monkeypatch.setattr(
        operations, "run_arithmetic", lambda run, dtype: run.products.get(dtype, dtype)
    )

    def run(dtype: str | None, **products: str) -> Any:
        record = None if dtype is None else SimpleNamespace(dtype=dtype)
        return SimpleNamespace(find_record=lambda key: record, products=products)

    def dtypes(a: Any, b: Any) -> tuple[str, str]:
        return operations.operation_dtypes("L0.q", a, b)

    assert dtypes(run("float64"), run("bfloat16")) == ("float64", "bfloat16")
    assert dtypes(run("float64"), run(None)) == ("float64", "float64")
    assert dtypes(run(None), run("float16")) == ("float32", "float16")
    assert dtypes(run("float32"), run("float32", float32="tf32")) == ("float16", "float16")
    assert dtypes(run("bfloat16"), run("float32", float32="tf32")) == ("bfloat16", "float16")
    assert dtypes(run("float32", float32="tf32"), run("float32")) == ("float32", "float32")


def test_the_first_pair_with_a_wrong_operation_is_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shadow the recorded result is kept, and without one the pair is passed over."""
    monkeypatch.setattr(
        bundle, "parse_run", lambda text: SimpleNamespace(open=lambda: f"open {text}")
    )

    def pair(
        at: int, key: str | None, *, shadow: bool = False, wrong: bool = True, **more: Any
    ) -> Any:
        facts = {"recorded": None, "measured": key} | more
        cell = None
        if key is not None:
            cell = SimpleNamespace(key=key, run=lambda backend: f"{key} by {backend}")
        operation = SimpleNamespace(
            key=facts["measured"], shadow=shadow, residual=0.5 + at, bound=0.25
        )
        other = SimpleNamespace(key="other", shadow=False, residual=9.0, bound=9.0)
        return SimpleNamespace(
            a=0,
            b=at,
            cell=cell,
            operations=[other, operation],
            first_operation=key if wrong else None,
            recorded=facts["recorded"],
            first=f"first of {at}",
            cause=None,
        )

    def chosen(*pairs: Any) -> Any:
        runs = [SimpleNamespace(backend={"name": name}) for name in "abc"]
        found: Any = SimpleNamespace(pairs=pairs, model="m", ids=(1, 2), through="t", runs=runs)
        return bundle.choose_bundle(found, ["run a", "run b", "run c"])

    assert chosen() is chosen(pair(1, None)) is None
    first = chosen(pair(1, "L0.q", wrong=False), pair(2, "L1.k"))
    assert first.runs == ("run a", "run c") and first.facts["first_point"] == "first of 2"
    assert (first.expected, first.found) == ("L1.k by open run a", "L1.k by open run c")
    assert (first.residual, first.bound, first.shadow) == (2.5, 0.25, False)
    assert first.facts["backends"] == [{"name": "a"}, {"name": "c"}]
    assert chosen(pair(1, "L0.q", wrong=False)).runs == ("run a", "run b")
    assert chosen(pair(1, "L0.q", measured="L0.v")) is None, "its point was not measured"
    held = chosen(pair(1, "L0.q", shadow=True, recorded="theirs"))
    assert (held.expected, held.found, held.shadow) == ("L0.q by open run a", "theirs", True)
    assert chosen(pair(1, "L0.q", shadow=True)) is None
    passed = chosen(pair(1, "L0.q", shadow=True), pair(2, "L0.k"))
    assert passed.runs == ("run a", "run c")


# --- where a run is made --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_gpu_is_chosen_where_it_is_there_and_the_backend_can_use_it(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str, str]] = []
    gpu, cpu = (backend or device._DEFAULT_BACKEND[where] for where in ("cuda", "cpu"))

    def chosen(*, there: bool, usable: bool) -> Any:
        made.clear()

        def refuse(self: Any) -> None:
            if not there:
                raise BackendUnavailableError(f"no GPU{NOT_ELSEWHERE}")

        def backend_of(where: str, dtype: str) -> None:
            made.append((gpu, where, dtype))
            if not usable:
                raise BackendUnavailableError("a driver that is too old")

        monkeypatch.setattr(device.DeviceChoice, "refuse_missing_gpu", refuse)
        monkeypatch.setattr(device, "BACKENDS", {gpu: backend_of})
        return device._choose_automatically("auto", backend, "float32")

    found = chosen(there=True, usable=True)
    assert (found.backend, found.device, found.dtype) == (gpu, "cuda", "float32")
    assert found.why == "auto chose the GPU" and made == [(gpu, "cuda", "float32")]
    found = chosen(there=True, usable=False)
    assert (found.backend, found.device) == (cpu, "cpu")
    assert found.why == "auto chose the CPU: a driver that is too old"
    found = chosen(there=False, usable=True)
    assert (found.backend, found.device, made) == (cpu, "cpu", [])
    assert found.why == "auto chose the CPU: no GPU"
