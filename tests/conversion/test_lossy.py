"""Lossy steps need their flag, are counted, and overflow is refused."""

from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.errors import ConversionError, OutputError, UsageError
from tests.conversion.folders import float_bytes, llama_folder


def test_bf16_overflowing_f16_is_refused_and_counted_with_the_flag(tmp_path: Path) -> None:
    values = np.full((64, 64), 0.5, np.float32)
    values[0, 0], values[1, 1], values[2, 2] = 70000.0, -1e30, 1e-9
    source = llama_folder(
        tmp_path / "source",
        "BF16",
        replaced={"model.layers.0.mlp.up_proj.weight": float_bytes(values, "BF16")},
    )
    with pytest.raises(ConversionError, match=r"2 finite BF16 values overflow F16"):
        aprfmt.convert(source, tmp_path / "m.gguf", encoding="F16")
    assert not list(tmp_path.glob("*.gguf"))
    report = aprfmt.convert(source, tmp_path / "m.gguf", encoding="F16", allow_overflow=True)
    row = next(t for t in report.tensors if t.name == "blk.0.ffn_up.weight")
    assert (row.how, row.overflowed, row.underflowed) == ("lossy", 2, 1)


def test_what_a_format_cannot_hold_is_refused_with_the_way_out(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    aprfmt.convert(source, tmp_path / "q.gguf", encoding="Q8_0")
    with pytest.raises(ConversionError, match="--encoding"):
        aprfmt.convert(tmp_path / "q.gguf", tmp_path / "back", to="safetensors")
    report = aprfmt.convert(tmp_path / "q.gguf", tmp_path / "b", to="safetensors", encoding="F32")
    assert report.lossless
    assert aprfmt.diff(tmp_path / "q.gguf", tmp_path / "b").equal


def test_apr_carries_what_it_has_no_code_for(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "F32")
    aprfmt.convert(source, tmp_path / "q.gguf", encoding="Q5_0")
    report = aprfmt.convert(tmp_path / "q.gguf", tmp_path / "q.apr")
    assert report.count("bytes") == len(report.tensors)
    aprfmt.convert(tmp_path / "q.apr", tmp_path / "back.gguf")
    with aprfmt.open(tmp_path / "q.gguf") as a, aprfmt.open(tmp_path / "back.gguf") as b:
        assert {k: (t.encoding, bytes(t.raw())) for k, t in a.items()} == {
            k: (t.encoding, bytes(t.raw())) for k, t in b.items()
        }


def test_a_tensor_pattern_wins_over_encoding(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "F32")
    aprfmt.convert(
        source, tmp_path / "m.gguf", encoding="Q8_0", tensor_encodings=[("blk.0.ffn_down", "F16")]
    )
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model["blk.0.ffn_down.weight"].encoding == "F16"
        assert model["blk.1.ffn_down.weight"].encoding == "Q8_0"
        assert model["blk.0.ffn_norm.weight"].encoding == "F32"


def test_rows_that_do_not_fit_blocks_name_the_tensor(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "F32", ffn=40)
    with pytest.raises(ConversionError, match=r"ffn_down.*multiple of 32.*found 40"):
        aprfmt.convert(source, tmp_path / "m.gguf", encoding="Q8_0")


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "F32")
    target = tmp_path / "m.apr"
    target.write_bytes(b"precious")
    with pytest.raises(OutputError, match="--force"):
        aprfmt.convert(source, target)
    assert target.read_bytes() == b"precious"
    aprfmt.convert(source, target, force=True)
    assert aprfmt.diff(source, target).equal


def test_extension_and_format_must_agree(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "F32")
    with pytest.raises(UsageError, match="make them agree"):
        aprfmt.convert(source, tmp_path / "m.gguf", to="apr")


def test_a_missing_tensor_stops_a_conversion(tmp_path: Path) -> None:
    from tests.conversion.folders import tensors_of, write_safetensors

    source = llama_folder(tmp_path / "source", "F32")
    rows = tensors_of(source)
    del rows["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(
        source / "model.safetensors",
        {name: shape for name, (_, shape, _) in rows.items()},
        {name: raw for name, (_, _, raw) in rows.items()},
        "F32",
    )
    with pytest.raises(ConversionError, match=r"1 tensors .* L1\.ffn_up\.weight"):
        aprfmt.convert(source, tmp_path / "m.gguf")


def test_source_identity_is_recorded(tmp_path: Path) -> None:
    import hashlib

    source = llama_folder(tmp_path / "source", "F32")
    expected = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    for name in ("m.gguf", "m.apr"):
        report = aprfmt.convert(source, tmp_path / name)
        assert report.source_sha256 == expected
        with aprfmt.open(tmp_path / name) as model:
            assert model.metadata["aprfmt.source.sha256"] == expected
            assert model.metadata["aprfmt.writer"] == f"aprfmt {aprfmt.__version__}"
            assert model.metadata["aprfmt.source.format"] == "safetensors"
