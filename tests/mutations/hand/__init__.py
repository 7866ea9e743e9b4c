"""The mutations written by hand, in one table of several files."""

from tests.mutations.mutation import Row

ROWS: tuple[Row, ...] = ()
