"""Compressed framing: one loader's LZ4 and Zstd, read with bounds, never written."""

import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.base.installation import install_command
from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.formats import open_source
from aprfmt.formats.apr import compression
from aprfmt.formats.apr.parse import parse
from aprfmt.formats.apr.reader import open_source as open_apr
from tests.formats.apr_files import AprFile
from tests.formats.apr_writing import write

LZ4, ZSTD = 0x0001, 0x0002


def length_bytes(length: int) -> bytes:
    """Return the bytes that continue a length whose nibble is 15."""
    rest = length - 15
    return b"" if rest < 0 else b"\xff" * (rest // 255) + bytes([rest % 255])


def sequence(literals: bytes, match: tuple[int, int] | None = None) -> bytes:
    """Return one LZ4 sequence; `match` is (distance, length)."""
    token = min(len(literals), 15) << 4
    out = length_bytes(len(literals)) + literals
    if match is not None:
        distance, length = match
        token |= min(length - 4, 15)
        out += distance.to_bytes(2, "little") + length_bytes(length - 4)
    return bytes([token]) + out


def lz4_file(block: bytes, size: int, plain: bytes) -> bytes:
    return plain[:64] + size.to_bytes(4, "little") + block


def plain_file(flags: int) -> bytes:
    return AprFile(flags=0x0400 | flags).build()


def test_lz4_sequences_and_overlapping_matches() -> None:
    plain = plain_file(LZ4)
    body = plain[64:]
    at = body.index(bytes(40))  # a run of zeros: one literal zero, then a match at distance 1
    block = sequence(body[: at + 1], (1, 39)) + sequence(body[at + 40 :])
    parsed = parse(memoryview(lz4_file(block, len(body), plain)), "t.apr")
    assert parsed.expanded
    assert bytes(parsed.buffer[:]) == plain
    assert list(parsed.infos) == ["a", "b"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=300), st.integers(4, 600), st.integers(1, 400))))
def test_lz4_blocks_expand_like_a_naive_decoder(pieces: list[tuple[bytes, int, int]]) -> None:
    block, expected = b"", bytearray()
    for literals, length, distance in pieces:
        expected += literals
        if not expected:
            continue
        distance = min(distance, len(expected))
        for _ in range(length):
            expected.append(expected[-distance])
        block += sequence(literals, (distance, length))
    block += sequence(b"end")
    expected += b"end"
    packed = memoryview(b"\0" * 64 + len(expected).to_bytes(4, "little") + block)
    assert compression.expand_file(packed, LZ4, "t")[64:] == expected


@pytest.mark.parametrize("short", [-1, 0, 1])
@pytest.mark.parametrize("end", [b"", b"\0"], ids=["match", "empty token"])
@pytest.mark.parametrize("length", [4, 18, 19, 300])
def test_a_match_may_reach_the_declared_end_and_no_further(
    length: int, end: bytes, short: int
) -> None:
    """So may literals; each is judged against the size that is declared, a byte either way."""
    packed = b"\0" * 64 + (3 + length + short).to_bytes(4, "little")
    block = memoryview(packed + sequence(b"abc", (3, length)) + end)
    literals = memoryview(packed + sequence(b"x" * (3 + length)))
    if not short:
        assert compression.expand_file(block, LZ4, "t")[64:] == (b"abc" * 200)[: 3 + length]
        assert compression.expand_file(literals, LZ4, "t")[64:] == b"x" * (3 + length)
        return
    for one in (block, literals):
        with pytest.raises(FormatError, match="are declared"):
            compression.expand_file(one, LZ4, "t")


