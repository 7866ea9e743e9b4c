"""A stored tensor's rows as ghosts, arrays without numbers: only its header is read."""

import math
from dataclasses import dataclass

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.shapes import matrix_shape
from aprfmt.codecs import CODECS
from aprfmt.codecs.bnb4 import Bnb4Codec
from aprfmt.codecs.quant_state import ABSMAX
from aprfmt.inference.dry.ghosts import Ghost, Ledger, Memory
from aprfmt.inference.rows import FREE, StoredRows
from aprfmt.tensors.view import View


@dataclass(frozen=True)
class GhostCoded:
    """The sizes of a bitsandbytes 4-bit weight's parts."""

    packed: int
    absmax: int
    blocksize: int


class GhostRows(StoredRows):
    """A stored tensor that decodes to arrays without numbers, counted as decoding allocates."""

    def __init__(self, tensor: View, account: Ledger) -> None:
        """Take a tensor and the account that its decoding is counted in."""
        super().__init__(tensor)
        self._account = account
        self._mapped = Memory(account, 0)
        self._wide = 8 if "F64" in tensor.encodings else 4

    def numpy(self) -> Ghost:  # type: ignore[override]
        """Return the decoded tensor as a ghost; plain floats are a view of the mapped file."""
        tensor, whole = self._tensor, self._tensor.whole
        if whole is not None and not whole.parts:
            row = encoding_row(self.encoding)
            if row.numpy in FREE and whole.info.nbytes == row.nbytes(self.shape):
                return Ghost(self.shape, self._wide, self._mapped)
        if whole is None and tensor.data is None:  # decoded, then the layout steps undone
            decoded = sum(math.prod(each.info.shape) for each in tensor.stored)
            self._account.count_briefly((decoded + math.prod(self.shape)) * self._wide)
        elif whole is None:  # gathered, then decoded
            self._account.count_briefly(tensor.nbytes + math.prod(self.shape) * self._wide)
        return Ghost.allocate(self._account, self.shape, self._wide)

    def decode_rows(self, start: int, stop: int) -> Ghost:  # type: ignore[override]
        """Return rows [stop - start, columns] as a ghost.

        A tensor that cannot be cut by rows is decoded whole.
        """
        rows, columns = matrix_shape(self.shape)
        if not self.by_rows:
            return self.numpy().reshape(rows, columns)[start:stop]
        return Ghost.allocate(self._account, (stop - start, columns), self._wide)

    def encoded(self, start: int, stop: int) -> Ghost | None:  # type: ignore[override]
        """Return the stored bytes of rows [start, stop) as a ghost, None if rows have no bytes.

        Bytes that lie in one piece are a view of the file; others are counted as copied.
        """
        data, size = self._tensor.data, self._tensor.row_bytes
        if data is None or size is None or len(data) != size * matrix_shape(self.shape)[0]:
            return None
        pieces = sum(1 for _ in data.runs(start * size, stop * size))
        shape = ((stop - start) * size,)
        return (
            Ghost(shape, 1, self._mapped)
            if pieces == 1
            else Ghost.allocate(self._account, shape, 1)
        )

    def coded(self) -> GhostCoded | None:  # type: ignore[override]
        """Return the sizes of a bitsandbytes 4-bit weight's parts; None for any other."""
        whole = self._tensor.whole
        if whole is None or not isinstance(CODECS.get(self.encoding), Bnb4Codec):
            return None
        blocks = math.prod(whole.parts[ABSMAX].info.shape)
        return GhostCoded(whole.info.nbytes, 4 * blocks, math.prod(self.shape) // max(blocks, 1))

    def touch(self) -> None:
        """Do nothing: no bytes are read here."""

    def drop(self) -> None:
        """Do nothing: no bytes are read here."""


class ThroughGhost(GhostRows):
    """A tensor that is encoded as `through` and decoded again when used, always whole."""

    by_rows = False

    def __init__(self, tensor: View, through: str, account: Ledger) -> None:
        """Take a tensor, the encoding its numbers go through, and the account of its memory."""
        super().__init__(tensor, account)
        self.encoding = through
        self.nbytes = 4 * math.prod(tensor.shape)

    def numpy(self) -> Ghost:  # type: ignore[override]
        """Return the decoded tensor as a ghost, and count what encoding and decoding it take.

        That is counted during the call only.
        """
        count = math.prod(self.shape)
        self._account.count_briefly(8 * count + encoding_row(self.encoding).nbytes(self.shape))
        return Ghost.allocate(self._account, self.shape, 4)

    def encoded(self, start: int, stop: int) -> None:
        """Return None: no stored bytes hold these numbers."""

    def coded(self) -> None:
        """Return None: no stored parts hold these numbers."""
