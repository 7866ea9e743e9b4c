"""What a conversion says of itself: damage behind it is found, warnings and overflow are told.

Seen red: bytes that differ let through, checksums that differ let through, the warnings of what a
format cannot say dropped, a single overflowing value let through.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt import conversion
from aprfmt.errors import ConversionError
from aprfmt.formats import open_source
from tests.cli.run import aprfmt as command
from tests.conversion.folders import float_bytes, llama_folder
from tests.models import save_tiny

UP = "blk.1.ffn_up.weight"


def damage(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Flip a bit of one tensor's file between writing and verifying, as a disk would."""
    real = conversion._verify

    def verify(files: Sequence[Path], *rest: Any) -> int:
        with open_source(files[0]) as written:
            place = written.tensors[UP].info.offset + at
        with files[0].open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))
        return real(tuple(files), *rest)

    monkeypatch.setattr(conversion, "_verify", verify)


@pytest.mark.parametrize(("encoding", "message"), [
    (None, rf"{UP}: byte 77 differs from the source"),
    ("Q8_0", rf"{UP}: reads back with other bytes"),
])  # fmt: skip
def test_a_byte_that_changed_behind_the_writer_is_found(
    encoding: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    wishes = {} if encoding is None else {"encoding": encoding}
    assert aprfmt.convert(source, tmp_path / "sound.gguf", **wishes).verified == 21
    damage(monkeypatch, 77)
    with pytest.raises(ConversionError, match=message):
        aprfmt.convert(source, tmp_path / "m.gguf", **wishes)
    report = aprfmt.convert(source, tmp_path / "unverified.gguf", verify=False, **wishes)
    assert report.verified is None  # and that is said


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
