"""Type ids of llama.cpp's forks: which of several meanings of an id a file's bytes have.

An id does not say which program gave it. Where two meanings of one are known, the bytes between
a tensor and the next one decide, and a key of the file where they do not. Where both fail, the
doubt is reported. Missing row headers are found in the same way.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from aprfmt.base.encodings import Encoding, unknown_encoding
from aprfmt.base.fork_types import CONTESTED, TypeClaim, TypeSize
from aprfmt.base.text_escape import shorten
from aprfmt.formats.damage import tensor_label
from aprfmt.formats.gguf.layout import align_size


@dataclass(frozen=True, slots=True)
class TableLine:
    """A line of the tensor table; `offset` counts from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    row: Encoding
    offset: int


@dataclass(frozen=True, slots=True)
class TensorExtents:
    """Where tensors begin and the file ends, which tells the bytes that each tensor can have."""

    starts: Sequence[int]  # sorted, each once
    end: int  # of the data section
    alignment: int

    def bytes_to_next(self, entry: TableLine) -> tuple[int, bool]:
        """Return (bytes from a tensor's start to the next one's, whether it is the last)."""
        after = bisect_right(self.starts, entry.offset)
        last = after == len(self.starts)
        return (self.end if last else self.starts[after]) - entry.offset, last

    def fits(self, entry: TableLine, nbytes: int | None) -> bool:
        """Return whether a tensor of `nbytes`, padded, ends where the next one begins.

        The last one may lack its padding. False for None.
        """
        if nbytes is None:
            return False
        available, last = self.bytes_to_next(entry)
        padded = align_size(nbytes, self.alignment)
        return available == padded or (last and available == nbytes)


def resolve_fork_types(
    entries: Sequence[TableLine], extents: TensorExtents, metadata: Mapping[str, object]
) -> tuple[list[TableLine], dict[int, str]]:
    """Return (table lines with the meaning of disputed type ids decided, {type id: message}).

    `entries` are the lines as read, `extents` the bytes that each tensor can have. llama.cpp and
    its forks use some ids for different encodings. Where the bytes or a key of the file show a
    fork's, the line gets an encoding that is copied, not decoded.
    """
    found, said = list(entries), {}
    for number, claims in CONTESTED.items():
        mine = [e for e in entries if e.row.ggml == number and _count_elements(e)]
        if not mine:
            continue
        # Which meanings of the id do the bytes of all its tensors fit?
        own = mine[0].row
        upstream = own.known and _all_fit(mine, extents, own)
        others = [claim for claim in claims if _all_fit(mine, extents, claim.measure)]
        # A key of the file that names the fork outweighs llama.cpp's own meaning.
        keyed = [
            claim for claim in others if claim.key and metadata.get(claim.key[0]) == claim.key[1]
        ]
        if keyed:
            upstream, others = False, keyed
        names = [entry.name for entry in mine]
        what = (
            f"{count_phrase(names, 'tensor')} of ggml type {number}, first {tensor_label(names[0])}"
        )
        # More bytes than any known meaning takes: the tensors cannot be decoded.
        if not others and own.known and all(_is_longer_than(entry, extents, own) for entry in mine):
            found = _without_codec(found, number)
            said[number] = (
                f"{what}: {extents.bytes_to_next(mine[0])[0]} bytes stand there, which is "
                f"neither {own.name} nor "
                f"{_join_claims(claims)}; copied, not decoded"
            )
        if not others:
            continue
        # Both fit: llama.cpp's meaning is used, and the doubt is reported.
        if upstream:
            said[number] = (
                f"{what}: read as {own.name}; as many bytes would be {_join_claims(others)}, "
                f"and no key "
                "of the file says which"
            )
            continue
        found = _without_codec(found, number)
        instead = f", not {own.name}" if own.known else ""
        by = f"the key {keyed[0].key[0]}" if keyed and keyed[0].key else "the bytes of their rows"
        said[number] = f"{what}: by {by} {_join_claims(others)}{instead}; copied, not decoded"
    return found, said


