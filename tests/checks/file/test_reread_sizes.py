"""An unusual size is told with the size that the same bytes have as the other 16-bit type.

Seen red: a fixed remark of another file's size, and the remark where the other type fits no better.
"""

from pathlib import Path

import numpy as np
import pytest

from aprfmt import validate
from tests.conversion.folders import float_bytes, llama_folder, tensors_of, write_mixed

NAME = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("size", "stored", "tag", "told"),
    [
        (0.1, "BF16", "F16", "in its first 6144 values if these are BF16"),
        (0.1, "F16", "BF16", "in its first 6144 values if these are F16"),
        (30.0, "BF16", "BF16", ""),
        (30.0, "F32", "F32", ""),
    ],
)
def test_the_size_as_the_other_type_is_measured(
    size: float, stored: str, tag: str, told: str, tmp_path: Path
) -> None:
    folder = llama_folder(tmp_path / "m", "F32", hidden=64, layers=2, vocab=96)
    rows = tensors_of(folder)
    _, shape, raw = rows[NAME]
    values = np.frombuffer(raw, np.float32)
    values = values / values.std() * np.float32(size)
    write_mixed(
        folder / "model.safetensors", rows | {NAME: (tag, shape, float_bytes(values, stored))}
    )
    report = validate(folder)
    told_sizes = [one.found for one in report.checks if one.name == "role_bounds"]
    told_sizes += [one.finding.found for one in report.warnings if one.check == "role_bounds"]
    (found,) = [one for one in told_sizes if "standard deviation" in one]
    assert bool(told) == ("if these" in found)
    if told:
        measured = float(found.split(", and ")[1].split()[0])
        assert told in found and abs(measured / size - 1) < 0.05
