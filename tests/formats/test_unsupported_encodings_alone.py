"""Tensors of encodings that a container lacks: what is stored of them, and what is read again."""

from typing import Any

import pytest

from aprfmt.base.encodings import Encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.formats.unsupported_encodings import (
    KEY,
    restore_encodings,
    stored_info,
    unsupported_record,
)


def holds_floats(row: Encoding) -> bool:
    return row.name in ("F32", "U8")


Q5 = TensorInfo("w", (2, 64), "Q5_0", 128, 88, 44)  # blocks of 32 elements in 22 bytes
FLAT = TensorInfo("n", (3, 5), "NF4", 64, 8, None)
PLAIN = TensorInfo("f", (2, 3), "F32", 0, 24, 12)


def test_rows_of_bytes_stand_under_a_name_with_the_encoding() -> None:
    assert stored_info(PLAIN, holds_floats) is PLAIN
    assert stored_info(Q5, holds_floats) == TensorInfo("w@Q5_0", (2, 44), "U8", 128, 88, 44)
    whole = TensorInfo("w", (2, 64), "Q5_0", 128, 90, 44)  # with two bytes more than rows
    assert stored_info(whole, holds_floats) == TensorInfo("w@Q5_0", (90,), "U8", 128, 90, 90)
    assert stored_info(FLAT, holds_floats) == TensorInfo("n@NF4", (8,), "U8", 64, 8, 8)


def test_the_record_has_what_the_container_lacks() -> None:
    found = unsupported_record([PLAIN, Q5, FLAT], holds_floats)
    assert found == {
        KEY: {
            "w": {"encoding": "Q5_0", "shape": [2, 64]},
            "n": {"encoding": "NF4", "shape": [3, 5]},
        }
    }
    assert unsupported_record([PLAIN], holds_floats) == {}


def test_what_was_stored_is_read_again_in_the_order_of_the_index() -> None:
    infos = [Q5, PLAIN]
    stored = {info.name: info for info in (stored_info(one, holds_floats) for one in infos)}
    metadata = {"a": 1, **unsupported_record(infos, holds_floats)}
    plain, logical, notes = restore_encodings(metadata, stored, "f")
    assert plain == {"a": 1} and list(logical.values()) == infos and not notes
    assert list(logical) == ["w", "f"]
    plain, logical, notes = restore_encodings({"a": 1}, stored, "f")
    assert plain == {"a": 1} and logical == stored and not notes


def bytes_of(name: str, count: int, encoding: str = "U8") -> TensorInfo:
    return TensorInfo(name, (count,), encoding, 0, count, count)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ([], "is list, not an object"),
        ({"shape": [2, 64]}, "lacks encoding (string) or shape (array)"),
        ({"encoding": "Q5_0"}, "lacks encoding (string) or shape (array)"),
        ({"encoding": 5, "shape": []}, "lacks encoding (string) or shape (array)"),
        ({"encoding": "Q5_0", "shape": [2, -1]}, "its shape is not made of up to 64 non-negative"),
        ({"encoding": "Q5_0", "shape": [1 << 64]}, "its shape is not made of up to 64 non-neg"),
        ({"encoding": "Q5_0", "shape": [True, 64]}, "its shape is not made of up to 64 non-neg"),
        ({"encoding": "Q5_0", "shape": [1] * 65}, "its shape is not made of up to 64 non-neg"),
        ({"encoding": "Q5_1", "shape": [2, 64]}, "the file has no tensor 'w@Q5_1'"),
        ({"encoding": "Q5_0", "shape": [2, 65]}, "Q5_0 rows must be a multiple of 32 elements"),
        ({"encoding": "Q5_0", "shape": [3, 64]}, "Q5_0 [3, 64] takes 132 bytes, 88 are stored"),
        ({"encoding": "Q5_0", "shape": [(1 << 64) - 32]}, "Q5_0 [18446744073709551584] takes"),
        ({"encoding": "Q5_0", "shape": [1, 64]}, "Q5_0 [1, 64] takes 44 bytes, 88 are stored"),
    ],
)
def test_an_entry_that_does_not_fit_leaves_the_stored_name(entry: Any, says: str) -> None:
    stored = {"w@Q5_0": bytes_of("w@Q5_0", 88)}
    _, logical, notes = restore_encodings({KEY: {"w": entry}}, stored, "f.apr")
    assert logical == stored and len(notes) == 1
    assert notes[0].text.startswith(f"{KEY} entry 'w': {says}")
    assert (notes[0].where, notes[0].key) == ("f.apr", "carried_tensors")


def test_a_shape_at_its_limits_is_taken() -> None:
    shape = [1] * 62 + [2, 64]
    stored = {"w@Q5_0": bytes_of("w@Q5_0", 88)}
    entry = {"encoding": "Q5_0", "shape": shape}
    _, logical, notes = restore_encodings({KEY: {"w": entry}}, stored, "f")
    assert not notes and logical["w"].shape == tuple(shape) and logical["w"].row_bytes == 44
    empty = {"w@Q5_0": bytes_of("w@Q5_0", 0)}
    _, logical, notes = restore_encodings(
        {KEY: {"w": {"encoding": "Q5_0", "shape": [0, 64]}}}, empty, "f"
    )
    assert not notes and logical["w"].shape == (0, 64)


def test_bytes_under_both_names_or_of_another_type_stay_as_they_are() -> None:
    entry = {"encoding": "Q5_0", "shape": [2, 64]}
    both = {"w@Q5_0": bytes_of("w@Q5_0", 88), "w": bytes_of("w", 4)}
    _, logical, notes = restore_encodings({KEY: {"w": entry}}, both, "f")
    assert logical == both and "the file holds 'w' as well" in notes[0].text
    signed = {"w@Q5_0": bytes_of("w@Q5_0", 88, "I8")}
    _, logical, notes = restore_encodings({KEY: {"w": entry}}, signed, "f")
    assert logical == signed and "its bytes are stored as I8, not U8" in notes[0].text


def test_a_table_that_is_no_object_is_said_once() -> None:
    stored = {"w@Q5_0": bytes_of("w@Q5_0", 88)}
    plain, logical, notes = restore_encodings({KEY: [1], "b": 2}, stored, "f")
    assert plain == {"b": 2} and logical == stored
    assert [note.text for note in notes] == [
        f"{KEY} is list, not an object; carried tensors stay unjoined"
    ]


def test_bytes_of_an_unknown_type_keep_their_number() -> None:
    stored = {"w@type#142": bytes_of("w@type#142", 90)}
    entry = {"encoding": "type#142", "shape": [2, 7]}
    _, logical, notes = restore_encodings({KEY: {"w": entry}}, stored, "f")
    assert not notes and logical["w"].shape == (2, 7) and logical["w"].nbytes == 90
    assert logical["w"].encoding == "type#142"
