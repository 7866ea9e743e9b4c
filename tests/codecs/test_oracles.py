"""What the libraries that make packed weights decode them to: the files of fixtures/oracles.

The files are read without the libraries; `test_oracles_made` makes them again with these.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.dialects import decode_weight, dialects_at

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "fixtures" / "oracles"
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
DTYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def header(library: str) -> dict[str, Any]:
    raw = (FOLDER / f"{library}.safetensors").read_bytes()
    found: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return found


def rows_of(library: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    raw = (FOLDER / f"{library}.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return {
        name: (
            row["dtype"],
            tuple(row["shape"]),
            raw[slice(*(start + n for n in row["data_offsets"]))],
        )
        for name, row in header(library).items()
        if name != "__metadata__"
    }


def cases() -> Iterator[tuple[str, str]]:
    for library in FILES:
        for name in header(library)["__metadata__"]:
            if name not in ("library", "version"):
                yield library, name


@pytest.mark.parametrize(("library", "case"), list(cases()))
def test_decoded_as_the_library_decodes(library: str, case: str) -> None:
    section = json.loads(header(library)["__metadata__"][case])
    rows = rows_of(library)
    stored = {
        name.partition("|")[2]: StoredPart(raw, encoding, shape)
        for name, (encoding, shape, raw) in rows.items()
        if name.partition("|")[0] == case
    }
    judged = stored.pop("=")
    stored.pop("<", None)  # what the library made it of
    said = dialects_at(section, "model.layers.0.mlp.up_proj")
    assert said is not None
    dialect = next(row for row in said[0] if row.main in stored)
    parts = {
        part: stored[name]
        for part in (dialect.main, *dialect.parts, *dialect.optional)
        if (name := dialect.stored("", part, stored)) is not None
    }
    assert len(parts) == len(stored)
    found = decode_weight(dialect, parts, said[1])
    assert found.shape == judged.shape
    assert found.astype(DTYPES[judged.encoding]).tobytes() == bytes(judged.raw)


def _swizzled(row: int, column: int) -> int:
    """Return where torchao has a scale of a matrix with 6 scales in a row: two tiles of 128 x 4."""
    tile, row = 2 * (row // 128) + column // 4, row % 128
    return tile * 512 + row % 32 * 16 + row // 32 * 4 + column % 4


def test_swizzled_scales_of_more_rows_than_a_tile_has() -> None:
    """The 16 rows that torchao packed, ten times over."""
    rows = {n.partition("|")[2]: row for n, row in rows_of("torchao").items() if "nvfp4|" in n}
    said = dialects_at(
        json.loads(header("torchao")["__metadata__"]["nvfp4"]), "model.layers.0.mlp.up_proj"
    )
    assert said is not None
    held, made = rows["._weight_scale"][2], bytearray(4 * 512)
    for row in range(160):
        for column in range(6):
            made[_swizzled(row, column)] = held[_swizzled(row % 16, column)]
    parts = {
        "._weight_qdata": StoredPart(10 * rows["._weight_qdata"][2], "U8", (160, 48)),
        "._weight_scale": StoredPart(bytes(made), "F8_E4M3", (64, 32)),
        "._weight_per_tensor_scale": StoredPart(rows["._weight_per_tensor_scale"][2], "F32", ()),
    }
    found = decode_weight(said[0][0], parts, said[1])
    assert found.astype(ml_dtypes.bfloat16).tobytes() == 10 * rows["="][2]


def test_every_library_has_its_file() -> None:
    assert FILES == [
        "auto_gptq",
        "auto_round",
        "awq",
        "compressed_tensors",
        "mlx",
        "modelopt",
        "torchao",
        "transformers",
    ]
