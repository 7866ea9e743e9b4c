"""GGUF files made byte by byte, without the code under test."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
LETTERS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
    U64: "Q", I64: "q", F64: "d",
}  # fmt: skip
GGML = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "I8": 24, "I64": 27}


@dataclass
class File:
    """A GGUF file in parts; every count, size and offset can be given a wrong value."""

    order: str = "<"
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = 32
    keys: list[bytes] = field(default_factory=list)
    table: list[bytes] = field(default_factory=list)
    data: bytes = b""
    padded: bool = True

    def pack(self, letters: str, *values: int | float) -> bytes:
        """Pack numbers in the file's byte order."""
        return struct.pack(self.order + letters, *values)

    def text(self, raw: str | bytes) -> bytes:
        """Return a string as stored."""
        raw = raw.encode() if isinstance(raw, str) else raw
        return self.pack("Q", len(raw)) + raw

    def key(self, name: str | bytes, kind: int, *values: int | float | str | bytes) -> "File":
        """Add a key with a number, bool or string."""
        if kind == STR:
            payload = self.text(values[0])  # type: ignore[arg-type]
        else:
            payload = self.pack(LETTERS[kind], *values)  # type: ignore[arg-type]
        return self.raw_key(name, kind, payload)

    def raw_key(self, name: str | bytes, kind: int, payload: bytes) -> "File":
        """Add a key whose value is given as bytes."""
        self.keys.append(self.text(name) + self.pack("I", kind) + payload)
        return self

    def array(self, kind: int, values: Sequence[int | float | str | bytes]) -> bytes:
        """Return an array value: element type, count, elements."""
        head = self.pack("IQ", kind, len(values))
        if kind == STR:
            return head + b"".join(self.text(v) for v in values)  # type: ignore[arg-type]
        if kind == ARR:
            return head + b"".join(values)  # type: ignore[arg-type]
        return head + self.pack(f"{len(values)}{LETTERS[kind]}", *values)  # type: ignore[arg-type]

    def tensor(
        self,
        name: str | bytes,
        dims: Sequence[int],
        kind: int | str = "F32",
        offset: int = 0,
        n_dims: int | None = None,
    ) -> "File":
        """Add a line to the tensor table; `dims` fastest first."""
        kind = GGML[kind] if isinstance(kind, str) else kind
        n_dims = len(dims) if n_dims is None else n_dims
        line = self.text(name) + self.pack("I", n_dims) + self.pack(f"{len(dims)}Q", *dims)
        self.table.append(line + self.pack("IQ", kind & 0xFFFFFFFF, offset))
        return self

    def build(self) -> bytes:
        """Return the file's bytes."""
        n_tensors = len(self.table) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        head = self.magic + self.pack(
            "IQQ", self.version, n_tensors % (1 << 64), n_keys % (1 << 64)
        )
        head += b"".join(self.keys) + b"".join(self.table)
        if self.padded:
            head += bytes(-len(head) % self.alignment)
        return head + self.data


DATA = bytes(range(256)) * 4


def one(**options: int | str | bytes | bool) -> File:
    """Return a good file with one 4x8 F32 tensor, to be made worse."""
    file = File(data=DATA[:128], **options)  # type: ignore[arg-type]
    return file.key("general.architecture", STR, "llama").tensor("a", [8, 4])


def plain(**options: int | str | bytes | bool) -> File:
    """Return a file with a key and no tensors."""
    return File(**options).key("general.architecture", STR, "llama")  # type: ignore[arg-type]


def aligned(value: int, kind: int = U32, **options: int) -> File:
    """Return a good file that states an alignment."""
    return one(alignment=1, **options).key("general.alignment", kind, value)


def two(second: int, dims: Sequence[int] = (8,), data: int = 256, **options: int) -> File:
    """Return a file with tensors of 32 bytes at 0 and at `second`."""
    file = File(data=DATA[:data], **options)  # type: ignore[arg-type]
    return file.tensor("a", [8]).tensor("b", dims, offset=second)
