"""Check a codec: its row of the table, lengths, decoding whole and piece by piece, encoding."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.codecs import CODECS, decode, decode_chunked, encode
from aprfmt.codecs.base import Array, Codec
from aprfmt.errors import CodecError

_BLOCKS = 7
# relL2 of normally distributed numbers through the coarsest encodings (ternary, scaled by the
# largest) is 0.79.
_WORST = 0.85


def check_codec(name: str, seed: int = 0) -> tuple[str, ...]:
    """Check that the codec `name` does what base.Codec promises; return the names of the checks.

    `seed` is that of the random inputs. A codec of several stored tensors is checked with the bytes
    it encodes, others with random bytes too. Raises AssertionError for the first that fails.
    """
    codec = CODECS[name]
    row = find_encoding(name)
    found = (codec.name, codec.block_size, codec.type_size)
    expected = (name, row.block_size, row.type_size)
    assert found == expected, f"{name}: name and block are {found}; the table says {expected}"
    assert codec.parts[:1] == ("",), f"{name}: the first part is {codec.parts[:1]}; expected ''"
    done = ["row"]
    if len(codec.parts) == 1:
        _check_bytes(name, codec, seed)
        done += ["random bytes", "lengths", "pieces"]
    if _check_encoder(name, codec, seed):
        done.append("encoder")
    return tuple(done)


def _check_bytes(name: str, codec: Codec, seed: int) -> None:
    """Raise AssertionError unless random bytes decode alike whole, in ranges and by the kernel.

    Bytes of another length must be refused.
    """
    row, count = find_encoding(name), _BLOCKS * codec.block_size
    raw = np.random.default_rng(seed).integers(0, 64, row.nbytes((count,)), np.uint8).tobytes()
    values = decode(name, raw, (count,))
    assert values.shape == (count,), f"{name}: decoded to {values.shape}; expected {(count,)}"
    assert values.dtype.name == codec.dtype, f"{name}: gave {values.dtype}; says {codec.dtype}"
    reference: Array = np.empty(count, codec.dtype)
    codec.decode({"": raw}, reference)
    assert reference.tobytes() == values.tobytes(), f"{name}: kernel and reference differ"
    least = count if row.row_header else 2 * codec.block_size  # rows are not cut
    room: Array = np.empty(least, codec.dtype)
    pieces = [piece.copy() for piece in decode_chunked(name, raw, (count,), room)]
    joined = np.concatenate(pieces).tobytes()
    assert joined == values.tobytes(), f"{name}: pieces differ from the whole"
    for wrong in (raw[:-1], raw + b"\0", b""):
        try:
            codec.decode({"": wrong}, reference)
        except CodecError:
            continue
        raise AssertionError(
            f"{name}: took {len(wrong)} bytes for {count} elements; expected a CodecError"
        )


def _check_encoder(name: str, codec: Codec, seed: int) -> bool:
    """Check that encoded values decode to near values, and return whether there is an encoder.

    Raises AssertionError where they do not.
    """
    wide = 4 * codec.block_size * -(-64 // codec.block_size)  # whole blocks, whatever their size
    x = np.random.default_rng(seed).standard_normal((4, wide))
    values: Array = x.astype("float64" if codec.dtype == "float64" else "float32")
    if np.dtype(codec.dtype).kind != "f":
        return False  # integers are stored, never made
    try:
        parts = _encode_parts(name, values)
    except CodecError as error:
        assert "no encoder" in str(error), f"{name}: cannot encode normal numbers: {error}"
        return False
    assert parts == _encode_parts(name, values), f"{name}: encoding twice gave other bytes"
    expected = find_encoding(name).nbytes(values.shape)
    found = len(parts[""])
    assert found == expected, f"{name}: encoded to {found} bytes; the table says {expected}"
    back = np.asarray(decode(name, parts, values.shape), np.float64)
    distance = float(np.linalg.norm(back - values) / np.linalg.norm(values))
    assert distance < _WORST, f"{name}: relL2 {distance:.3g} there and back; expected < {_WORST}"
    zeros = decode(name, _encode_parts(name, 0 * values), values.shape)
    assert not np.asarray(zeros, np.float64).any(), f"{name}: zeros do not come back as zeros"
    again = decode(name, _encode_parts(name, back.astype(values.dtype)), values.shape)
    drift = float(np.linalg.norm(np.asarray(again, np.float64) - back) / np.linalg.norm(back))
    assert drift <= distance + 1e-6, f"{name}: a second round trip moves {drift:.3g}"
    return True


def _encode_parts(name: str, x: Array) -> Mapping[str, Any]:
    """Return {suffix: bytes} of an array in the encoding."""
    return {suffix: bytes(part) for suffix, part in encode(name, x).items()}
