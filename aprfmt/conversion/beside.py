"""Sizes of a conversion's files before it runs, and text files beside a single weights file."""

from collections.abc import Callable, Mapping
from pathlib import Path

from aprfmt.base.protocols import Sink
from aprfmt.errors import AprfmtError, OutputError
from aprfmt.formats import FORMATS
from aprfmt.formats.atomic import FileSet, OutputFile
from aprfmt.model.hf_folder import read_text


class _Blank(OutputFile):
    """A file that keeps nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Let the bytes go."""


class NullFileSet(FileSet):
    """A set of files that writes nothing: for a sink that is only planned."""

    def create(self, path: Path) -> OutputFile:
        """Return a file that is nowhere."""
        return _Blank(path, path, path)


def planned_sizes(
    open_sink: Callable[[FileSet], Sink], plan: Callable[[Sink], None], texts: Mapping[Path, bytes]
) -> dict[Path, int]:
    """Return the bytes of every file a conversion would write; nothing is written.

    `open_sink` opens the target's sink into a set of files, `plan` plans it.
    """
    sink = open_sink(NullFileSet())
    plan(sink)
    return {**sink.sizes, **{path: len(text) for path, text in texts.items()}}


def texts_to_write(
    weights: Path, folder: Path | None, texts: Mapping[str, str], force: bool
) -> dict[Path, str]:
    """Return the texts to write beside the weights, by path; those that exist already are left out.

    Beside a single file (`folder` is None) there may be another model's config.json. It is replaced
    only with `force` together with the weights it belongs to, and never if the folder has other
    weights. Raises OutputError.
    """
    found = {weights.parent / name: text for name, text in texts.items()}
    if folder is not None:
        return found
    found = {path: text for path, text in found.items() if not _same(path, text)}
    taken = [path for path in found if path.exists()]
    others = _other_weights(weights) if taken else []
    if taken and (others or not force or not weights.exists()):
        whose = f"that of {others[0].name}" if others else "of another model"
        raise OutputError(
            f"{taken[0]}: is there already and says something else ({whose}?); give "
            f"{weights.name} a folder of its own"
        )
    return found


def _same(path: Path, text: str) -> bool:
    try:
        return path.is_file() and read_text(path) == text
    except AprfmtError:
        return False


def _other_weights(weights: Path) -> list[Path]:
    """Return other model files of the folder, to which its config.json may belong."""
    extensions = {extension for name in FORMATS.own for extension in FORMATS[name].extensions}
    return [
        path
        for path in sorted(weights.parent.iterdir())
        if path.suffix in extensions
        and path.name != weights.name
        and not path.name.startswith(f"{weights.stem}-")  # shards of `weights` itself
    ]
