"""Scales that stand beside blocks or codes and are wrong: bitsandbytes' absmax, NVFP4's in GGUF.

Before, they were decoded to NaN, to zeros or to the other sign with exit 0, and `diagnose` could
not say which part of a weight that did not decode was at fault.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

WEIGHT = "model.layers.0.mlp.up_proj.weight"
Change = Callable[[Any], Any]


def first(value: float) -> Change:
    return lambda x: np.concatenate([np.array([value], x.dtype), x[1:]])


CHANGES: dict[str, tuple[Change | None, str]] = {
    "negative": (first(-1), "scales_invalid"),
    "nan": (first(np.nan), "scales_invalid"),
    "inf": (first(np.inf), "scales_invalid"),
    "zeros": (np.zeros_like, "scales_invalid"),
    "halved": (lambda x: x[: len(x) // 2], "scales_shape"),
    "gone": (None, "scales_missing"),
}


@pytest.fixture(scope="module", params=["plain", "nested"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a float folder, one in NF4, and the part of WEIGHT that has its float32 scales."""
    made = tmp_path_factory.mktemp("nf4")
    llama_folder(made / "float", "F16", hidden=64)
    nested = request.param == "nested"
    done = aprfmt("quantize", made / "float", made / "nf4", "--to", "safetensors",
                  "--type", "NF4-double" if nested else "NF4")  # fmt: skip
    assert done.code == 0, done.err
    return made / "float", made / "nf4", "nested_absmax" if nested else "absmax"


def damaged(folder: Path, name: str, change: Change | None, to: Path) -> None:
    shutil.copytree(folder, to)
    rows = dict(tensors_of(folder))
    encoding, _, raw = rows.pop(name)
    if change is not None:
        values = change(np.frombuffer(raw, np.float32))
        rows[name] = (encoding, values.shape, values.tobytes())
    write_mixed(to / "model.safetensors", rows)


@pytest.mark.parametrize("how", CHANGES)
def test_wrong_absmax_is_refused_and_named(folder: Any, how: str, tmp_path: Path) -> None:
    plain, good, part = folder
    change, cause = CHANGES[how]
    damaged(good, f"{WEIGHT}.{part}", change, tmp_path / "m")
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", "--encoding", "F32")
    assert done.code == 2 and WEIGHT in done.err and part in done.err
    assert len(done.err.strip().splitlines()) == 1 and not (tmp_path / "m.gguf").exists()
    assert aprfmt("validate", tmp_path / "m").code == 1
    found = diagnose(str(good), str(tmp_path / "m"), ids=(1, 2, 3))
    assert (found.cause, found.confidence, found.exit_code) == (cause, "confirmed", 1)
    assert found.findings[0].where == (WEIGHT,) and part in found.findings[0].says
    if how != "gone":  # which does not open, and says so
        beside = diagnose(str(plain), str(tmp_path / "m"), ids=(1, 2, 3))
        assert (beside.cause, beside.confidence) == (cause, "unconfirmed")


def test_an_absmax_of_zeros_beside_codes_that_are_all_one(folder: Any, tmp_path: Path) -> None:
    """A weight of zeros has it; with one block so has a nested one of any weight."""
    _, good, part = folder
    shutil.copytree(good, tmp_path / "m")
    rows = dict(tensors_of(good))
    for name in (WEIGHT, f"{WEIGHT}.absmax", f"{WEIGHT}.{part}"):
        encoding, shape, raw = rows[name]
        rows[name] = (encoding, shape, bytes(len(raw)))
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", "--encoding", "F32")
    assert done.code == 0, done.err


@pytest.mark.parametrize("value", [0, np.nan, -1])
def test_the_scale_beside_blocks_of_nvfp4(value: float, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "modelopt")
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    assert aprfmt("convert", tmp_path / "m", good).code == 0
    for part, decodes in (("scale", False), ("input_scale", True)):
        if decodes and not value:
            continue  # of activations that were all zero
        shutil.copy(good, bad)
        reader = GGUFReader(bad, "r+")
        next(t for t in reader.tensors if t.name == f"blk.0.ffn_up.{part}").data[...] = value
        reader.data.flush()
        done = aprfmt("convert", bad, tmp_path / "m.apr", "--encoding", "F32", "--force",
                      "--drop", "*input_scale")  # fmt: skip
        assert done.code == (0 if decodes else 2), done.err
        assert decodes or f"blk.0.ffn_up.weight: part '{part}'" in done.err
        assert aprfmt("validate", bad).code == 1
        found = diagnose(str(good), str(bad), ids=(1, 2, 3))
        assert (found.cause, found.confidence) == ("scales_invalid", "confirmed")
