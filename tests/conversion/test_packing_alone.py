"""Weights in the layouts of other libraries: which fit, which parts they have, what is counted."""

import base64
import math
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs.dialect import StoredPart
from aprfmt.conversion import dialects, gguf_vocabulary
from aprfmt.conversion.dialects import DialectWeight, LatestGrid
from aprfmt.conversion.quantize_options import check_fit
from aprfmt.errors import CodecError, ConversionError, FormatError

# --- matrices that groups do not fit --------------------------------------------------------------


def matrix(name: str, *shape: int) -> Any:
    info = SimpleNamespace(name=f"stored {name}", shape=shape)
    return SimpleNamespace(role=name, info=info, spellings=(f"stored {name}", name))


ODD = matrix("L0.attn_q.weight", 8, 96)
GOOD = [matrix(f"L{n}.ffn_up.weight", 8, 128) for n in range(2)]


def fit(*outputs: Any, quantize: str | None = "MLX-4bit-g128", given: tuple[str, ...] = ()) -> Any:
    options: Any = SimpleNamespace(
        quantize=quantize, tensor_encodings=tuple((pattern, "BF16") for pattern in given)
    )
    return check_fit(outputs, options, Path("m"))


def test_matrices_that_are_no_whole_groups_are_told_and_most_of_them_refused() -> None:
    """Vectors, stacks and tables are no matrices of the scheme, nor what has another encoding."""
    others = [
        matrix("L0.attn_norm.weight", 96),
        matrix("token_embd.weight", 8, 96),
        matrix("L0.ffn_up_exps.weight", 2, 8, 96),
        matrix("L0.attn_q.bias", 96),
    ]
    assert fit(*GOOD) == fit(*GOOD, *others) == fit() == []
    (note,) = fit(ODD, *GOOD, *others)
    assert (note.level, note.key) == ("warning", "partly_packed")
    assert note.text == (
        "MLX-4bit-g128 packs 2 of 3 matrices: 1 are not whole numbers of its groups (multiples of "
        "128 columns), stored L0.attn_q.weight [8, 96] for example; they stay as they are; "
        "MLX-4bit-g32 fits all"
    )
    (even,) = fit(ODD, GOOD[0])
    assert even.text.startswith("MLX-4bit-g128 packs 1 of 2 matrices")
    (narrow,) = fit(matrix("L0.attn_q.weight", 8, 40), GOOD[0])
    assert narrow.text.endswith("; no group size of this layout fits all")
    with pytest.raises(ConversionError, match=r"^m: .* packs 0 of 1 .*fits all; name those that"):
        fit(ODD)
    tall = [matrix(f"L{n}.attn_q.weight", 64, 128) for n in range(2)]
    (rows,) = fit(GOOD[0], *tall, quantize="GPTQ-g128")
    assert "(multiples of 128 columns and 32 rows), stored L0.ffn_up" in rows.text
    assert fit(ODD, given=("L0.attn_q*",)) == fit(ODD, *GOOD, given=("*attn_q.weight",)) == []
    for quantize in (None, "Q4_K_M", "Q4_0", "GPT-OSS-MXFP4"):
        assert fit(ODD, quantize=quantize) == []


# --- numbers of a vocabulary ----------------------------------------------------------------------


def test_numbers_of_a_list_are_as_many_as_its_tokens() -> None:
    def unpacked(values: Any, count: int, kind: str = "<f4") -> Any:
        raw = np.asarray(values, kind).tobytes()
        text = base64.b64encode(zlib.compress(raw)).decode()
        return gguf_vocabulary._unpack_numbers(text, kind, count, "config.json")

    assert unpacked([0.5, -1.0, 3.0], 3) == [0.5, -1, 3] and unpacked([], 0) == []
    assert unpacked([1, 2, 250], 3, "u1") == [1, 2, 250]
    for count, held in ((2, 9), (4, 12), (0, 1)):  # no more bytes than one too many are made
        with pytest.raises(FormatError, match=rf"holds {held} bytes or more for {count} tokens"):
            unpacked([0.5, -1.0, 3.0], count)
    with pytest.raises(
        FormatError, match=r"config.json: holds 0 bytes or more for 16777217 tokens"
    ):
        unpacked([], (1 << 24) + 1)
    for text in ("no base64!", base64.b64encode(b"no zlib").decode(), None):
        with pytest.raises(FormatError, match="holds no compressed numbers"):
            gguf_vocabulary._unpack_numbers(text, "<f4", 1, "config.json")


# --- weights of a dialect -------------------------------------------------------------------------