@pytest.mark.parametrize("kind", ["lz4", "zstd", "zstd without its size"])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_file_may_expand_to_its_limit_and_no_further(
    over: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "lz4":
        flags, size = LZ4, 5000 + over
        packed = size.to_bytes(4, "little") + sequence(b"\0", (1, size - 6)) + sequence(bytes(5))
    else:
        zstandard = pytest.importorskip("zstandard", reason="NOT-RUN: zstandard is not installed")
        flags, size = ZSTD, 5000 + over
        sized = "without" not in kind
        packed = zstandard.ZstdCompressor(write_content_size=sized).compress(bytes(size))
    monkeypatch.setattr(compression, "_FREE", 5000 - compression._RATIO * len(packed))
    file = memoryview(bytes(64) + packed)
    if over > 0:
        with pytest.raises(UnsupportedError, match="the limit for its size is 5000"):
            compression.expand_file(file, flags, "t")
    else:
        assert compression.expand_file(file, flags, "t") == bytes(64 + size)


@settings(deadline=None)
@given(st.binary(max_size=80), st.integers(0, 500))
def test_any_lz4_block_ends_in_data_or_one_error(block: bytes, size: int) -> None:
    packed = memoryview(b"\0" * 64 + size.to_bytes(4, "little") + block)
    try:
        assert len(compression.expand_file(packed, LZ4, "t")) == 64 + size
    except FormatError as error:
        assert "LZ4" in str(error)


@pytest.mark.parametrize(
    ("block", "size", "says"),
    [
        (sequence(b"abc", (4, 4)), 7, "cut or damaged"),  # before the start
        (sequence(b"abc", (0, 4)), 7, "cut or damaged"),
        (sequence(b"abcd", (1, 100)), 50, "cut or damaged"),  # more than declared
        (sequence(b"abcd"), 50, "gave 4 bytes, 50 are declared"),
        (b"\xf0", 50, "cut or damaged"),
        (b"\xf0\xff\xff", 50, "cut or damaged"),
        (b"\x40ab", 50, "cut or damaged"),
        (b"", (1 << 32) - 1, "the limit for its size"),
    ],
    ids=["before_start", "zero_distance", "too_long", "short", "no_length", "open_length",
         "literals_cut", "bomb"],
)  # fmt: skip
def test_damaged_lz4_is_refused(block: bytes, size: int, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(memoryview(lz4_file(block, size, plain_file(LZ4))), "t.apr")
    assert says in str(caught.value)


def test_zstd_is_read_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    zstandard = pytest.importorskip("zstandard", reason="NOT-RUN: zstandard is not installed")
    plain = plain_file(ZSTD)
    packed = plain[:64] + zstandard.ZstdCompressor().compress(plain[64:])
    assert bytes(parse(memoryview(packed), "t.apr").buffer[:]) == plain
    with pytest.raises(FormatError, match="Zstd frame is damaged"):
        parse(memoryview(packed[:68] + b"\xff" * 9 + packed[77:]), "t.apr")
    bomb = plain[:64] + zstandard.ZstdCompressor().compress(bytes(2 << 20))
    monkeypatch.setattr(compression, "_FREE", 1 << 20)
    with pytest.raises(UnsupportedError, match="the limit for its size"):
        parse(memoryview(bomb), "t.apr")


@pytest.mark.parametrize("kind", ["lz4", "zstd", "zstd in two frames", "zstd of one byte"])
def test_a_cut_at_any_byte_is_found(kind: str) -> None:
    """Seen red: a Zstd frame without its checksum, or without a part of it, was read as whole."""
    if kind == "lz4":
        plain = plain_file(LZ4)
        packed = lz4_file(sequence(plain[64:]), len(plain) - 64, plain)
    else:
        zstandard = pytest.importorskip("zstandard", reason="NOT-RUN: zstandard is not installed")
        plain = plain_file(ZSTD)
        pieces = [plain[64:]] if "two" not in kind else [plain[64:90], plain[90:]]
        if "byte" in kind:
            pieces[0] += bytes(1 << 18)  # blocks that repeat one byte
        packer = zstandard.ZstdCompressor(write_checksum=True)
        hidden = b"\x5a\x2a\x4d\x18\x03\0\0\0abc"  # a skippable frame
        packed = plain[:64] + hidden + b"".join(map(packer.compress, pieces))
    whole = bytes(parse(memoryview(packed), "t.apr").buffer[:])
    assert whole[: len(plain)] == plain
    for size in range(65, len(packed)):
        with pytest.raises(FormatError):
            parse(memoryview(packed[:size]), "t.apr")


@pytest.mark.parametrize("kind", ["zstd", "lz4", "lz4 that says so"])
def test_a_bomb_takes_no_more_than_its_limit(kind: str, tmp_path: Path) -> None:
    """A gigabyte of zeros in some kilobytes. Seen red: no limit, a match that is copied twice."""
    path, size = tmp_path / "bomb.apr", 1 << 30
    if kind == "zstd":
        zstandard = pytest.importorskip("zstandard", reason="NOT-RUN: zstandard is not installed")
        packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
        piece = bytes(4 << 20)
        body = b"".join(packer.compress(piece) for _ in range(size // len(piece)))
        path.write_bytes(plain_file(ZSTD)[:64] + body + packer.flush())
    else:
        limit = compression._FREE
        expanded = size if kind == "lz4 that says so" else limit
        block = sequence(b"\0", (1, expanded - 6)) + sequence(b"abcde")
        path.write_bytes(lz4_file(block, expanded, plain_file(LZ4)))
    limit = compression._FREE + compression._RATIO * path.stat().st_size
    assert limit < size // 8
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, UnsupportedError)):
            open_source(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.25 * limit + (8 << 20)  # a growing buffer takes an eighth more


def test_without_the_package_zstd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    data = plain_file(ZSTD)[:64] + b"\x28\xb5\x2f\xfd"
    with pytest.raises(UnsupportedError, match=re.escape(install_command("zstd"))):
        parse(memoryview(data), "t.apr")


def test_a_plain_file_with_the_flag_gives_the_plain_error() -> None:
    data = plain_file(LZ4)
    with pytest.raises(FormatError, match="bytes are missing"):
        parse(memoryview(data[:-70]), "t.apr")


def test_a_rewrite_is_plain(tmp_path: Path) -> None:
    plain = plain_file(LZ4)
    path = tmp_path / "c.apr"
    path.write_bytes(lz4_file(sequence(plain[64:]), len(plain) - 64, plain))
    with open_apr(path) as source:
        assert source.footer_matches() is True
        infos = [tensor.info for tensor in source.tensors.values()]
        write(tmp_path / "x.apr", infos, source.metadata, like=source)
    with open_source(tmp_path / "x.apr") as again:
        assert not again.notes
    assert (tmp_path / "x.apr").read_bytes()[6:8] == b"\x00\x04"
