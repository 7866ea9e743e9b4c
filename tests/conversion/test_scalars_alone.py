"""Values of `set` as a type: numbers, booleans and text are told apart."""

from typing import Any

import pytest

from aprfmt.conversion.edits import _convert_scalar
from aprfmt.errors import UsageError

# A value, the type, and whether it fits.
SCALARS: list[tuple[Any, str, bool]] = [
    (3, "uint8", True), (256, "uint8", False), (255, "uint8", True), (-1, "uint8", False),
    (-128, "int8", True), (-129, "int8", False), (127, "int8", True), (3.0, "int32", False),
    (True, "uint8", False), (True, "float32", False), (False, "float64", False),
    ("7", "uint8", False), ("7", "float32", False), ("seven", "float64", False),
    (7, "float32", True), (1e39, "float32", False), (1e39, "float64", True),
    (True, "bool", True), (1, "bool", False), ("x", "string", True), (1, "string", False),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind", "fits"), SCALARS)
def test_a_value_fits_its_type_alone(value: Any, kind: str, fits: bool) -> None:
    if not fits:
        with pytest.raises(UsageError, match=f"^k: given is not of type {kind}; expected "):
            _convert_scalar(value, kind, "k", "given")
        return
    found = _convert_scalar(value, kind, "k", "given")
    assert found == value and isinstance(found, float) == kind.startswith("float")
