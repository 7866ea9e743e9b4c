"""Ways to damage one tensor of a good file, by hand: APR, GGUF, safetensors."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

# What is done to the entry of a tensor. `shape` makes it disagree with its size or its neighbour,
# `giant` asks for more than any array can have, `overlap` puts it on another one's bytes.
KINDS = ("shape", "giant", "encoding", "offset", "overlap")
GIANT = 1 << 44


def apr(data: bytes, name: str, kind: str, other: str) -> bytes:
    """Damage an index entry: u16 length, name, u8 code, u8 ndim, u64 dims, offset and size."""
    raw = bytearray(data)

    def tail(key: str) -> tuple[int, int]:
        encoded = key.encode()
        at = raw.index(struct.pack("<H", len(encoded)) + encoded) + 2 + len(encoded)
        return at, at + 2 + 8 * raw[at + 1]

    code, extent = tail(name)
    if kind in ("shape", "giant"):
        (first,) = struct.unpack_from("<Q", raw, code + 2)
        struct.pack_into("<Q", raw, code + 2, GIANT if kind == "giant" else first - 1)
    elif kind == "encoding":
        raw[code] = 99
    elif kind == "offset":
        struct.pack_into("<Q", raw, extent, 1 << 40)
    else:
        raw[extent : extent + 8] = raw[tail(other)[1] : tail(other)[1] + 8]
    return bytes(raw)


def gguf(data: bytes, name: str, kind: str, other: str) -> bytes:
    """Damage a line of the table: string name, u32 ndim, u64 dims, u32 type, u64 offset."""
    raw = bytearray(data)

    def tail(key: str) -> tuple[int, int]:
        encoded = key.encode()
        at = raw.index(struct.pack("<Q", len(encoded)) + encoded) + 8 + len(encoded)
        return at, at + 4 + 8 * int.from_bytes(raw[at : at + 4], "little")

    _, kinds = tail(name)
    if kind in ("shape", "giant"):
        (last,) = struct.unpack_from("<Q", raw, kinds - 8)
        struct.pack_into("<Q", raw, kinds - 8, GIANT if kind == "giant" else last * 2)
    elif kind == "encoding":
        struct.pack_into("<i", raw, kinds, -7)
    elif kind == "offset":
        struct.pack_into("<Q", raw, kinds + 4, 1 << 40)
    else:
        at = tail(other)[1] + 4
        raw[kinds + 4 : kinds + 12] = raw[at : at + 8]
    return bytes(raw)


def safetensors(data: bytes, name: str, kind: str, other: str) -> bytes:
    """Damage an entry of the JSON header, which keeps its length."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header[name]
    begin, end = entry["data_offsets"]
    if kind in ("shape", "giant"):
        entry["shape"][0] = GIANT if kind == "giant" else entry["shape"][0] - 1
    elif kind == "encoding":
        entry["dtype"] = "F7"
    elif kind == "offset":
        entry["data_offsets"] = [(1 << 40) + begin, (1 << 40) + end]
    else:
        start = header[other]["data_offsets"][0]
        entry["data_offsets"] = [start, start + end - begin]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (length - len(text))
    if len(text) > length:  # a longer number: the data move, the offsets count from there
        text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


DAMAGE: Mapping[str, Callable[[bytes, str, str, str], bytes]] = {
    "apr": apr, "gguf": gguf, "safetensors": safetensors,
}  # fmt: skip


def cut(path: Path, share: float) -> None:
    """Let a file end early."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
