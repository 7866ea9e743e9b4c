"""What a comparison holds of a large tensor: pieces of its rows, not copies of it.

Seen red: nine copies of a transposed matrix as places of its values, six of one of floats that
nothing relates to the other, four where parts of shards are looked for.
"""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.compare import diff
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

TABLE = "model.embed_tokens.weight"
ROWS, COLUMNS = 40_000, 256
DECODED = 4 * ROWS * COLUMNS  # bytes of the table's values as float32
PIECES = 48 << 20  # of a dozen arrays in float64, of a million elements in all, and of findings


def one_bit(x: Any) -> Any:
    x[ROWS // 2, 3] ^= 1 << 5
    return x


def a_row_twice(x: Any) -> Any:
    x[7] = x[8]
    return x


def other_bits(x: Any) -> Any:
    return x ^ np.random.default_rng(4).integers(0, 1 << 7, x.shape, np.uint16)


# How a table of bits [ROWS, COLUMNS] is changed -> copies of its values that may be held at once.
CHANGES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "one bit": (one_bit, 0.5),
    "a row twice": (a_row_twice, 0.5),
    "rows moved": (lambda x: np.roll(x, 3, 0), 0.5),
    "transposed": (lambda x: np.ascontiguousarray(x.T).reshape(x.shape), 1.5),
    "other values": (other_bits, 4.0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "a"
    return llama_folder(folder, "BF16", hidden=COLUMNS, layers=1, ffn=16, vocab=ROWS, tied=True)


@pytest.mark.parametrize("name", CHANGES)
def test_a_large_tensor_is_compared_and_explained_by_pieces(
    name: str, model: Path, tmp_path: Path
) -> None:
    change, copies = CHANGES[name]
    rows = dict(tensors_of(model))
    kind, shape, data = rows[TABLE]
    bits = np.frombuffer(data, np.uint16).reshape(shape).copy()
    rows[TABLE] = kind, shape, change(bits).tobytes()
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    write_mixed(tmp_path / "model.safetensors", rows)
    del rows, data, bits
    tracemalloc.start()
    try:
        found = diff(model, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    row = next(row for row in found.tensors if row.key == "token_embd.weight")
    assert row.verdict == "DIFFERENT" and not found.not_tried
    assert peak < copies * DECODED + PIECES, f"{(peak - PIECES) / DECODED:.2f} copies"
