"""Readers that go on past damage: every malformed file of every table, fault by fault."""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.protocols import SURPLUS
from aprfmt.errors import FormatError
from aprfmt.formats.damage import find_overlaps
from tests.formats import apr_cases, gguf_cases, safetensors_cases
from tests.formats.fatal_cases import FATAL, NO_MODEL

TABLES = {"apr": apr_cases, "gguf": gguf_cases, "safetensors": safetensors_cases}
MALFORMED = [(kind, case) for kind, table in TABLES.items() for case in table.MALFORMED]
SOUND = [
    (kind, case)
    for kind, table in TABLES.items()
    for level in ("WARNED", "LEGAL")
    for case in getattr(table, level, ())
]


def open_damaged(kind: str, data: bytes) -> Any:
    reader = import_module(f"aprfmt.formats.{kind}.reader")
    return reader.open_buffer(data, Path("x"), damaged=True)


def test_the_lists_name_cases() -> None:
    for kind, table in TABLES.items():
        ids = {case.id for case in table.MALFORMED}
        assert NO_MODEL[kind] <= FATAL[kind] < ids


@pytest.mark.parametrize(("kind", "case"), MALFORMED, ids=lambda value: str(value))
def test_malformed(kind: str, case: Any) -> None:
    """The fault that raises without `damaged` is collected; each tensor is readable or raises."""
    if case.id in FATAL[kind]:
        with pytest.raises(FormatError) as caught:
            open_damaged(kind, case.data)
        assert type(caught.value) is case.error and case.says in str(caught.value)
        return
    with open_damaged(kind, case.data) as source:
        first, *_ = source.damage
        assert first.where == "x" and case.says in f"x: {first.text}"
        surplus = "bytes unused" in case.says or "bytes follow" in case.says
        assert first.kind == (SURPLUS if surplus else case.error("").kind)
        lost = {name for one in source.damage for name in one.tensors}
        assert lost <= source.tensors.keys()
        for name, tensor in source.tensors.items():
            if name not in lost:
                assert not tensor.damage and tensor.raw().nbytes == tensor.info.nbytes
                continue
            assert tensor.damage
            with pytest.raises(FormatError) as raised:
                tensor.raw()
            assert str(raised.value) == tensor.damage
            tensor.drop()


@pytest.mark.parametrize(("kind", "case"), SOUND, ids=lambda value: str(value))
def test_going_on_changes_nothing_of_a_sound_file(kind: str, case: Any) -> None:
    reader = import_module(f"aprfmt.formats.{kind}.reader")
    with open_damaged(kind, case.data) as one, reader.open_buffer(case.data, Path("x")) as other:
        assert list(one.damage) == list(other.damage) == []
        assert list(one.notes) == list(other.notes)
        assert {n: t.info for n, t in one.tensors.items()} == {
            n: t.info for n, t in other.tensors.items()
        }


@pytest.mark.parametrize("case", safetensors_cases.MALFORMED, ids=str)
def test_what_the_reference_refuses_is_damage(case: safetensors_cases.Case) -> None:
    try:
        safetensors_cases.reference(case.data)
    except Exception:
        assert not case.lenient
        try:
            with open_damaged("safetensors", case.data) as source:
                assert source.damage
        except FormatError:
            pass


# --- which of several that overlap is to blame -----------------------------------------------


def pairs(extents: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return every pair that shares bytes, found one by one."""
    return {
        (i, j)
        for i in range(len(extents))
        for j in range(i)
        if max(extents[i][0], extents[j][0]) < min(extents[i][1], extents[j][1])
    }


def test_one_that_reaches_into_several_is_to_blame() -> None:
    assert list(find_overlaps([(0, 100), (10, 20), (30, 40), (50, 60)])) == [((0,), 3)]
    assert list(find_overlaps([(0, 10), (5, 15), (15, 25)])) == [((1, 0), 1)]
    assert list(find_overlaps([(0, 10), (8, 22), (10, 20), (30, 40)])) == [((1,), 2)]
    assert list(find_overlaps([(0, 10), (5, 5), (10, 20)])) == []


def test_what_is_not_blamed_shares_no_byte() -> None:
    rng = random.Random(5)
    for _ in range(400):
        extents = []
        for _ in range(rng.randrange(12)):
            start = rng.randrange(40)
            extents.append((start, start + rng.choice((0, 1, 3, 10, 30))))
        blamed = {i for names, _ in find_overlaps(extents) for i in names}
        together = pairs(extents)
        assert blamed <= {i for pair in together for i in pair}
        assert not [pair for pair in together if not blamed.intersection(pair)]
