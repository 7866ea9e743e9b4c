"""What a conversion refuses, each refusal by itself and beside what it lets pass."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from aprfmt.conversion import accounting, dialects, in_place
from aprfmt.conversion.accounting import Account, SourceItem, balanced_account
from aprfmt.conversion.quantize_options import check_requantization
from aprfmt.conversion.sidecar_files import texts_to_write
from aprfmt.errors import ConversionError, OutputError
from aprfmt.formats.sequential import Checksum, FileProgram, TensorSlot

# --- quantized twice ------------------------------------------------------------------------------


def output(name: str, to: str, source: str, runs: Any = ()) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(name=name), encoding=to, source_encoding=source, runs=runs
    )


def requantized(*outputs: Any, quantize: str | None = "Q4_K_M", **more: Any) -> str:
    allow = more.pop("allow", False)
    options: Any = SimpleNamespace(allow_requantize=allow, quantize=quantize)
    try:
        check_requantization(outputs, options, Path("m"), **more)
    except ConversionError as error:
        return str(error)
    return ""


def test_blocks_are_cut_only_where_a_layout_step_changes_them() -> None:
    """Those of another encoding are decoded anyway, and plain numbers have no blocks."""
    cut = output("w", "Q8_0", "Q8_0", None)
    for quantize in (None, "Q4_K_M"):
        text = requantized(cut, output("v", "F32", "F32", None), quantize=quantize)
        assert text.startswith("m: 1 tensors are stored otherwise there, so that their blocks")
        assert "w" in text.partition("again: ")[2].partition(";")[0]
    assert requantized(cut, allow=True) == ""
    assert requantized(output("w", "Q8_0", "Q8_0")) == ""
    assert requantized(output("w", "F16", "F16", None)) == ""
    assert requantized(output("w", "F32", "Q8_0", None)) == ""


def test_quantized_weights_are_not_quantized_once_more_unasked() -> None:
    again = output("w", "Q4_K", "Q8_0")
    text = requantized(again, output("v", "Q4_K", "F32"), output("u", "F32", "Q8_0"))
    assert text.startswith("m: 1 tensors are quantized already: w")
    assert requantized(again, allow=True) == requantized(again, quantize=None) == ""
    assert requantized(again, copied={"w"}) == ""
    assert requantized(again, output("x", "Q4_K", "Q6_K"), copied={"x"}) != ""
    assert "no grid" in requantized(again, reasons={"w": "no grid", "v": ""})


# --- what a copy lacks ----------------------------------------------------------------------------


def lost(name: str, kind: str, how: str, fate: str = "lost") -> Any:
    return SourceItem(name, kind, fate, how)  # type: ignore[arg-type]


def balance(monkeypatch: pytest.MonkeyPatch, *entries: Any) -> str:
    asked: list[Any] = []

    def account(copy: Any, source: Any, excused: Any, edited: Any) -> Account:
        asked.append((copy.path, source.path, excused("x"), excused("y"), edited))
        return Account(tuple(entries))

    monkeypatch.setattr(accounting, "account_for_source", account)
    copy: Any = SimpleNamespace(path="copy", format="gguf")
    source: Any = SimpleNamespace(path="source", format="safetensors")
    try:
        found = balanced_account(copy, source, {"x": "--drop"}, [("key", "k")])
    except ConversionError as error:
        text = str(error)
    else:
        assert found.entries == entries
        text = ""
    assert asked == [("copy", "source", "--drop", "", [("key", "k")])]
    return text


def test_what_is_lost_is_refused_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of inputs by the option that leaves them out, other values by the key, the rest."""
    gone = accounting._INPUTS_GONE
    scales = [
        lost(f"model.layers.{n}.mlp.{part}.input_scale", "scale", gone)
        for n in range(2)
        for part in ("up_proj", "down_proj")
    ]
    kept = lost("w", "tensor", "", "copied")
    assert balance(monkeypatch, kept) == balance(monkeypatch) == ""
    text = balance(monkeypatch, kept, *scales)
    assert text.startswith("source: model.layers.0.mlp.up_proj.input_scale (scale), ")
    assert text.endswith("have none; leave them out with --drop '*input_scale'")
    value = lost("rope_theta", "hyperparameter", "1, and would be 2 in the copy")
    text = balance(monkeypatch, kept, *scales, value)
    assert text.startswith(
        "source: rope_theta is 1, and would be 2 in the copy; the keys of a gguf"
    )
    other = lost("b", "tensor", "gone")
    text = balance(monkeypatch, kept, scales[0], other)
    assert text.startswith("copy: 2 of 3 things of the source are neither copied,")
    assert "b (tensor); report it as a bug" in text
    many = [lost(f"h{n}", "hyperparameter", f"{n}") for n in range(7)]
    text = balance(monkeypatch, *many)
    assert "h4 is 4; the keys" in text and "h5" not in text


# --- codes that are kept --------------------------------------------------------------------------


