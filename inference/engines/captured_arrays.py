"""One file of arrays: what it holds by name, and how one is read."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aprfmt.errors import FormatError
from aprfmt.inference.engines.captures import read_array_file
from aprfmt.inference.engines.stored_arrays import FilePool, StoredArray, StoredBytes
from aprfmt.inference.engines.tiles import Tiles

Numbers = NDArray[Any]
# Files of this many arrays and fewer do not stay open: a dump may have 100,000 of them.
_FEW = 4


@dataclass(frozen=True)
class ArrayFile:
    """Arrays of a file by name, "" for one that has none of its own; its values that are no array.

    `names` maps to (shape, dtype). `lists` are the values that are lists.
    """

    path: Path
    names: Mapping[str, tuple[tuple[int, ...], str]]
    values: Mapping[str, Any]
    _read: Callable[[str], Numbers]
    _stored: Callable[[str], StoredBytes | None]
    _tiles: Callable[[str], Tiles | None]

    @property
    def lists(self) -> dict[str, list[Any]]:
        """Values of the file that are lists, such as the ids of requests."""
        return {name: value for name, value in self.values.items() if isinstance(value, list)}

    def reader(self, name: str) -> Callable[[], Numbers]:
        """Return a function without arguments that reads the file's array `name`."""
        return lambda: self._read(name)

    def stored(self, name: str) -> Callable[[], StoredBytes | None]:
        """Return a function that gives the stored bytes of the array `name`.

        It gives None where they cannot be had undecoded.
        """
        return lambda: self._stored(name)

    def tiles(self, name: str) -> Tiles | None:
        """Return the array `name` as blocks of rows and columns.

        None if it has to be read whole.
        """
        return self._tiles(name)


class ArrayFiles:
    """Opens files of arrays; those with many arrays stay open until the `with` is left."""

    def __init__(self, stack: ExitStack) -> None:
        """Hold the stack that closes files with many arrays."""
        self._stack = stack
        self._pool = FilePool(stack)

    def open(self, path: Path) -> ArrayFile:
        """Return the arrays and values of a file, unread; FormatError for one that is damaged.

        A file of more than _FEW arrays stays open until the stack closes it. Of a smaller file only
        the offsets of arrays are noted whose bytes are stored unchanged; the file is opened again
        for each read of any other array.
        """
        with ExitStack() as own:
            held = read_array_file(path, own)
            names = {name: (held.shapes[name], held.dtypes[name]) for name in held.shapes}
            if len(names) > _FEW:
                self._stack.enter_context(own.pop_all())
                return ArrayFile(path, names, held.values, held.read, held.stored, held.tiles)
            forms = {name: one.form for name in names if (one := held.stored(name)) is not None}
            placed: dict[str, StoredArray] = {
                name: self._pool.array(region, f"{path}: {name}" if name else str(path))
                for name in names
                if (region := held.region(name)) is not None
            }

        def tiles(name: str) -> Tiles | None:
            """Return an array of the file by its name, as blocks of rows and columns.

            None where it has to be read as a whole.
            """
            return placed[name].tiles() if name in placed else None

        if held.opens:
            return ArrayFile(path, names, held.values, held.read, held.stored, tiles)

        def read(name: str) -> Numbers:
            """Return the values of the file's array of this name.

            The file is opened again if need be.
            """
            if name in placed:
                return placed[name].read()
            with ExitStack() as again:
                return read_array_file(path, again).read(name)

        def stored(name: str) -> StoredBytes | None:
            """Return an array's stored bytes by its name; None if they cannot be had undecoded.

            The file is open only while its windows are read.
            """
            if name in placed:
                return placed[name].stored()

            def windows() -> Generator[memoryview, None, None]:
                """Yield the array's stored bytes from the file, opened again.

                Raises FormatError if the file has the array in another encoding than at first.
                """
                with ExitStack() as again:
                    now = read_array_file(path, again).stored(name)
                    if now is None or now.form != forms[name]:
                        raise FormatError(f"{path}: changed while it was read; start again")
                    yield from now.windows()

            return StoredBytes(forms[name], windows) if name in forms else None

        return ArrayFile(path, names, held.values, read, stored, tiles)