class Writer:
    """A layout of codes and scales, which notes what it was asked for."""

    main = ".qweight"

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.fails = False

    def part(self, source: Any, suffix: str, settings: Any) -> bytes:
        self.asked.append((source.name, suffix))
        if self.fails:
            raise CodecError("no grid")
        return f"{source.name}{suffix}".encode()

    def stored(self, shape: Any, settings: Any) -> Any:
        return {
            ".qweight": StoredPart(b"", "I32", (shape[0] // 8, shape[1])),
            ".scales": StoredPart(b"", "F16", (shape[0], 2)),
        }

    def quantize(self, values: Any, settings: Any) -> Any:
        self.asked.append(("quantize", values.shape, settings.most))
        if self.fails:
            raise CodecError("not finite")
        return Grid(f"grid {len(self.asked)}", np.zeros_like(values))


class Grid:
    """Codes and scales, as values."""

    def __init__(self, name: str, held: Any) -> None:
        self.name, self.held = name, held

    def values(self, start: int, stop: int) -> Any:
        return self.held[start:stop]


class Settings:
    """How a weight is written; `most` is the largest magnitude that shares its factor."""

    most = 0.0

    def _replace(self, most: float) -> Any:
        made = Settings()
        made.most = most
        return made


def weight(writer: Writer, latest: LatestGrid, name: str = "w.weight", **more: Any) -> Any:
    values = np.ones((16, 4), np.float32)
    none: Any = None
    given: Any = {"settings": Settings(), "writer": writer, "output": none, "latest": latest} | more
    return DialectWeight(name, "GPTQ", (16, 4), lambda: values, **given)


def test_a_weight_is_made_once_for_all_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again where another was made since; its changes are counted with the codes alone."""
    monkeypatch.setattr(dialects, "convert_codes", lambda *given: "its codes are not kept")
    writer, latest = Writer(), LatestGrid()
    one, two = (weight(writer, latest, name) for name in ("one.weight", "two.weight"))
    assert one.part(".scales") == b"grid 1.scales" and not one.counted
    assert one.part("") == b"grid 1.qweight" and one.counted
    assert one.counts.changed == 64 and two.counts.changed == 0
    one.part("")
    assert one.counts.changed == 64, "counted once"
    quantized = [each for each in writer.asked if each[0] == "quantize"]
    assert quantized == [("quantize", (16, 4), 0.0)]
    two.part(".scales")
    one.part(".scales")
    quantized = [each for each in writer.asked if each[0] == "quantize"]
    assert len(quantized) == 3 and latest.name == "one.weight"
    writer.fails = True
    with pytest.raises(ConversionError, match=r"one.weight: no grid"):
        one.part("")
    with pytest.raises(ConversionError, match=r"two.weight: not finite"):
        two.part("")


def test_codes_that_are_kept_are_judged_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid("kept", np.zeros((16, 4)))
    monkeypatch.setattr(dialects, "convert_codes", lambda *given: (grid, "judged"))
    writer = Writer()
    one = weight(writer, LatestGrid(), companion_bytes={"input_scale": b"\0\0\x80?"})
    assert one.part("") == b"kept.qweight" and one.judged == "judged"
    assert one.counted and one.counts.changed == 0
    writer.asked.clear()
    assert one.part(".input_scale") == b"\0\0\x80?" and writer.asked == []


def test_weights_that_share_a_factor_share_the_largest_magnitude(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is read once; one that is not finite counts as nothing."""
    monkeypatch.setattr(dialects, "convert_codes", lambda *given: "no")
    read: list[str] = []

    def output(name: str, *values: float) -> Any:
        def make() -> Any:
            read.append(name)
            return np.array(values, np.float32)

        return SimpleNamespace(info=SimpleNamespace(name=name), make=make)

    joined = [output("a", 1, -7), output("b", 3, 2), output("c", math.nan, 1), output("d")]
    writer, latest = Writer(), LatestGrid()
    for name in ("one.weight", "two.weight"):
        weight(writer, latest, name, joined=joined).part(".scales")
    assert [each[2] for each in writer.asked if each[0] == "quantize"] == [7.0, 7.0]
    assert read == ["a", "b", "c", "d"] and latest.most == {"a": 7, "b": 3, "c": 0, "d": 0}


def test_parts_have_the_librarys_names_and_shapes() -> None:
    one = weight(Writer(), LatestGrid(), companion_bytes={"g": b"\0" * 4, "many": b"\0" * 12})
    found = one.infos("not used")
    assert {suffix: (i.name, i.encoding, i.shape, i.nbytes) for suffix, i in found.items()} == {
        "": ("w.qweight", "I32", (2, 4), 32),
        ".scales": ("w.scales", "F16", (16, 2), 64),
        ".g": ("w.g", "F32", (), 4),
        ".many": ("w.many", "F32", (3,), 12),
    }
    assert one.nbytes == 112
