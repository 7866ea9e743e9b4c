"""Copies in types of one to three bits, made by ggml's own encoders, and one bad run in each.

Seen red: IQ1_S had no cause, nor heavy tails in IQ3_XXS; a run of wrong codes was a quantisation;
copies that are larger than their source (IQ1_M, heavy tails in IQ2) had no cause.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS, member_offsets
from aprfmt.compare import diff

gguf = pytest.importorskip("gguf")
libgguf = pytest.importorskip("libgguf")
CASES = (
    ("IQ1_S", "normal"), ("IQ1_M", "normal"), ("IQ2_XXS", "normal"), ("IQ3_S", "normal"),
    ("IQ1_M", "heavy"), ("IQ2_XXS", "heavy"), ("IQ2_XS", "heavy"),
    ("IQ3_XXS", "heavy"),
)  # fmt: skip
ROWS, COLUMNS = 64, 512
NAME = "blk.0.ffn_up.weight"


def weights(kind: str) -> Any:
    random = np.random.default_rng(1)
    if kind == "normal":
        return (random.standard_normal((ROWS, COLUMNS)) / 50).astype(np.float32)
    columns = np.exp(0.5 * random.standard_normal((1, COLUMNS)))
    return (random.standard_t(4, (ROWS, COLUMNS)) * columns / 50).astype(np.float32)


def written(path: Path, values: Any, name: str = "") -> Path:
    """Write a file of one tensor: float32 values, or the blocks of the type `name`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    kind = getattr(gguf.GGMLQuantizationType, name) if name else None
    writer.add_tensor(NAME, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_honest_copy_is_a_quantisation_and_one_bad_run_is_damage(
    name: str, kind: str, tmp_path: Path
) -> None:
    x = weights(kind)
    source = written(tmp_path / "source.gguf", x)
    raw = np.frombuffer(bytes(libgguf.quantize_rows(x, ENCODINGS[name].ggml)), np.uint8)
    raw = raw.reshape(ROWS, -1)
    (honest,) = diff(source, written(tmp_path / "honest.gguf", raw, name)).findings
    assert (honest.cause, honest.verdict) == ("quantisation", "precision")
    places = member_offsets(ENCODINGS[name].layout)
    start, stop = max(places.values(), key=lambda place: place[1] - place[0])
    bad = raw.copy()
    at = 40 * raw.shape[1] + start
    wrong = np.random.default_rng(5).integers(0, 256, (stop - start) // 4, np.uint8)
    bad.reshape(-1)[at : at + len(wrong)] = wrong
    (row,) = diff(source, written(tmp_path / "bad.gguf", bad.reshape(ROWS, -1), name)).tensors
    assert row.explanation is not None and row.explanation.cause == "bit_rot", row
    assert row.explanation.certainty == "located"
    assert "[40, " in " ".join(row.explanation.evidence)
