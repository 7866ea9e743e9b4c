"""Packed weights stay as they are stored where one other tensor gets another encoding.

Seen red: an internal error where the target has no code for the type of a part.
"""

from pathlib import Path

import numpy as np
import pytest

import aprfmt
from tests.conversion.dialect_folders import FOLDERS, write_folder

NORM = "model.norm.weight"


@pytest.mark.parametrize("ending", [".apr", ""])
@pytest.mark.parametrize("dialect", FOLDERS)
def test_packed_weights_keep_their_parts_beside_another_encoding(
    dialect: str, ending: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "q", dialect)
    source = tmp_path / "q"
    if ending:
        source = tmp_path / "m.apr"
        aprfmt.convert(tmp_path / "q", source)
    out = tmp_path / f"n{ending}"
    aprfmt.convert(source, out, tensor_encodings=[(NORM, "F32")])
    with aprfmt.open(source) as a, aprfmt.open(out) as b:
        assert set(a.source.tensors) == set(b.source.tensors)
        for name, stored in a.source.tensors.items():
            other = b.source.tensors[name]
            if name == NORM:
                assert (stored.info.encoding, other.info.encoding) == ("F16", "F32")
                assert np.array_equal(a[name].numpy(), b[name].numpy())
            else:
                assert stored.info.encoding == other.info.encoding, name
                assert bytes(stored.raw()) == bytes(other.raw()), name
        assert any(view.parts for view in b.values())
