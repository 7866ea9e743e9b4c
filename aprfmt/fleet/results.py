"""The results file of a scan: JSON lines while it runs, Parquet at the end if asked for.

What is in the file is not asked again. The last row of a model and question counts; a line that was
cut off by a kill is dropped.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from aprfmt.base.installation import install_command
from aprfmt.base.version import __version__
from aprfmt.errors import FormatError, OutputError, UsageError
from aprfmt.fleet.answer_lines import AnswerLine, encode_answer
from aprfmt.fleet.model_search import FleetModel
from aprfmt.fleet.tasks import ERROR, OPEN, SCHEMA, Row

LINES, PARQUET = ".jsonl", ".parquet"


def row_key(row: Row) -> int:
    """Return a 64-bit hash of a row's model, question and base.

    It is a hash to save memory, since there may be millions of rows.
    """
    return _hash_key(row["identity"], row["check"], row.get("base_identity", ""))


def _hash_key(identity: str, check: str, base: str) -> int:
    """Return a 64-bit hash of a model's identity, a question's name, and a base model's identity.

    `base` is "" for a question about one model.
    """
    text = f"{identity} {check} {base}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class Results:
    """A results file, open for more rows; a context manager.

    `path` ends in .parquet, or is taken as JSON lines. Rows of another version of aprfmt, and those
    with an ERROR, are not counted as done: they are asked again. `seen` is called with every row
    that is there. Raises FormatError for a file that holds something else, OutputError where it
    cannot be written.
    """

    def __init__(self, path: Path, seen: Callable[[Row], None]) -> None:
        """Open the results file for more rows, and read those that are there.

        A finished Parquet file is first written as JSON lines. What follows the last whole line is
        cut off. Raises OutputError where the file cannot be opened for writing.
        """
        self.path = path
        self._seen = seen
        self.lines = path.with_name(path.name + ".part") if path.suffix == PARQUET else path
        self.done: set[int] = set()
        self.places: dict[str, tuple[str, ...]] = {}
        if self.lines != path and path.is_file() and not self.lines.is_file():
            _write_lines(self.lines, read_parquet(path))
        end = self._read_existing()
        try:
            self._file: IO[bytes] = self.lines.open("ab")
            self._file.truncate(end)
        except OSError as error:
            raise OutputError(f"{self.lines}: {error.strerror}; choose another -o") from None

    def _read_existing(self) -> int:
        """Record the rows that are done, and return the offset where the last whole line ends.

        0 if there is no file yet. The callback `seen` gets every row. FormatError for a row with
        another schema.
        """
        end = 0
        if not self.lines.is_file():
            return end
        for number, (row, at) in enumerate(read_lines(self.lines), 1):
            if row.get("schema") != SCHEMA:
                raise FormatError(
                    f"{self.lines}: line {number}: no row of a scan; expected schema {SCHEMA}; "
                    "name another file with -o"
                )
            end = at
            self._seen(row)
            if row["version"] != __version__ or row["outcome"] == ERROR:
                self.done.discard(row_key(row))
                continue
            self.done.add(row_key(row))
            if row["check"] == OPEN:
                self.places[row["identity"]] = tuple(row["places"])
        return end

    def wanted(
        self, subject: FleetModel, names: Iterable[str], base: FleetModel | None = None
    ) -> list[str]:
        """Return those questions `names` of a model that have no answer in the file.

        `open` is asked again where the model has been found under other paths since. `base` is the
        second model of a question about two.
        """
        other = "" if base is None else base.identity
        return [
            name
            for name in names
            if _hash_key(subject.identity, name, other) not in self.done
            or (name == OPEN and self.places.get(subject.identity) != subject.places)
        ]

    def add(self, answer: AnswerLine) -> None:
        """Write an answer; it is in the file when this returns."""
        self._file.write(answer.line)
        self._file.flush()

    def finish(self) -> None:
        """Close the file, and write the Parquet file where one is asked for."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self.lines != self.path:
            _write_parquet(self.path, latest_rows(self.lines))
            self.lines.unlink()

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[tuple[Row, int]]:
    """Yield (row, byte where its line ends) of a file of JSON lines.

    A last line without its end was cut off and is left out. Raises FormatError for a line that is
    no object.
    """
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            at += len(line)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise FormatError(
                    f"{path}: line {number}: no JSON object; expected the rows of a scan; "
                    "name another file with -o"
                )
            yield row, at


def latest_rows(path: Path) -> Iterator[Row]:
    """Yield the last row of each model, question and base in a file, in the file's order."""
    last: dict[int, int] = {}
    for number, (row, _) in enumerate(read_lines(path)):
        last[row_key(row)] = number
    keep = set(last.values())
    yield from (row for number, (row, _) in enumerate(read_lines(path)) if number in keep)


# --- Parquet ----------------------------------------------------------------------------------

BATCH = 1000  # rows written and read together
COLUMNS = (
    "schema", "identity", "model", "bytes", "check", "outcome", "found", "findings", "details",
    "seconds", "version", "base", "base_identity", "places",
)  # fmt: skip
_NESTED = ("findings", "details", "places")  # columns that hold JSON


def _import_pyarrow() -> Any:
    """Return the module pyarrow; OutputError where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise OutputError(
            f"Parquet needs pyarrow, which is not installed; {install_command('fleet')}, or name "
            "a .jsonl file"
        ) from None
    return pyarrow


def check_results_path(path: Path) -> None:
    """Raise UsageError for a results file of another extension than .jsonl and .parquet.

    Raises OutputError if a Parquet file is asked for and pyarrow is not installed.
    """
    if path.suffix not in (LINES, PARQUET):
        raise UsageError(
            f"{path}: rows are written as JSON lines ({LINES}) or as {PARQUET}; "
            f"give -o {path.with_suffix(LINES)}"
        )
    if path.suffix == PARQUET:
        _import_pyarrow()


def _write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as a Parquet table; nested columns are JSON texts. The file is whole or absent."""
    arrow = _import_pyarrow()
    kinds = {"bytes": arrow.int64(), "seconds": arrow.float64()}
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in COLUMNS])
    new = path.with_name(path.name + ".new")
    waiting = iter(rows)
    with arrow.parquet.ParquetWriter(new, schema) as writer:
        while some := list(islice(waiting, BATCH)):
            plain = [
                row | {name: json.dumps(row[name]) for name in _NESTED if name in row}
                for row in some
            ]
            writer.write_table(arrow.Table.from_pylist(plain, schema))
    os.replace(new, path)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a results file, Parquet or JSON lines; FormatError for another file."""
    if path.suffix == PARQUET:
        yield from read_parquet(path)
    else:
        yield from (row for row, _ in read_lines(path))


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a scan's Parquet file; FormatError for a file that is not one."""
    arrow = _import_pyarrow()
    try:
        file = arrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(BATCH):
            for row in batch.to_pylist():
                found = {name: value for name, value in row.items() if value is not None}
                yield found | {name: json.loads(row[name]) for name in _NESTED if row.get(name)}
    except (arrow.ArrowException, ValueError) as error:
        raise FormatError(f"{path}: no Parquet file of a scan: {error}") from None


def _write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines."""
    with path.open("wb") as file:
        for row in rows:
            file.write(encode_answer(row).line)
