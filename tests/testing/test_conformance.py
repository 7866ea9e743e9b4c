"""The published suites over our own tables: a new row is tested by standing there."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import eq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.spec import HyperRule
from aprfmt.base.encodings import ENCODINGS, block_encoding
from aprfmt.codecs import CODECS
from aprfmt.codecs.base import F32, BlockCodec, Blocks
from aprfmt.errors import BackendUnavailableError, FormatError, OutputError
from aprfmt.formats import FORMATS, writable_formats
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.device import DTYPES
from aprfmt.inference.weights import array_weights
from aprfmt.testing import arch as arch_suite
from aprfmt.testing import backend as backend_suite
from aprfmt.testing import check_arch, check_backend, check_codec, check_format
from aprfmt.testing import codec as codec_suite
from aprfmt.testing import format as suite
from tests.models import IDS, MAKERS, save_tiny


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name: str) -> None:
    assert "row" in check_codec(name)


def twelve() -> BlockCodec:
    """Return a codec of blocks of 12, whose row stands in the table: a class asks for it."""

    class Twelve(BlockCodec):
        """12 signed bytes under one float32 scale: rows of powers of two are no whole blocks."""

        name = "TWELVE"
        step = "d"

        def decode_blocks(self, block: Blocks, out: F32) -> None:
            """Scale."""
            out[:] = block["qs"] * block["d"][:, None]

        def encode_blocks(
            self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
        ) -> None:
            """Scale by the largest magnitude / 127, round to even."""
            block["d"] = np.abs(x).max(axis=1) / np.float32(127)
            d = np.where(block["d"] > 0, block["d"], np.float32(1))
            block["qs"] = np.rint(x / d[:, None]).astype(np.int8)

    return Twelve()


def test_a_codec_of_blocks_that_are_no_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the suite encoded rows of 256 numbers whatever the size of a block."""
    monkeypatch.setitem(ENCODINGS, "TWELVE", block_encoding("TWELVE", 12, "d:f4 qs:12i1"))
    monkeypatch.setitem(CODECS._rows, "TWELVE", ("", ""))
    monkeypatch.setitem(CODECS._loaded, "TWELVE", twelve())
    assert "encoder" in check_codec("TWELVE")


@pytest.mark.parametrize("name", writable_formats())
def test_formats(name: str, tmp_path: Path) -> None:
    assert len(check_format(name, tmp_path)) == 6


def test_a_format_that_cannot_write_over_a_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.testing import format as suite

    write = suite.write_file

    def stubborn(*arguments: Any, force: bool = False) -> None:
        if force:
            raise OutputError("never over a file")
        write(*arguments)

    monkeypatch.setattr(suite, "write_file", stubborn)
    with pytest.raises(OutputError, match="never over a file"):
        check_format("gguf", tmp_path)


