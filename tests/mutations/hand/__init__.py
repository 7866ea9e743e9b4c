"""The mutations written by hand, in one table of several files."""

from tests.mutations.hand import answers, diagnosis, files, gates, ledger, named, native
from tests.mutations.mutation import Row

ROWS: tuple[Row, ...] = (
    *named.ROWS, *native.ROWS, *diagnosis.ROWS, *answers.ROWS, *files.ROWS, *gates.ROWS,
    *ledger.ROWS,
)  # fmt: skip
