"""Outputs that lie in memory: sinks write here, so that fuzzing copies files without a disk."""

from pathlib import Path
from typing import cast

from aprfmt.formats.atomic import FileSet


class MemoryFile:
    """The methods of an output file that a sink uses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += memoryview(data).tobytes()

    def patch(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    def tell(self) -> int:
        return len(self.data)

    def close(self) -> None:
        """Keep the bytes."""


class MemoryFiles:
    """The methods of a set of files that a sink uses."""

    def __init__(self) -> None:
        self.made: list[MemoryFile] = []

    def create(self, path: Path) -> MemoryFile:
        self.made.append(MemoryFile(path))
        return self.made[-1]

    @property
    def as_set(self) -> FileSet:
        return cast(FileSet, self)

    @property
    def only(self) -> bytes:
        (file,) = self.made
        return bytes(file.data)
