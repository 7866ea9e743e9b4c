"""Honest copies in types that are read and not written here: rounding, never another checkpoint.

The codes are random, the source is what they decode to with an error of the type's size, which is
what a quantizer leaves.
"""

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import CODECS, decode
from aprfmt.compare import diff
from aprfmt.measure.encoding_noise import storage_noise
from tests.cli.run import aprfmt as command
from tests.conversion.folders import float_bytes, llama_folder

KEY, STORED = "L0.ffn_up.weight", "blk.0.ffn_up.weight"
ROWS, COLUMNS = 64, 256
SCALE = np.float16(0.002)
TYPES = [
    name
    for name, row in ENCODINGS.items()
    if row.ggml is not None
    and row.block_size == COLUMNS
    and name.startswith("IQ")
    and name in CODECS
    and not CODECS[name].has_encoder
    and not row.row_layout
    and name in gguf.GGMLQuantizationType.__members__
]


def _codes(name: str) -> Any:
    """Return random blocks [ROWS, bytes] whose scales of a block are one number."""
    row = ENCODINGS[name]
    raw = np.random.default_rng(5).integers(0, 256, (ROWS, row.type_size), np.uint8)
    layout = CODECS[name].layout
    assert layout is not None
    blocks = raw.reshape(-1).view(layout)
    if "d" in (blocks.dtype.names or ()):
        blocks["d"] = SCALE
    else:  # IQ1_M has its scale in the high bits of four words
        words, bits = blocks["scales"], int(SCALE.view(np.uint16))
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | ((bits >> 4 * i & 15) << 12)
    return raw


def _pair(name: str, folder: Path, share: float, edit: Any = None) -> tuple[Path, Path]:
    """Return a source in BF16 and its copy; errors are `share` of what the type is known for."""
    raw = _codes(name)
    y = np.asarray(decode(name, raw.tobytes(), (ROWS, COLUMNS)), np.float32)
    near = np.abs(y).reshape(ROWS, -1, 32).mean(-1).repeat(32, 1)
    noise = np.random.default_rng(7).standard_normal(y.shape).astype(np.float32) * near
    x = y + noise * np.float32(
        share * storage_noise(name) * np.linalg.norm(y) / np.linalg.norm(noise)
    )
    source, base, copy = folder / "source", folder / "base.gguf", folder / "copy.gguf"
    stored = float_bytes(x.astype(ml_dtypes.bfloat16).astype(np.float32), "BF16")
    llama_folder(
        source,
        "BF16",
        hidden=COLUMNS,
        layers=1,
        ffn=ROWS,
        heads=4,
        kv_heads=2,
        replaced={"model.layers.0.mlp.up_proj.weight": stored},
    )
    aprfmt.convert(source, base)
    reader, writer = gguf.GGUFReader(base), gguf.GGUFWriter(str(copy), "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    if edit is not None:
        edit(raw)
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType[name] if tensor.name == STORED else tensor.tensor_type
        writer.add_tensor(
            tensor.name, raw if tensor.name == STORED else tensor.data, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source, copy


def test_all_such_types_are_tried() -> None:
    assert len(TYPES) == 7, TYPES


@pytest.mark.parametrize("name", TYPES)
def test_an_honest_copy_is_rounding(name: str, tmp_path: Path) -> None:
    source, copy = _pair(name, tmp_path, 0.4)
    (row,) = diff(source, copy, tensors=[KEY]).tensors
    found = row.explanation
    assert found is not None and found.cause == "quantisation"
    assert found.certainty == "explained"
    assert any(f"{name} is not encoded here" in line for line in found.evidence)
    if name == TYPES[0]:
        said = command("diagnose", source, copy, "--json").json
        assert said["verdict"] == "precision" and command("diagnose", source, copy).code == 0


@pytest.mark.parametrize("name", TYPES)
def test_a_block_that_is_another_is_no_rounding(name: str, tmp_path: Path) -> None:
    def edit(raw: Any) -> None:
        raw[9] = raw[40]

    source, copy = _pair(name, tmp_path, 0.4, edit)
    found = diff(source, copy, tensors=[KEY]).findings
    assert "quantisation" not in {row.cause for row in found if row.confirmed}, found
