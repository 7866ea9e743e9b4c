"""Every type of `quantize` in GGUF: bytes of libgguf, numbers of gguf-py, the record, the sizes."""

from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest

import aprfmt
from aprfmt.errors import CodecError, ConversionError, UsageError
from aprfmt.quantizing.mixture import QUANTIZER_VERSION, SCHEMES
from aprfmt.quantizing.row_encoding import encode_rows
from tests.codecs.data import libgguf_blocks, libgguf_mode
from tests.conversion.folders import float_bytes, llama_folder

GGML = [name for name, row in SCHEMES.items() if row.file_type is not None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama folder whose rows are whole superblocks."""
    folder = tmp_path_factory.mktemp("quantize") / "source"
    return llama_folder(folder, "BF16", hidden=256, layers=3, ffn=512, vocab=32)


@pytest.mark.parametrize("scheme", GGML)
def test_bytes_and_numbers_of_the_libraries(scheme: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    report = aprfmt.convert(source, target, quantize=scheme, fma=libgguf_mode())
    assert {t.name: t.encoding for t in report.tensors}["blk.0.attn_q.weight"] == SCHEMES[
        scheme
    ].base
    reader = gguf.GGUFReader(target)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    aprfmt.convert(source, tmp_path / "f.gguf", encoding="F32")
    with aprfmt.open(target) as model, aprfmt.open(tmp_path / "f.gguf") as plain:
        assert set(theirs) == set(model)
        for name, tensor in model.items():
            other = theirs[name]
            assert other.tensor_type.name == tensor.encoding
            numbers = gguf.quants.dequantize(other.data, other.tensor_type)
            assert np.array_equal(numbers.reshape(tensor.shape), tensor.numpy()), name
            if tensor.encoding not in ("F32", "F16", "BF16"):
                blocks = libgguf_blocks(tensor.encoding, plain[name].numpy())
                assert bytes(tensor.raw()) == blocks.tobytes(), name


@pytest.mark.parametrize("fma", ["fused", "strict"])
def test_how_it_was_made_is_recorded(
    fma: Literal["fused", "strict"], source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "q.gguf"
    aprfmt.convert(source, target, quantize="Q4_K_S", fma=fma)
    expected = {
        "aprfmt.quantize.type": "Q4_K_S",
        "aprfmt.quantize.fma": fma,
        "aprfmt.quantize.version": QUANTIZER_VERSION,
    }
    aprfmt.convert(target, tmp_path / "q.apr")
    aprfmt.convert(tmp_path / "q.apr", tmp_path / "back.gguf")
    for path in (target, tmp_path / "q.apr", tmp_path / "back.gguf"):
        with aprfmt.open(path) as model:
            assert {k: model.metadata[k] for k in expected} == expected, path
            assert model.source.version
    fields = gguf.GGUFReader(target).fields
    assert fields["general.file_type"].contents() == 14
    assert fields["general.quantization_version"].contents() == 2


def test_one_source_in_three_formats_gives_the_same_blocks(source: Path, tmp_path: Path) -> None:
    aprfmt.convert(source, tmp_path / "f.gguf")
    aprfmt.convert(source, tmp_path / "f.apr")
    for number, origin in enumerate((source, tmp_path / "f.gguf", tmp_path / "f.apr")):
        aprfmt.convert(origin, tmp_path / f"{number}.gguf", quantize="Q4_K_M")
    aprfmt.convert(source, tmp_path / "q.apr", quantize="Q4_K_M")
    for other in ("1.gguf", "2.gguf", "q.apr"):
        counts = aprfmt.diff(tmp_path / "0.gguf", tmp_path / other).counts
        assert counts["SAME_BYTES"] + counts["SAME_VALUES"] == sum(counts.values()), other


def test_threads_and_chunks_change_no_byte() -> None:
    x = np.random.default_rng(3).standard_normal((331, 512)).astype(np.float32)
    weights = np.random.default_rng(4).lognormal(0, 1, 512).astype(np.float32)
    for name in ("Q4_K", "Q8_0", "IQ4_NL"):
        whole = encode_rows(name, x, importance=weights, threads=1)
        assert encode_rows(name, x, importance=weights, threads=7) == whole
        assert whole == b"".join(encode_rows(name, row, importance=weights) for row in x)


def test_encoding_rows_refuses_what_needs_companions() -> None:
    with pytest.raises(CodecError, match="companion"):
        encode_rows("NF4", np.ones((2, 64), np.float32))


def test_a_pattern_wins_over_the_mixture(source: Path, tmp_path: Path) -> None:
    report = aprfmt.convert(
        source, tmp_path / "q.gguf", quantize="Q4_K_M", tensor_encodings=[("L1.attn_q", "Q8_0")]
    )
    found = {t.name: t.encoding for t in report.tensors}
    assert found["blk.1.attn_q.weight"] == "Q8_0"
    assert found["blk.0.attn_q.weight"] == "Q4_K"


def test_quantizing_twice_needs_its_flag(source: Path, tmp_path: Path) -> None:
    once = tmp_path / "once.gguf"
    aprfmt.convert(source, once, quantize="Q8_0")
    with pytest.raises(ConversionError, match=r"quantized already.*Q8_0.*--allow-requantize"):
        aprfmt.convert(once, tmp_path / "twice.gguf", quantize="Q4_K_M")
    assert aprfmt.convert(once, tmp_path / "same.gguf", quantize="Q8_0").lossless
    assert aprfmt.convert(once, tmp_path / "float.gguf", quantize="F32").lossless
    report = aprfmt.convert(once, tmp_path / "twice.gguf", quantize="Q4_K_M", allow_requantize=True)
    assert report.count("lossy")


def test_overflow_is_refused_and_counted_with_the_flag(tmp_path: Path) -> None:
    values = np.full((64, 64), 0.5, np.float32)
    values[0, 0] = 1e30
    name = "model.layers.0.mlp.up_proj.weight"
    bad = llama_folder(tmp_path / "s", "BF16", replaced={name: float_bytes(values, "BF16")})
    with pytest.raises(ConversionError, match=r"blk\.0\.ffn_up.*1 finite BF16 values overflow F16"):
        aprfmt.convert(bad, tmp_path / "q.gguf", quantize="F16")
    report = aprfmt.convert(bad, tmp_path / "q.gguf", quantize="F16", allow_overflow=True)
    assert sum(tensor.overflowed for tensor in report.tensors) == 1


def test_flags_that_need_a_scheme(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--type"):
        aprfmt.convert(source, tmp_path / "q.gguf", pure=True)
    with pytest.raises(UsageError, match="exclude"):
        aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q8_0", encoding="F16")
    for name in ("F16", "NF4", "AWQ-g32"):
        with pytest.raises(UsageError, match=f"--pure: {name} is no mixture"):
            aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize=name, pure=True)


def test_safetensors_has_no_ggml_blocks(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"has no code .*Q4_K.*NF4.*or write APR"):
        aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize="Q4_K_M")


def test_an_unknown_architecture_is_quantized_by_its_names(source: Path, tmp_path: Path) -> None:
    unknown = {"general.architecture": "mystery", "aprfmt.hf_config": "{}"}
    aprfmt.convert(source, tmp_path / "m.gguf", metadata=unknown)
    odd = aprfmt.convert(tmp_path / "m.gguf", tmp_path / "odd.gguf", quantize="Q4_K_M")
    known = aprfmt.convert(source, tmp_path / "known.gguf", quantize="Q4_K_M")
    assert odd.arch is None
    assert {t.name: t.encoding for t in odd.tensors} == {t.name: t.encoding for t in known.tensors}
