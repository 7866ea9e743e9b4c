"""The report of a conversion: later damage is found, warnings and overflow are reported.

Seen red: differing bytes accepted, differing checksums accepted, the warnings about what a format
cannot express dropped, a single overflowing value accepted.
"""

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt import conversion
from aprfmt.conversion import scheduling
from aprfmt.conversion.options import ConvertOptions
from aprfmt.errors import ConversionError
from aprfmt.formats import open_source
from tests.cli.run import aprfmt as command
from tests.conversion.folders import float_bytes, llama_folder
from tests.models import save_tiny

UP = "blk.1.ffn_up.weight"


Damage = Callable[[bytearray, int], None]  # (the file's bytes, where UP's begin)


def damage(monkeypatch: pytest.MonkeyPatch, change: Damage) -> None:
    """Change the file between writing and verifying, as a disk or another program would."""
    real = conversion._verify

    def verify(files: Sequence[Path], *rest: Any) -> Any:
        with open_source(files[0]) as written:
            place = written.tensors[UP].info.offset
        raw = bytearray(files[0].read_bytes())
        change(raw, place)
        files[0].write_bytes(raw)
        return real(tuple(files), *rest)

    monkeypatch.setattr(conversion, "_verify", verify)


def a_bit(raw: bytearray, place: int) -> None:
    raw[place + 77] ^= 4


def the_name(raw: bytearray, place: int) -> None:
    raw[raw.index(UP.encode()) + 10] = ord("x")


def the_shape(raw: bytearray, place: int) -> None:
    """GGUF: the name, how many dimensions (uint32), the dimensions (uint64)."""
    struct.pack_into("<2Q", raw, raw.index(UP.encode()) + len(UP) + 4, 32, 128)


@pytest.mark.parametrize(("encoding", "change", "message"), [
    (None, a_bit, rf"{UP}: byte 77 differs from the source"),
    ("Q8_0", a_bit, rf"{UP}: reads back with other bytes"),
    ("Q8_0", the_name, rf"{UP}: was written and is not there on reading"),
    ("Q8_0", the_shape, rf"{UP}: reads back as \(\(128, 32\), 'Q8_0', 4352\); was written as "
                        r"\(\(64, 64\), 'Q8_0', 4352\)"),
])  # fmt: skip
def test_what_changed_behind_the_writer_is_found(
    encoding: str | None,
    change: Damage,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    wishes: ConvertOptions = {} if encoding is None else {"encoding": encoding}
    assert aprfmt.convert(source, tmp_path / "sound.gguf", **wishes).verified == 21
    damage(monkeypatch, change)
    with pytest.raises(ConversionError, match=message):
        aprfmt.convert(source, tmp_path / "m.gguf", **wishes)
    report = aprfmt.convert(source, tmp_path / "unverified.gguf", **wishes | {"verify": False})
    assert report.verified is None  # and that is said


@pytest.mark.parametrize("how", ["written", "replaced", "gone"])
@pytest.mark.parametrize("suffix", ["gguf", "apr"])
def test_a_source_that_is_being_written_publishes_nothing(
    how: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    weights = source / "model.safetensors"
    (tmp_path / f"m.{suffix}").write_bytes(b"old")
    real = scheduling.write_tensors

    def meanwhile(*of: Any) -> None:
        real(*of)
        if how == "gone":
            weights.unlink()
            return
        if how == "replaced":
            weights.rename(tmp_path / "first")
            weights.write_bytes((tmp_path / "first").read_bytes())
        os.utime(weights, ns=(1, 1))

    monkeypatch.setattr(scheduling, "write_tensors", meanwhile)
    done = command("convert", source, tmp_path / f"m.{suffix}", "--force", "--no-source-hash")
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "model.safetensors: changed while it was read" in line
    assert (tmp_path / f"m.{suffix}").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "first", f"m.{suffix}"}


@pytest.mark.parametrize(("value", "refused"), [(65504.0, False), (65520.0, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_value_that_overflows_is_refused(
    value: float, refused: bool, sign: int, tmp_path: Path
) -> None:
    """F16 ends at 65504; half a step on, 65520 rounds to infinity."""
    values = np.full((64, 64), 0.5, np.float32)
    values[63, 63] = sign * value
    name = "model.layers.1.mlp.up_proj.weight"
    source = llama_folder(tmp_path / "s", "F32", replaced={name: float_bytes(values, "F32")})
    target = tmp_path / "m.gguf"
    if not refused:
        aprfmt.convert(source, target, encoding="F16")
        return
    with pytest.raises(ConversionError, match=rf"{UP}: 1 finite F32 values overflow F16"):
        aprfmt.convert(source, target, encoding="F16")
    assert not target.exists()


def test_only_what_changed_is_counted(tmp_path: Path) -> None:
    """Existing infinities and NaNs do not count; tiny values become zero on either side."""
    values = np.full((64, 64), 0.5, np.float32)
    values[0, :7] = np.inf, -np.inf, np.nan, 1e-9, -1e-9, 0.1, -0.0
    name = "model.layers.1.mlp.up_proj.weight"
    source = llama_folder(tmp_path / "s", "F32", replaced={name: float_bytes(values, "F32")})
    report = aprfmt.convert(source, tmp_path / "m.gguf", encoding="F16")
    (row,) = [row for row in report.tensors if row.name == UP]
    assert (row.how, row.changed, row.overflowed, row.underflowed) == ("lossy", 3, 0, 2)


# model of tests/models.py -> what its GGUF cannot say, in this order
LOSSES = {
    "llama": (),
    "llama-yarn": (),
    "llama-dynamic": ("GGUF has no key for dynamic scaling",),
    "gpt_oss": ("GGUF has no key for yarn without truncation", "llama.cpp clamps at 7.0"),
    "qwen2": ("attends to all earlier positions",),
    "gpt2-erf": ("GGUF has no key for it: llama.cpp computes",),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_target_cannot_say_is_a_warning(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "hf")
    report = aprfmt.convert(tmp_path / "hf", tmp_path / "m.gguf", dry_run=True)
    said = [note.text for note in report.notes if note.level == "warning"]
    assert len(said) == len(LOSSES[name]), said
    for text, expected in zip(said, LOSSES[name], strict=True):
        assert expected in text
    done = command("convert", tmp_path / "hf", tmp_path / "m.gguf", "--dry-run")
    assert done.code == 0
    assert [line for line in done.err.splitlines() if line.startswith("warning: ")] == [
        line for line in done.err.splitlines() if any(words in line for words in LOSSES[name])
    ]
    assert done.err.count("warning: ") == len(LOSSES[name])
