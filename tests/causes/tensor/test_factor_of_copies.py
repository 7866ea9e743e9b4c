"""A factor on all scales of a quantized tensor is named, however far its steps would hide it.

Seen red: Q4_0 whose scales of one tensor are 1.02 times the right ones were "within its rounding",
exit 0, as no value is more than a step away.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import find_encoding
from aprfmt.codecs import decode
from aprfmt.compare import diff
from aprfmt.errors import AprfmtError
from aprfmt.measure.copy_factor import factor_of_blocks, has_encoder
from aprfmt.model import open_model
from aprfmt.quantizing.row_encoding import encode_rows
from tests.causes import faults
from tests.conversion.folders import llama_folder

KEY = faults.ROLES[faults.UP]
SCALES = {"Q4_0": (18, (0,)), "Q4_1": (20, (0, 2)), "Q5_0": (22, (0,)), "Q8_0": (34, (0,)),
          "Q4_K": (144, (0, 2)), "Q2_K": (84, (80, 82))}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("factor") / "source"
    return llama_folder(folder, "BF16", hidden=256, layers=2, vocab=64, heads=4, kv_heads=2)


def scaled(source: Path, encoding: str, factor: float, folder: Path) -> Path:
    """Return a GGUF of a model with the 16-bit scales of one tensor times a factor."""
    path = folder / "b.gguf"
    aprfmt.convert(source, path, encoding=encoding)
    view = open_model(path).find(KEY)
    assert view is not None and view.encoding == encoding
    info = view.stored[0].info
    data = bytearray(path.read_bytes())
    part = np.frombuffer(data, np.uint8, info.nbytes, info.offset).reshape(-1, SCALES[encoding][0])
    for at in SCALES[encoding][1]:
        old = np.ascontiguousarray(part[:, at : at + 2]).view(np.float16)
        part[:, at : at + 2] = (old * np.float64(factor)).astype(np.float16).view(np.uint8)
    path.write_bytes(data)
    return path


# Q2_K's own errors go with its values so far that 0.92 brings these nearer to the source.
PAIRS = [(one, by) for one in SCALES for by in (1.02, 1.05, 0.92) if (one, by) != ("Q2_K", 0.92)]


@pytest.mark.parametrize(("encoding", "factor"), PAIRS)
def test_scales_times_one_number(
    encoding: str, factor: float, source: Path, tmp_path: Path
) -> None:
    found = diff(source, scaled(source, encoding, factor, tmp_path))
    (cause,) = [one for one in found.causes if one.cause != "quantisation"]
    assert (cause.cause, cause.level) == ("quant_scale", "confirmed")
    assert f"scales are each {factor:.3g}" in cause.says


@pytest.mark.parametrize("encoding", SCALES)
def test_right_scales_are_no_fault(encoding: str, source: Path, tmp_path: Path) -> None:
    found = diff(source, scaled(source, encoding, 1.0, tmp_path))
    assert not [one for one in found.causes if one.cause != "quantisation"]


def sources() -> dict[str, Any]:
    """Return weights of several distributions, float32 [rows, columns]."""
    rng = np.random.default_rng(5)
    size = 8, 512
    return {
        "normal": rng.normal(0, 0.02, size),
        "heavy": rng.standard_t(3, size),
        "columns": rng.normal(0, 1, size) * np.exp(rng.normal(0, 1, size[1])),
        "ternary": rng.integers(-1, 2, size) * 0.037,
        "codes": rng.integers(-7, 8, size) * 0.01,
    }


ENCODINGS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL", "TQ2_0")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", sources())
def test_other_quantizers_have_no_factor(encoding: str, kind: str) -> None:
    assert has_encoder(encoding)
    rng, block = np.random.default_rng(6), find_encoding(encoding).block_size
    x = sources()[kind].astype(np.float32)

    def through(name: str, values: Any, **how: Any) -> Any:
        return decode(name, {"": encode_rows(name, values, **how)}, values.shape)

    again = through(encoding, x).reshape(-1, block).astype(np.float64)
    narrow = x.astype(np.float16).astype(np.float32)
    held = [through(encoding, through("Q8_0", x)), through(encoding, narrow)]
    for spread in (0.3, 2.0):
        importance = np.exp(rng.normal(0, spread, x.shape[1])).astype(np.float32)
        try:
            held.append(through(encoding, x, importance=importance))
        except AprfmtError:
            pass  # an encoding without weights of columns
    # The best scale of each block for these codes, and the best one of all.
    wide = x.reshape(-1, block).astype(np.float64)
    best = (wide * again).sum(1) / np.maximum((again * again).sum(1), 1e-30)
    held += [again * best[:, None], again * ((wide * again).sum() / (again * again).sum())]
    for one in held:
        values = np.asarray(one, np.float64).reshape(-1, block)
        assert factor_of_blocks(again, values, wide) is None
    assert factor_of_blocks(again, again, wide) is None
