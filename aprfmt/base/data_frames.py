"""Convert rows of a result to an Arrow table or a pandas data frame, where these are installed."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.errors import BackendUnavailableError

Row = Mapping[str, Any]


class Tabular(ABC):
    """A result that has rows, with the methods `to_arrow` and `to_pandas`.

    A class of results defines `table_rows`. A value of a row is a scalar, None, or a list of
    scalars. Anything nested deeper becomes JSON text, so that all rows of a column are of one type.
    """

    __slots__ = ()

    @abstractmethod
    def table_rows(self) -> Sequence[Row]:
        """Return the rows as dicts; a row may lack keys of others."""

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` of the rows; BackendUnavailableError without pyarrow."""
        try:
            import pyarrow
        except ImportError:
            raise _missing_library("pyarrow", "to_arrow") from None
        return pyarrow.table(columns_of(self.table_rows()))

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` of the rows; BackendUnavailableError without pandas."""
        try:
            import pandas
        except ImportError:
            raise _missing_library("pandas", "to_pandas") from None
        return pandas.DataFrame(columns_of(self.table_rows()))


def _missing_library(name: str, method: str) -> BackendUnavailableError:
    """Return the error that a library which `method` needs is not installed."""
    return BackendUnavailableError(
        f"{method} needs {name}, which is not installed; python -m pip install {name}"
    )


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return {key: values of all rows}, None where a row lacks the key."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [_cell(row.get(key)) for row in rows] for key in keys}


def _cell(value: Any) -> Any:
    """Return a value for a cell: mappings and nested lists become JSON text."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        nested = any(isinstance(each, Mapping | list | tuple) for each in value)
        return json.dumps(value) if nested else list(value)
    return value
