"""Every way a set of files is published, as scenarios for the fault and kill suites.

Version `v` of a scenario has known names and bytes, so that after any accident `version_of` can say
which version a folder holds, or fail because it holds a mixture.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from aprfmt.formats import atomic
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.temporary_files import SUFFIX

# System calls that publishing makes; a fault or a kill may come at each of them.
CALLS = (
    "open", "write", "pwrite", "fsync", "fchmod", "close", "mkdir", "chmod", "link", "replace",
    "rename", "unlink", "rmdir",
)  # fmt: skip
BYSTANDER = "notes.txt"  # another program's file, in the parent or in the folder of shards


@dataclass(frozen=True)
class Scenario:
    """`folder`: a folder is the output; `names(v)`: files of version v; `seams`: what is off."""

    name: str
    names: Callable[[int], tuple[str, ...]]
    folder: bool = False
    seams: tuple[tuple[str, Callable[..., object]], ...] = ()

    def target(self, root: Path) -> Path:
        """Return the folder that holds the files."""
        return root / "model-hf" if self.folder else root

    def write(self, root: Path, version: int) -> None:
        """Write a version over whatever is there."""
        target = self.target(root)
        folder = target if self.folder else None
        with (
            self.seamed(),
            FileSet(force=True, folder=folder, ours=lambda name: name.startswith("m")) as files,
        ):
            for name in self.names(version):
                out = files.create(target / name)
                content = content_of(name, version)
                out.write(content[:10])
                out.write(content[10:])

    @contextmanager
    def seamed(self) -> Iterator[None]:
        """Switch off the system features that this scenario does not use."""
        patches = [mock.patch.object(atomic, name, value) for name, value in self.seams]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def version_of(self, root: Path) -> int:
        """Return the version that lies in `root`; AssertionError for a mixture or a torn file."""
        assert (root / BYSTANDER).read_bytes() == b"mine"
        target = self.target(root)
        found = {p.name: p.read_bytes() for p in target.iterdir() if p.name.startswith("m")}
        match = re.match(rb"v(\d+) ", next(iter(found.values())))
        assert match is not None
        version = int(match[1])
        assert found == {name: content_of(name, version) for name in self.names(version)}
        return version

    def litter(self, root: Path) -> list[str]:
        """Return every hidden name that a run left behind."""
        folders = {root, self.target(root)}
        names = [p.name for folder in folders if folder.is_dir() for p in folder.iterdir()]
        return [name for name in names if name.startswith(".") or name.endswith(SUFFIX)]

    def prepare(self, root: Path) -> None:
        """Put version 1 and another program's file into `root`."""
        root.mkdir()
        (root / BYSTANDER).write_bytes(b"mine")
        self.write(root, 1)


def content_of(name: str, version: int) -> bytes:
    """Return what `name` holds in `version`: small, buffered or large enough to go straight out."""
    size = (30, 300_000, 70_000)[(len(name) + version) % 3]
    return (f"v{version} {name} ".encode() * (size // 8))[:size]


def _shards(version: int) -> tuple[str, ...]:
    return tuple(f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3))


def _folder(version: int) -> tuple[str, ...]:
    """Return one file in common and others that come and go."""
    return ("m.json", *(f"m{version % 2}-{i}" for i in range(2 + version % 2)))


def _no_exchange(a: Path, b: Path) -> bool:
    return False


def _stays(folder: Path) -> bool:
    return True


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("single", lambda version: ("m.apr",)),
        Scenario("shards", _shards),
        Scenario("swap", _folder, folder=True),
        Scenario("journal", _folder, folder=True, seams=(("swap_names", _no_exchange),)),
        Scenario("inside", _folder, folder=True, seams=(("_is_unswappable", _stays),)),
    )
}
