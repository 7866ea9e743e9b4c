"""Models in several files: checks of the file names in an index, and of half-written sets."""

import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from aprfmt.base.protocols import LazyTensor
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, RemoteError
from aprfmt.remote.paths import map_paths

MAX_INDEX = 128 << 20  # bytes of an index or manifest: a million tensors with long names

# Names that are devices on Windows, whatever their extension.
_DEVICES = frozenset(
    ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"]
    + [f"{kind}{number}" for kind in ("COM", "LPT") for number in "0123456789¹²³"]
)
_MAX_NAME = 255  # bytes of one component, the usual limit of file systems


def member_path(folder: Path, name: object, where: str) -> Path:
    """Return the path of a file that an index names; FormatError if the name is not allowed.

    Allowed is a plain name, or one in a real subfolder; no `..`, no absolute path, drive, device
    name, backslash or control character. The file itself may be a link to a regular file, as in
    the hub's cache: opening checks that.
    """
    why = _name_fault(name)
    if why is None:
        assert isinstance(name, str)
        path = folder / name
        if path.parent != folder and path.parent.is_symlink():
            why = "its folder is a link"
        else:
            return path
    shown = shorten(name, 80) if isinstance(name, str) else name
    raise FormatError(
        f"{where}: names {shown!r} as a file of the model: {why}; "
        "expected a plain file name beside the index"
    )


def _name_fault(name: object) -> str | None:
    """Return why a file name in an index is not allowed; None if it is."""
    if not isinstance(name, str):
        return f"that is {type(name).__name__}, not a string"
    try:
        components = [part.encode("utf-8") for part in name.split("/")]
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair"
    if any(ord(char) < 32 or ord(char) == 127 or char in "\\:" for char in name):
        return "it holds a backslash, a colon or a control character"
    if len(components) > 2:
        return "it leads beyond one subfolder"
    if any(part in (b"", b".", b"..") for part in components):
        return "it is not a plain path"
    if any(len(part) > _MAX_NAME for part in components):
        return f"a part of it is longer than {_MAX_NAME} bytes"
    if any(_device_stem(part) in _DEVICES or part[-1] in ". " for part in name.split("/")):
        return "it is a device name, or ends in a dot or a space"
    return None


def _device_stem(component: str) -> str:
    """Return a file name's part before the first dot, upper case, as Windows compares devices."""
    return component.partition(".")[0].rstrip().upper()


def require_files(paths: Iterable[Path], where: str) -> None:
    """Raise FormatError for the first of `paths` that is missing or not a regular file."""

    def read_mode(path: Path) -> int:
        """Return the mode bits of a file; FormatError if it is missing."""
        try:
            return path.stat().st_mode
        except RemoteError:
            raise
        except OSError as error:
            raise FormatError(
                f"{where}: {path.name} cannot be opened: {error.strerror}; "
                "get the missing file of the set"
            ) from None

    every = list(paths)
    for path, found in zip(every, map_paths(every, read_mode), strict=True):
        if not stat.S_ISREG(found):
            raise FormatError(
                f"{where}: {path.name} is not a regular file (pipe, device or folder)"
            )


def refuse_mixed(path: Path, members: Sequence[Path]) -> None:
    """Raise FormatError for a set that an interrupted run left partly old and partly new.

    `path` is the index, `members` the set's files.
    """
    from aprfmt.formats.journal import pending_journals

    mixed = set(pending_journals(path.parent)).intersection([path, *members])
    if mixed:
        raise FormatError(
            f"{path}: {', '.join(sorted(found.name for found in mixed))} belongs to a set of files "
            "whose writing was interrupted, so old and new files are mixed; write into this "
            "folder again as the same user, which completes it first, or says why it cannot"
        )


def join_tensors(
    shards: Iterable[tuple[Path, Mapping[str, LazyTensor]]], where: str
) -> dict[str, LazyTensor]:
    """Return {name: tensor} of all shards in order; FormatError for a name in two shards."""
    tensors: dict[str, LazyTensor] = {}
    homes: dict[str, Path] = {}
    for path, held in shards:
        for name, tensor in held.items():
            if name in tensors:
                raise FormatError(
                    f"{where}: tensor {name!r} stands in {homes[name].name} and in {path.name}; "
                    "names must be unique over the set"
                )
            tensors[name] = tensor
            homes[name] = path
    return tensors
