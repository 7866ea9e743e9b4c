"""Blocks of several rows that stand interleaved, as an engine lays them out when it loads a model.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

CPU kernels multiply several rows at once, so engines *repack*: block j of R rows, then block j + 1
of them. Either whole blocks follow each other, or the R scales come first and then the codes, some
bytes of each row in turn (llama.cpp's `block_q4_0x8` and its kin,
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-cpu/repack.cpp). A file that keeps
the type's name has rows that mix R rows' values. Every such layout is undone on the stored bytes,
and the result has to be the other side: no number is free.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.block_order import few_rows, rows_agree
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.causes.tensor.stored_bytes import STORED
from aprfmt.codecs import CODECS
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors.runs import RunBytes

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "repacked_rows", "tensor", "bug",
        "Blocks of several rows stand interleaved, as an engine packs them when it loads a model: "
        "the layout of a run was written to the file.",
        "A tensor in blocks relates to nothing under its name, while its blocks are the right "
        "ones.",
        "The rows, taken apart again, give the other side.",
    ),
)  # fmt: skip

TOGETHER = (4, 8, 16, 2, 32)  # rows that kernels multiply at once
IN_TURN = (4, 8)  # bytes of codes of each row in turn
SIGNED_NIBBLES = 0x88  # turns two codes with an offset of 8 into signed ones


class RowLayout(NamedTuple):
    """How the blocks of `rows` rows stand: whole, or `bytes` of the codes of each row in turn.

    `bytes` is 0 for whole blocks. `mask` is what each byte of codes was combined with (exclusive
    or).
    """

    rows: int
    bytes: int = 0
    mask: int = 0

    @property
    def words(self) -> str:
        """What stands where, in words."""
        if not self.bytes:
            return f"the blocks of {self.rows} rows stand in turn: block j of each, then block j+1"
        signs = ", as signed numbers" if self.mask else ""
        return (
            f"of the blocks of {self.rows} rows the scales come first, then {self.bytes} bytes of "
            f"each row's codes in turn{signs}"
        )


class StoredBlocks:
    """The stored blocks of a tensor of rows, which can be read in other layouts."""

    def __init__(self, reader: RowReader) -> None:
        """Take the blocks of the tensor that `reader` reads; nothing is read yet."""
        self.reader = reader
        self.size = encoding_row(reader.encoding).type_size
        assert reader.row_bytes is not None
        self.row_bytes = reader.row_bytes
        self.matrix_rows = reader.shape[-2]

    @cached_property
    def raw(self) -> "Array":
        """All blocks in the order of the file, uint8 [rows, blocks of a row, bytes]."""
        data = RunBytes.of_tensor(self.reader.side.stored[0])
        held = np.frombuffer(data.window(0, len(data)), np.uint8)
        return held.reshape(-1, self.row_bytes // self.size, self.size)

    @cached_property
    def sources(self) -> "Array":
        """The stored row of every logical row, int64 [rows]; empty where rows are not whole."""
        side = self.reader.side
        count = self.reader.rows
        if side.whole is not None:
            return np.arange(count)
        shape = (*side.stored[0].info.shape[:-1], 1)
        numbers = np.broadcast_to(np.arange(count).reshape(shape), side.stored[0].info.shape)
        found: Array = side.undo_layout([numbers.copy()]).reshape(count, -1)
        return found[:, 0] if (found == found[:, :1]).all() else np.zeros(0, np.int64)

    def layouts(self) -> Iterator[RowLayout]:
        """Yield every layout that is tried, those of whole blocks first."""
        blocks = self.row_bytes // self.size
        counts = [n for n in (*TOGETHER, self.matrix_rows) if self.matrix_rows % n == 0]
        for rows in dict.fromkeys(counts):
            if rows > 1 and blocks > 1:
                yield RowLayout(rows)
        first = self._scale_bytes
        for rows in TOGETHER if first else ():
            for many in IN_TURN:
                if self.matrix_rows % rows == 0 and (self.size - first) % many == 0:
                    yield from (RowLayout(rows, many, mask) for mask in (0, SIGNED_NIBBLES))

    @cached_property
    def _scale_bytes(self) -> int:
        """The bytes of a block before its codes, where it has one scale and then codes; else 0."""
        codec = CODECS.get(self.reader.encoding)
        fields = None if codec is None or codec.layout is None else codec.layout.fields
        if not fields or len(fields) != 2:
            return 0
        first, codes = sorted(fields.values(), key=lambda field: field[1])
        at = codes[1]
        whole = at + codes[0].itemsize == self.size and first[0].itemsize == at
        return at if whole else 0

    def read(self, layout: RowLayout, rows: "Array") -> "Array":
        """Return logical rows by number, decoded with the layout undone, [n, columns]."""
        numbers = self.sources[np.asarray(rows, np.int64)]
        many, blocks = layout.rows, self.raw.shape[1]
        if not layout.bytes:
            inside = np.arange(blocks) * many + (numbers % many)[:, None]
            places = (numbers // many * many * blocks)[:, None] + inside
            found = self.raw.reshape(-1, self.size)[places]
            return self.reader.decode_rows(found.reshape(len(numbers), self.row_bytes))
        groups, back = np.unique(numbers // many, return_inverse=True)
        held = self.raw.reshape(-1, blocks, many * self.size)[groups]
        first = self._scale_bytes
        codes = held[..., many * first :].reshape(len(groups), blocks, -1, many, layout.bytes)
        codes = codes.swapaxes(2, 3).reshape(len(groups), blocks, many, -1) ^ layout.mask
        scales = held[..., : many * first].reshape(len(groups), blocks, many, first)
        apart = np.concatenate([scales, codes], axis=-1).swapaxes(1, 2)[back, numbers % many]
        return self.reader.decode_rows(apart.astype(np.uint8).reshape(len(numbers), self.row_bytes))


def guess_repacked_rows(case: DifferingPair) -> Iterator[Guess]:
    """Yield the first guess that fits: the rows of a side's blocks stand interleaved."""
    if case.numbers is not None or case.a.shape != case.b.shape or len(case.a.shape) < 2:
        return
    few = few_rows(case.differing_sample)
    sides = {"B": _blocks_of(case.b), "A": _blocks_of(case.a)}
    for name, other in (("B", case.a), ("A", case.b)):
        stored, theirs = sides[name], sides["AB"[name == "A"]]
        for layout in () if stored is None else stored.layouts():
            assert stored is not None
            if not rows_agree(other.take(few), stored.read(layout, few), case.slack()):
                continue
            says = (f"{name}'s rows are repacked: {layout.words}", stored.reader.encoding)
            found = case.guess("repacked_rows", says, name, partial(stored.read, layout))
            if theirs is not None and other.encoding == stored.reader.encoding:
                # Some layouts undo themselves: the files do not say which side has it.
                here = stored.reader.take(few)
                alike = rows_agree(here, theirs.read(layout, few), case.slack())
                found = replace(found, either=alike)
            yield found
            return


def _blocks_of(reader: RowReader) -> StoredBlocks | None:
    """Return the stored blocks of a tensor; None for other types, and for parts of a tensor."""
    side, row = reader.side, encoding_row(reader.encoding)
    if row.block_size == 1 or row.row_header or not reader.decodes_rows or len(side.stored) != 1:
        return None
    if len(reader.bytes) > STORED or side.stored[0].info.nbytes != len(reader.bytes):
        return None
    found = StoredBlocks(reader)
    return found if len(found.sources) else None


HYPOTHESES = (
    PairHypothesis(
        ("repacked_rows",),
        guess_repacked_rows,
        101,
        "whole blocks at other places, after other orders of the bytes in a block",
        facts=("blocks",),
    ),
)