def test_codes_that_would_change_values_are_refused_by_the_worst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {
        "a": SimpleNamespace(groups=4, inexact=0, largest=0.0),
        "b": SimpleNamespace(groups=8, inexact=3, largest=0.25),
        "c": SimpleNamespace(groups=16, inexact=1, largest=0.5),
        "d": "its shape",
    }
    converted: list[str] = []

    def convert(one: Any, writer: Any, settings: Any) -> Any:
        converted.append(one.info.name)
        found = counts[one.info.name]
        return found if isinstance(found, str) else (None, found)

    monkeypatch.setattr(dialects, "convert_codes", convert)
    monkeypatch.setattr(dialects, "_settings", lambda *given: None)
    monkeypatch.setattr(dialects, "_check_alone", lambda *given: None)
    monkeypatch.setattr(
        dialects,
        "dialect_writer",
        lambda options: None if options.quantize is None else SimpleNamespace(encoding="AWQ"),
    )

    def choose(names: str, *, allow: bool = False, quantize: str | None = "awq") -> Any:
        converted.clear()
        outputs = [
            SimpleNamespace(
                info=SimpleNamespace(name=name, encoding="F32" if name == "f" else "AWQ"),
                source_encoding="AWQ" if name == "e" else "GPTQ",
            )
            for name in names
        ]
        options: Any = SimpleNamespace(allow_inexact=allow, quantize=quantize)
        model: Any = SimpleNamespace(path="m")
        return dialects.choose_kept_codes(outputs, model, options)  # type: ignore[arg-type]

    assert choose("adef") == ({"a"}, {"d": "its shape"}) and converted == ["a", "d"]
    assert choose("abcd", allow=True) == ({"a", "b", "c"}, {"d": "its shape"})
    text = (
        "m: 4 of 24 groups in 2 weights change when their codes are kept as awq, by at most 0.5 "
        "(c); accept it with --allow-inexact"
    )
    for order in ("abcd", "cbad"):
        with pytest.raises(ConversionError, match=re.escape(text)):
            choose(order)
    assert choose("abc", quantize=None) == (set(), {}) and not converted


# --- files that are overwritten in place ----------------------------------------------------------


class Held:
    """An open file of these bytes."""

    def __init__(self, data: bytes) -> None:
        self.size, self.view = len(data), memoryview(data)


def test_what_stands_behind_a_header_is_where_this_version_puts_it() -> None:
    """Tensors as they lie, then other bytes; an empty tensor may lie anywhere."""
    head, body = b"APR2" + bytes(12), b"tensor--" + b"pad!"
    data = head + body

    def tail(*body: Any, at: int = 16, size: int = 8, data: bytes = data, new: bytes = head) -> Any:
        tensors = {
            name: SimpleNamespace(info=SimpleNamespace(offset=place, nbytes=count))
            for name, place, count in (("w", at, size), ("empty", 3, 0))
        }
        model: Any = SimpleNamespace(path="m", source=SimpleNamespace(tensors=tensors))
        program = FileProgram(Path("m"), new, body)
        held: Any = Held(data)
        return in_place._tail_pieces(program, new, model, held)

    slots = (TensorSlot("w", 8), b"pad!")
    assert tail(*slots) == [(24, b"pad!")]
    assert tail(TensorSlot("empty", 0), *slots) == [(16 + 8, b"pad!")]
    assert tail(b"", *slots) == [(16, b""), (24, b"pad!")]
    for at, size in ((17, 8), (15, 8), (16, 9)):
        with pytest.raises(ConversionError, match=rf"\(w at byte {at}, expected 16\)"):
            tail(*slots, at=at, size=size)
    for held in (data + b"!", data[:-1]):
        with pytest.raises(ConversionError, match=rf"\({len(held)} bytes, expected {len(data)};"):
            tail(*slots, data=held)
    with pytest.raises(ConversionError, match="another version or byte order"):
        tail(*slots, data=b"GGUF" + data[4:])
    # A checksum is that of the new header and the old tensors; a wrong one stays wrong.
    new = head[:6] + b"other head"
    right = [crc32(each + b"tensor--") for each in (head, new)]
    for off in (0, 0x1234):
        stored = (right[0] ^ off).to_bytes(4, "little")
        ((at, found),) = tail(*slots[:1], Checksum(), data=head + b"tensor--" + stored, new=new)
        assert (at, found) == (24, (right[1] ^ off).to_bytes(4, "little"))


# --- files beside weights -------------------------------------------------------------------------


def test_a_text_beside_weights_is_written_where_no_other_model_has_it(tmp_path: Path) -> None:
    weights = tmp_path / "m.safetensors"
    beside = tmp_path / "config.json"

    def wanted(*, force: bool = False, folder: Path | None = None) -> Any:
        return texts_to_write(weights, folder, {"config.json": "new"}, force)

    assert wanted() == {beside: "new"}
    beside.write_text("new")
    assert wanted() == wanted(force=True) == {}
    assert wanted(folder=tmp_path) == {beside: "new"}, "a folder of its own is written whole"
    beside.write_text("old")
    for force in (False, True):
        with pytest.raises(OutputError, match=r"something else \(of another model\?\)"):
            wanted(force=force)  # the weights it would belong to are not there
    weights.write_bytes(b"")
    with pytest.raises(OutputError, match="of another model"):
        wanted()
    assert wanted(force=True) == {beside: "new"}
    (tmp_path / "m-00001-of-00002.safetensors").write_bytes(b"")
    assert wanted(force=True) == {beside: "new"}, "shards of the same weights"
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(OutputError, match=r"\(that of other.gguf\?\); give .* a separate folder"):
        wanted(force=True)
    beside.unlink()
    assert wanted() == {beside: "new"}