@pytest.mark.parametrize("name", MAKERS)
def test_architectures(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model")
    assert {"forward", "apr"} <= set(check_arch(tmp_path / "model", tmp_path, IDS))


def test_weights_that_no_operation_reads_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("qwen3", tmp_path / "model")
    assert check_arch(tmp_path / "model", tmp_path, IDS) == check_arch(
        tmp_path / "model", tmp_path, IDS
    )  # a second time in the same folder
    spec = ARCHS["qwen3"]
    hyper = tuple(
        HyperRule("qk_norm", default=False) if rule.name == "qk_norm" else rule
        for rule in spec.hyper
    )
    monkeypatch.setitem(ARCHS._loaded, "qwen3", replace(spec, hyper=hyper))
    with pytest.raises(AssertionError, match=r"no operation reads: .*L0\.attn_q_norm\.weight"):
        check_arch(tmp_path / "model", tmp_path, IDS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_backends(name: str, dtype: str) -> None:
    try:
        BACKENDS[name]("cpu", dtype)
    except BackendUnavailableError as error:
        pytest.skip(f"NOT-RUN: {error}")
    assert "attention" in check_backend(name, "cpu", dtype)


def test_a_format_that_cannot_write_over_its_own_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = suite.write_file

    def write(*args: Any, force: bool = False) -> None:
        if force:
            raise FormatError("never again")
        real(*args, force=force)

    monkeypatch.setattr(suite, "write_file", write)
    with pytest.raises(FormatError, match="never again"):
        check_format("safetensors", tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 7, 15])
def test_a_format_that_opens_a_cut_file_is_found(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is cut."""
    real = vars(suite)["open_source"]

    def lenient(path: Path) -> Any:
        if path.name.startswith("damaged") and path.stat().st_size == whole * cut // 16:
            return contextlib.nullcontext(SimpleNamespace(tensors={}))
        return real(path)

    check_format("gguf", tmp_path)
    whole = next(tmp_path.glob("whole*")).stat().st_size
    for path in tmp_path.iterdir():
        path.unlink()
    monkeypatch.setattr(suite, "open_source", lenient)
    with pytest.raises(AssertionError, match=f"{cut}/16 of a file open"):
        check_format("gguf", tmp_path)


def test_a_codec_that_takes_a_wrong_number_of_bytes_is_found() -> None:
    """More of them, one byte less, or none at all; every byte has to count."""
    codec = CODECS["Q8_0"]
    whole = 7 * codec.type_size

    def found(takes: Callable[[int], bool]) -> str:
        def decode(parts: Any, out: Any) -> None:
            raw = parts[""]
            held = raw if not takes(len(raw)) else raw[:whole].ljust(whole, b"\0")
            codec.decode({"": held}, out)

        lax = SimpleNamespace(**{name: getattr(codec, name) for name in ("block_size", "dtype")})
        lax.decode = decode
        try:
            codec_suite._check_bytes("Q8_0", lax, 0)  # type: ignore[arg-type]
        except AssertionError as error:
            return str(error)
        return ""

    assert found(lambda size: False) == ""
    for size in (whole + 1, whole - 1, 0):
        text = found(partial(eq, size))
        assert text == f"Q8_0: took {size} bytes for 224 elements; expected a CodecError"


@pytest.mark.parametrize("name", writable_formats())
def test_the_tensors_of_a_format_hold_what_their_encodings_do(name: str) -> None:
    """A boolean is one of two bytes, and both are written; other bytes are all there are."""
    data = suite._sample_tensors(FORMATS[name], 1)
    assert len({info.encoding for info, _ in data.values()}) > 3
    for info, raw in data.values():
        assert len(raw) == info.nbytes
        if info.encoding == "BOOL":
            assert set(raw) <= {0, 1}
    seeds = [suite._sample_tensors(FORMATS[name], seed) for seed in range(8)]
    booleans = [raw for data in seeds for info, raw in data.values() if info.encoding == "BOOL"]
    assert not booleans or set(b"".join(booleans)) == {0, 1}


def test_a_dozen_tokens_are_run_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[int]] = []

    class RanError(Exception):
        pass

    def forward(model: Any, ids: list[int]) -> None:
        ran.append(ids)
        raise RanError

    coverage = SimpleNamespace(missing=(), accepted=(), misshapen=())
    found = SimpleNamespace(coverage=coverage, unbound=())
    model = SimpleNamespace(
        spec=SimpleNamespace(name="x"), resolution=found, hyper={"vocab_size": 50}
    )
    monkeypatch.setattr(arch_suite, "open_model", lambda path: contextlib.nullcontext(model))
    monkeypatch.setattr(arch_suite, "_check_names", lambda opened: None)
    monkeypatch.setattr(arch_suite, "_check_forward", forward)
    for given in ((), (1, 2, 3)):
        with pytest.raises(RanError):
            check_arch("m", Path(), given)
    assert len(set(ran[0])) == 12 and {0 <= token < 50 for token in ran[0]} == {True}
    assert ran[1] == [1, 2, 3]
    for name in ("missing", "accepted", "misshapen"):
        setattr(coverage, name, ("L0.q",))
        with pytest.raises(AssertionError, match=r"x: .*L0[.]q"):
            check_arch("m", Path(), ())
        setattr(coverage, name, ())
    found.unbound = ("odd",)
    with pytest.raises(AssertionError, match=r"no binding claims: \('odd',\)"):
        check_arch("m", Path(), ())


def test_an_error_in_any_row_of_an_operation_is_seen() -> None:
    """No row of what an operation gives is so much larger that another's error is lost in it."""
    judge = BACKENDS["numpy"]("cpu", "float64")
    inputs = backend_suite._random_inputs(0)
    for name, run in backend_suite.OPERATIONS.items():
        weight = array_weights({"w": inputs["w"].astype(np.float32)})["w"]
        given = inputs | {"inv_freq": inputs["inv_freq"].astype(np.float32)}
        found = np.asarray(judge.to_numpy(run(judge, given, weight)), np.float64)
        rows = np.sqrt(np.square(found.reshape(len(found), -1)).sum(axis=1))
        changed = rows[rows > 0]  # rows that nothing is added to may stay zero
        assert changed.size and changed.max() < 20 * changed.min(), name
