"""Packed weights stay as they are stored where one other tensor gets another encoding.

Seen red: an internal error where the target has no code for the type of a part.
"""

from pathlib import Path

import numpy as np
import pytest

import aprfmt
from tests.conversion.dialect_folders import FOLDERS, write_folder
from tests.conversion.folders import tensors_of
from tests.diagnosis import faults_packed as packs
from tests.diagnosis import packing
from tests.diagnosis.engines import tiny_folder

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


def test_packed_experts_that_are_weights_of_their_own_are_copied(tmp_path: Path) -> None:
    """Many stored weights are one role. Seen red: "54 of 98 things of the source are neither"."""
    sizes = {"hidden_size": 96, "moe_intermediate_size": 96, "num_hidden_layers": 1}
    original = tiny_folder("qwen3_moe", "bfloat16", **sizes)
    make = packs.nearest(packing.gptq)
    source = packing.folder(original, "packed-experts-copied", packs.GPTQ, make)
    aprfmt.convert(source, tmp_path / "out")
    assert tensors_of(tmp_path / "out") == tensors_of(source)
