"""Rows of a result as an Arrow table or a pandas data frame, where the library is installed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.errors import BackendUnavailableError

Row = Mapping[str, Any]


class Tabular:
    """A result that has rows: what `to_arrow` and `to_pandas` give.

    A class of results defines `table_rows`. A value of a row is a scalar, None, or a list of
    scalars. Anything nested deeper becomes JSON text, so that all rows of a column are of one type.
    """

    __slots__ = ()

    def table_rows(self) -> Sequence[Row]:
        """Return the rows, as dicts of one set of keys or fewer."""
        raise NotImplementedError

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` of the rows; BackendUnavailableError without pyarrow."""
        try:
            import pyarrow
        except ImportError:
            raise BackendUnavailableError(
                "to_arrow needs pyarrow, which is not installed; python -m pip install pyarrow"
            ) from None
        return pyarrow.table(columns_of(self.table_rows()))

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` of the rows; BackendUnavailableError without pandas."""
        try:
            import pandas
        except ImportError:
            raise BackendUnavailableError(
                "to_pandas needs pandas, which is not installed; python -m pip install pandas"
            ) from None
        return pandas.DataFrame(columns_of(self.table_rows()))


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the columns of rows by key, None where a row lacks the key."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [_cell(row.get(key)) for row in rows] for key in keys}


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        nested = any(isinstance(each, Mapping | list | tuple) for each in value)
        return json.dumps(value) if nested else list(value)
    return value
