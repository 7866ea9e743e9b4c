"""Valid files of every format, damaged field by field: a clean refusal, or content that is equal.

The fields are those that `hex` shows, so every length, count, offset and name of a header is hit.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import event, given, settings

from aprfmt.base.encodings import find_encoding
from aprfmt.errors import AprfmtError
from aprfmt.formats import FORMATS, writable_formats
from tests.fuzz import containers
from tests.fuzz.contract import judge
from tests.fuzz.mutation import Field, damaged
from tests.fuzz.targets import TARGETS

EVERY = pytest.mark.parametrize("name", writable_formats(own=True))


def valid(name: str) -> list[bytes]:
    """Return the seeds of a container that open."""
    target = TARGETS[name]
    return [seed for seed in target.seeds() if _opens(target.use, seed)]


def _opens(use: Callable[[bytes], None], data: bytes) -> bool:
    try:
        use(data)
    except AprfmtError:
        return False
    return True


def fields_of(name: str, data: bytes) -> list[Field]:
    """Return where the header's fields stand, and the halves that begin a long one."""
    found: list[Field] = []
    for field in FORMATS[name].header_fields(memoryview(data), "x"):
        found.append((field.offset, field.nbytes))
        found += [(field.offset, size) for size in (2, 4, 8) if size < field.nbytes]
    return found


@EVERY
def test_damage_to_a_field_is_refused_or_harmless(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "worth_copying", lambda data: True)
    seeds = valid(name)
    assert seeds
    fields = [fields_of(name, seed) for seed in seeds]

    @settings(max_examples=400)
    @given(damaged(seeds, fields))
    def run(data: bytes) -> None:
        event("accepted" if judge(TARGETS[name], data) else "refused")

    run()


@EVERY
def test_every_cut_is_refused_or_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that ends early is refused, unless what is missing was padding or a footer."""
    monkeypatch.setattr(containers, "worth_copying", lambda data: zlib.crc32(data) % 16 == 0)
    target = TARGETS[name]
    refused = 0
    for seed in valid(name)[:6]:
        whole = _content(name, seed)
        for length in range(len(seed)):
            cut = seed[:length]
            if judge(target, cut):
                assert _content(name, cut) == whole
            else:
                refused += 1
    assert refused


def _content(name: str, data: bytes) -> dict[str, object]:
    """Return the tensors, without those whose encoding is not known: their length is a guess."""
    reader = import_module(f"aprfmt.formats.{name}.reader")
    with reader.open_buffer(data, Path("x")) as source:
        tensors = containers.content(source)[1]
    return {key: row for key, row in tensors.items() if find_encoding(row[0]).known}