def _without_codec(entries: Iterable[TableLine], number: int) -> list[TableLine]:
    """Return the lines of the tensor table, with those of one type id given an unknown encoding.

    Tensors of an unknown encoding are copied and not decoded. `number` is the type id.
    """
    return [
        replace(e, row=unknown_encoding(number)) if e.row.ggml == number else e for e in entries
    ]


def _is_longer_than(entry: TableLine, extents: TensorExtents, kind: Encoding) -> bool:
    """Return whether a tensor has more bytes than it would take in encoding `kind`, padded."""
    nbytes = _nbytes_in(entry, kind)
    return nbytes is not None and extents.bytes_to_next(entry)[0] > align_size(
        nbytes, extents.alignment
    )


def _count_elements(entry: TableLine) -> int:
    """Return the number of a tensor's elements."""
    return math.prod(entry.shape)


def _all_fit(
    entries: Iterable[TableLine], extents: TensorExtents, kind: Encoding | TypeSize
) -> bool:
    """Return whether all these tensors have as many bytes as in encoding or fork's type `kind`."""
    return all(extents.fits(entry, _nbytes_in(entry, kind)) for entry in entries)


def _nbytes_in(entry: TableLine, kind: Encoding | TypeSize) -> int | None:
    """Return a tensor's bytes in an encoding; None if its rows are not whole blocks."""
    if isinstance(kind, TypeSize):
        return kind.nbytes(entry.shape)
    columns = entry.shape[-1] if entry.shape else 1
    return None if columns % kind.block_size else kind.nbytes(entry.shape)


def _join_claims(claims: Sequence[TypeClaim]) -> str:
    """Return the names of several meanings of an id, joined by "or"."""
    return " or ".join(map(str, claims))


def undecoded_notes(entries: Iterable[TableLine], extents: TensorExtents) -> Iterator[str]:
    """Yield a message for each type among these entries that has no codec here."""
    strange: dict[Encoding, list[TableLine]] = {}
    for entry in entries:
        if not entry.row.known:
            strange.setdefault(entry.row, []).append(entry)
    for row, mine in strange.items():
        names = [entry.name for entry in mine]
        why = row.removed or "this id is unknown; its bytes can be copied, not decoded"
        if row.measure:
            real = [entry for entry in mine if _count_elements(entry)]
            fits = "" if _all_fit(real, extents, row.measure) else ", which the file does not have"
            why = f"{row.measure}{fits}; copied, not decoded: {why}"
        yield (
            f"{count_phrase(names, 'tensor')} of ggml type {row.ggml} ({row.name}), the first is "
            f"{shorten(names[0], 100)!r}: {why}; sizes are taken from the gap to the next tensor"
        )


def count_phrase(names: Sequence[str], noun: str) -> str:
    """Return "1 tensor is" or "2 tensors are" for a list of names."""
    return f"1 {noun} is" if len(names) == 1 else f"{len(names)} {noun}s are"


def missing_row_header(entry: TableLine, nbytes: int, extents: TensorExtents) -> str:
    """Return what is wrong with a tensor whose row headers are missing, "" if they are there.

    `nbytes` is the size that its encoding asks for, `extents` are the bytes that are there. gguf-py
    knew no row headers before September 2026: tensors that it rewrote lack them.
    """
    header = entry.row.row_header
    columns = entry.shape[-1] if entry.shape else 1
    rows = _count_elements(entry) // max(columns, 1)
    if not header or not extents.fits(entry, nbytes - rows * header) or extents.fits(entry, nbytes):
        return ""
    return (
        f"is {entry.row.name} and needs {nbytes} bytes; {nbytes - rows * header} are there, short "
        f"by exactly the {header} bytes in front of each of its {rows} rows, which gguf-py left "
        "out when it wrote such a file again: its last rows are lost; get the original file"
    )
