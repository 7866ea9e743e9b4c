"""Decompresses APR files as one loader writes them: a plain header, then compressed bytes.

LZ4: u32 uncompressed length, then a raw LZ4 block. Zstd: an ordinary frame. After expansion the
header's offsets apply. No known v2 writer makes such files, nor does aprfmt. The flag alone proves
nothing, since the reference writer sets it on uncompressed files.

Source of the block layout: the LZ4 block format description of the lz4 project.
"""

from collections.abc import Callable

from aprfmt.base.installation import install_command
from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.formats.apr.layout import BITS, HEADER_SIZE

# Real weights shrink by less than 2. The limit allows for zeros, but stops small hostile files.
_FREE = 16 << 20
_RATIO = 16
_WINDOW = 1 << 20
_SKIPPABLE = 0x184D2A50  # the first of 16 magic numbers of Zstd frames that hold no data
_RUN_OF_ONE = 1  # the type of a Zstd block that repeats one byte
_MAX_ZSTD_WINDOW = 128 << 20  # what the zstd command line accepts without being asked for more


def expand_file(buffer: memoryview, flags: int, where: str) -> bytearray:
    """Return the bytes of the uncompressed file: header, then everything expanded.

    `buffer` is the whole compressed file, `flags` are its header's, `where` begins messages. Raises
    FormatError for damaged data, UnsupportedError beyond the size limit or without the package that
    expands Zstd.
    """
    packed = buffer[HEADER_SIZE:]
    limit = _FREE + _RATIO * len(packed)
    for bit, expander in _EXPANDERS:  # LZ4 wins if both bits are set
        if flags & BITS[bit]:
            return expander(bytes(buffer[:HEADER_SIZE]), packed, limit, where)
    raise FormatError(f"{where}: no compression flag is set")


def _size_error(where: str, size: int, limit: int) -> UnsupportedError:
    """Return the UnsupportedError of a file that expands beyond the limit."""
    return UnsupportedError(
        f"{where}: expands to {size} bytes or more, the limit for its size is {limit}; "
        "no model shrinks that far"
    )


def _expand_lz4(head: bytes, packed: memoryview, limit: int, where: str) -> bytearray:
    """Return header `head` and the expanded LZ4 block; FormatError if it is damaged."""
    size = int.from_bytes(packed[:4], "little")
    if size > limit:
        raise _size_error(where, size, limit)
    out = bytearray(head)
    try:
        _append_lz4_block(packed[4:], out, len(head) + size)
    except IndexError:
        raise FormatError(
            f"{where}: its LZ4 block is cut or damaged: {len(out) - len(head)} bytes came out, "
            f"{size} are declared"
        ) from None
    if len(out) != len(head) + size:
        raise FormatError(
            f"{where}: its LZ4 block gave {len(out) - len(head)} bytes, {size} are declared"
        )
    return out


def _append_lz4_block(block: memoryview, out: bytearray, end: int) -> None:
    """Append an expanded raw LZ4 block to `out`; IndexError if damaged or beyond `end` bytes."""
    base, at, stop = len(out), 0, len(block)
    while at < stop:
        token = block[at]
        literals, at = _read_lz4_length(block, at + 1, token >> 4)
        if at + literals > stop or len(out) + literals > end:
            raise IndexError
        out += block[at : at + literals]
        at += literals
        if at == stop:  # the last sequence has literals only
            return
        distance = block[at] | block[at + 1] << 8
        length, at = _read_lz4_length(block, at + 2, token & 15)
        length += 4
        if not 0 < distance <= len(out) - base or len(out) + length > end:
            raise IndexError
        while length:  # in pieces, as a whole match would be held three times
            size = min(length, _WINDOW)
            start = len(out) - distance
            pattern = out[start : start + size]  # shorter than the piece where the two overlap
            out += (pattern * -(-size // len(pattern)))[:size]
            length -= size


def _read_lz4_length(block: memoryview, at: int, nibble: int) -> tuple[int, int]:
    """Return (length, offset after it) of a length whose first four bits are `nibble`.

    Further bytes of it begin at offset `at`.
    """
    length = nibble
    if nibble == 15:
        while True:
            more = block[at]
            at += 1
            length += more
            if more != 255:
                break
    return length, at


def _expand_zstd(head: bytes, packed: memoryview, limit: int, where: str) -> bytearray:
    """Return header `head` and the expanded Zstd frame; FormatError if it is damaged.

    UnsupportedError without the package that expands Zstd, or beyond `limit` bytes.
    """
    try:
        import zstandard
    except ImportError as error:
        raise UnsupportedError(
            f"{where}: is compressed with Zstd, which needs a package that is not installed: "
            f"{install_command('zstd')}"
        ) from error
    out = bytearray(head)
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW).stream_reader(packed)
        while piece := reader.read(_WINDOW):
            out += piece
            if len(out) - len(head) > limit:
                raise _size_error(where, len(out) - len(head), limit)
        missing = _zstd_end(packed) - len(packed)
    except (zstandard.ZstdError, IndexError) as error:
        raise FormatError(f"{where}: its Zstd frame is damaged: {error}") from error
    if missing > 0:
        raise FormatError(
            f"{where}: its Zstd frame is cut: {missing} bytes are missing at its end, where the "
            "last block or its checksum is"
        )
    return out


def _zstd_end(packed: memoryview) -> int:
    """Return the offset at which the last Zstd frame ends; IndexError if a block has no header.

    The decoder takes a frame without its checksum for one that goes on. Layout: RFC 8878.
    """
    import zstandard

    at = 0
    while at < len(packed):
        start = bytes(packed[at : at + 18])
        if int.from_bytes(start[:4], "little") & ~15 == _SKIPPABLE:
            at += 8 + int.from_bytes(start[4:8], "little")
            continue
        at += zstandard.frame_header_size(start)
        last = False
        while not last:
            block = packed[at] | packed[at + 1] << 8 | packed[at + 2] << 16
            last = bool(block & 1)
            at += 3 + (1 if block >> 1 & 3 == _RUN_OF_ONE else block >> 3)
        at += 4 * zstandard.get_frame_parameters(start).has_checksum
    return at


_EXPANDERS: tuple[tuple[str, Callable[[bytes, memoryview, int, str], bytearray]], ...] = (
    ("LZ4_COMPRESSED", _expand_lz4),
    ("ZSTD_COMPRESSED", _expand_zstd),
)
