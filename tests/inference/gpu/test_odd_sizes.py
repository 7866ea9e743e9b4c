"""Every architecture in sizes that no power of two divides, on both GPU backends.

Weights of every plain type in float32, quantized where the rows allow it, at every capture point
and in the forms that users run, against numpy's float64 of the same stored weights. Emulated, a
few architectures in BF16; on a GPU all of everything. Seen red: rows of 16-bit floats taken for
whole blocks of 32 columns, and vectors asked to stand at multiples of 16 bytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.session import Session
from aprfmt.inference.trace import Trace
from aprfmt.measure.tolerances import DISCRETE, run_tolerance
from aprfmt.model import open_model
from tests.inference.gpu.machine import on
from tests.inference.gpu.on_gpu import need
from tests.inference.judge import median_row, rel
from tests.inference.odd import (
    FEW_TOKENS,
    ODD_IDS,
    PLAIN,
    SIZES,
    cancelled,
    exact,
    forms,
    limit,
    odd,
    points,
    rounding,
)
from tests.models import MAKERS

Case = tuple[str, str]  # architecture, size
EVERY: list[Case] = [(arch, size) for arch in MAKERS for size in SIZES]
COUNTS = (len(ODD_IDS), FEW_TOKENS, 1)  # prompts: as a matrix, as a few vectors, as one
STEPS = 6
on_torch = pytest.mark.parametrize("case", EVERY, ids="-".join)


def on_cupy(*few: Case) -> pytest.MarkDecorator:
    """Parametrize (machine, case): `few` emulated, every one on a GPU."""
    return on("case", few, EVERY)


def cupy(dtype: str = "float32", **options: Any) -> Backend:
    return BACKENDS["cupy"]("cuda", dtype, **options)


def torch(dtype: str = "float32", **options: Any) -> Backend:
    need()
    return BACKENDS["torch"]("cuda", dtype, **options)


def held(found: Trace, case: Case, form: str, count: int) -> None:
    """Check that every point is there and within the bound of float32."""
    expected, bound = exact(*case, form, count), run_tolerance("float32", "float64").rel_l2
    what = f"{form}, {count} tokens"
    assert found.records.keys() == expected.records.keys()
    for key, record in expected.records.items():
        values, wanted = found.recorded_values(key), expected.recorded_values(key)
        assert values is not None and wanted is not None
        if record.point == "experts":
            np.testing.assert_array_equal(values, wanted, err_msg=f"{what}: {key}")
        elif record.point not in DISCRETE:
            distance, allowed = rel(values, wanted), limit(case, form, count, bound)
            if distance >= allowed:
                allowed = max(
                    rounding(case, form, count, key, "numpy:float32"),
                    cancelled(case, form, count, key, "float32"),
                )
            assert distance < allowed, f"{what}: {key}"


def every_point(backend: Backend, case: Case, form: str, counts: tuple[int, ...]) -> None:
    for count in counts:
        exact(*case, form, count)  # settles the seed
        held(points(odd(*case, form), backend, ODD_IDS[:count]), case, form, count)


@on_cupy(("qwen2_moe", "160"), ("gemma2", "50"))
def test_every_point_on_cupy(machine: Any, case: Case) -> None:
    if machine.name == "emulated":
        every_point(cupy(), case, "BF16", COUNTS[1:])
        return
    for form in forms(*case):
        every_point(cupy(), case, form, COUNTS)


@pytest.mark.gpu
@on_torch
def test_every_point_on_torch(case: Case) -> None:
    for form in forms(*case):
        every_point(torch(), case, form, COUNTS)


def as_users_run(backend: Backend, case: Case, form: str, count: int) -> None:
    """Fused: a whole prompt, and a prompt, its continuation and steps behind a cache."""
    ids, start = ODD_IDS[:count], count - STEPS
    wanted = exact(*case, form, count).recorded_values("logits")
    assert wanted is not None
    with open_model(odd(*case, form)) as model, Session.open(model, backend) as session:
        whole = session.logits(ids)
        first = session.prefill(ids[: start - 2])
        found = np.stack(
            [first[-1], session.extend(ids[start - 2 : start])[-1]]
            + [session.step(token) for token in ids[start:]]
        )
    bound = limit(case, form, count, 5e-6)
    rows = [start - 3, *range(start - 1, count)]
    if max(rel(whole, wanted), rel(found, wanted[rows])) >= bound:
        bound = rounding(case, form, count, "logits", "numpy:float32")
    assert rel(whole, wanted) < bound, form
    assert rel(found, wanted[rows]) < bound, form


@on_cupy(("mixtral", "40"), ("phi3", "144"))
def test_passes_and_steps_on_cupy(machine: Any, case: Case) -> None:
    if machine.name == "emulated":
        as_users_run(cupy(), case, "F16", STEPS + 5)
        return
    for form in PLAIN:
        as_users_run(cupy(), case, form, len(ODD_IDS))


@pytest.mark.gpu
@on_torch
def test_passes_and_steps_on_torch(case: Case) -> None:
    """The first step runs as it is, the second is recorded, later ones are replayed."""
    for form in PLAIN:
        as_users_run(torch(), case, form, len(ODD_IDS))


def in_16_bits(make: Callable[[str], Backend], case: Case) -> None:
    """Weights and arithmetic of one type, and weights of the other one."""
    for dtype, stored in (("bfloat16", ("BF16", "F16", "F32")), ("float16", ("F16", "BF16"))):
        for form in stored:
            wanted = exact(*case, form, len(ODD_IDS))
            moe = any(record.point == "router" for record in wanted.records.values())
            with open_model(odd(*case, form)) as model:
                with Session.open(model, make(dtype)) as session:
                    whole = session.logits(ODD_IDS)
                    session.prefill(ODD_IDS[:-2])
                    steps = np.stack([session.step(token) for token in ODD_IDS[-2:]])
            bound = run_tolerance(dtype, "float64", moe=moe).rel_l2
            # A rounding may choose another expert for a row: nothing bounds that row.
            measure = median_row if moe else rel
            if measure(whole, wanted.recorded_values("logits")) >= bound and not moe:
                bound = rounding(case, form, len(ODD_IDS), "logits", f"torch:{dtype}")
            assert measure(whole, wanted.recorded_values("logits")) < bound, f"{form} in {dtype}"
            assert moe or rel(steps, whole[-2:]) < bound, f"{form} in {dtype}"


@on_cupy()
def test_16_bits_on_cupy(machine: Any, case: Case) -> None:
    in_16_bits(cupy, case)


@pytest.mark.gpu
@on_torch
def test_16_bits_on_torch(case: Case) -> None:
    in_16_bits(torch, case)


def deterministic(backend: Backend, arch: str) -> None:
    """Bits of a row depend neither on its neighbours nor on how it is reached."""
    with open_model(odd(arch, "50")) as model, Session.open(model, backend) as session:
        whole = session.logits(ODD_IDS)
        prefix = session.logits(ODD_IDS[:-5])
        first = session.prefill(ODD_IDS[:-3], "all")
        steps = np.stack([session.step(token) for token in ODD_IDS[-3:]])
    np.testing.assert_array_equal(prefix, whole[:-5])
    np.testing.assert_array_equal(first, whole[:-3])
    np.testing.assert_array_equal(steps, whole[-3:])


@on("arch", (), MAKERS)
def test_deterministic_bits_on_cupy(machine: Any, arch: str) -> None:
    deterministic(cupy(deterministic=True), arch)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", MAKERS)
def test_deterministic_bits_on_torch(arch: str) -> None:
    deterministic(torch(deterministic=True), arch)
