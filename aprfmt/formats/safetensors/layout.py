"""The layout of a safetensors file: a length, a JSON header, data; for reader and writer.

8 bytes little-endian header length N, N bytes of JSON, then the tensors' bytes without a gap.
Layout source: the format section of the safetensors README and the reference's own checks.
"""

from collections.abc import Iterable, Mapping, Sequence

from aprfmt.base.encodings import BY_SAFETENSORS, Encoding, find_encoding
from aprfmt.base.protocols import TensorInfo, Value
from aprfmt.formats.bounded_json import dumps

PREFIX = 8  # bytes of the header's length
ALIGNMENT = 8  # the header is padded with spaces to this
METADATA = "__metadata__"
FIELDS = ("dtype", "shape", "data_offsets")
INDEX_SUFFIX = ".safetensors.index.json"
U64 = 1 << 64  # the reference computes sizes in 64 bits and refuses what does not fit

# The reference's enum of dtypes; the writer sorts by descending position in it, then by name.
DTYPE_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0",
    "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64",
    "I64", "U64",
)  # fmt: skip
_RANKS = {BY_SAFETENSORS[dtype].name: rank for rank, dtype in enumerate(DTYPE_ORDER)}


def element_bits(row: Encoding) -> int:
    """Return the bits of one element of an encoding, always a whole number in this format."""
    return 8 * row.type_size // row.block_size


def can_store(row: Encoding) -> bool:
    """Return whether the format has a dtype for an encoding."""
    return bool(row.safetensors)


def storage_order(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return the tensors in the order the reference writes them: widest dtypes first, then names.

    Encodings that the format lacks are sorted by the dtype their bytes are stored as
    (unsupported_encodings.py).
    """
    from aprfmt.formats.unsupported_encodings import stored_info

    def sort_key(info: TensorInfo) -> tuple[int, bytes]:
        """Return the key that sorts a tensor as the reference does: widest dtype, then name."""
        stored = stored_info(info, can_store)
        return -_RANKS[stored.encoding], stored.name.encode("utf-8", "surrogatepass")

    return sorted(infos, key=sort_key)


def header_bytes(metadata: Mapping[str, str], infos: Sequence[TensorInfo]) -> bytes:
    """Return the length and the padded JSON header of a file with data in the order of `infos`."""
    from aprfmt.formats.unsupported_encodings import stored_info

    header: dict[str, Value] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for info in infos:
        stored = stored_info(info, can_store)
        header[stored.name] = {
            "dtype": find_encoding(stored.encoding).safetensors,
            "shape": list(stored.shape),
            "data_offsets": [at, at + info.nbytes],
        }
        at += info.nbytes
    raw = dumps(header).encode("utf-8")
    raw += b" " * (-len(raw) % ALIGNMENT)
    return len(raw).to_bytes(PREFIX, "little") + raw


def fill_header(head: bytes, size: int) -> bytes:
    """Return the header `head` (length and JSON) made `size` bytes long with spaces at its end."""
    return (size - PREFIX).to_bytes(PREFIX, "little") + head[PREFIX:].ljust(size - PREFIX)


def is_json(head: bytes) -> bool:
    """Return whether a file's first bytes are those of JSON: an index.

    A header's length can begin with b"{", too (123, or 31520 after a space), but in any length that
    a file can have one of the eight bytes is zero, and JSON has no zero bytes.
    """
    return head.lstrip()[:1] == b"{" and b"\0" not in head[:8]
