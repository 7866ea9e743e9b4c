"""Models in several files: checks of the file names in an index, and of half-written sets."""

import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from aprfmt.base.protocols import LazyTensor
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, RemoteError
from aprfmt.formats.unfinished_writes import known_journal_names
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
        "expected a plain file name next to the index"
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
    """Return a file name up to its first dot, in upper case, as Windows compares devices."""
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
    if not known_journal_names(path.parent):
        return

    from aprfmt.formats.journal import pending_journals

    mixed = set(pending_journals(path.parent)).intersection([path, *members])
    if mixed:
        raise FormatError(
            f"{path}: {', '.join(sorted(found.name for found in mixed))} belong to a set of files "
            "whose writing was interrupted, so old and new files are mixed; write into this "
            "folder again as the same user, which completes it first, or says why it cannot"
        )


def join_tensors(
    shards: Iterable[tuple[Path, Mapping[str, LazyTensor]]],
    where: str,
    weight_map: Mapping[str, str] | None = None,
    repeated: list[tuple[str, tuple[str, ...]]] | None = None,
) -> dict[str, LazyTensor]:
    """Return {name: tensor} of all shards in order.

    Raises FormatError for a name in two shards, and says whether the copies differ. With a list
    `repeated`, (that sentence, the names) is appended to the list instead; the copy is then used
    that the index (`weight_map`, name to file) names, else the first.
    """
    assigned = weight_map or {}
    copies: dict[str, list[tuple[Path, LazyTensor]]] = {}
    for path, held in shards:
        for name, tensor in held.items():
            copies.setdefault(name, []).append((path, tensor))
    twice = {name: held for name, held in copies.items() if len(held) > 1}
    if twice:
        says = _repeated_text(twice, assigned)
        if repeated is None:
            raise FormatError(f"{where}: {says}")
        repeated.append((says, tuple(twice)))
    return {
        name: next((t for path, t in held if path.name == assigned.get(name)), held[0][1])
        for name, held in copies.items()
    }


def _repeated_text(
    twice: Mapping[str, Sequence[tuple[Path, LazyTensor]]], assigned: Mapping[str, str]
) -> str:
    """Return in words which tensors are in several shards, which copy is used, what to do.

    `twice` are the (shard, tensor) copies of each, `assigned` the shard that the index names.
    """
    first = next(iter(twice))
    files = " and in ".join(path.name for path, _ in twice[first])
    homes = {assigned[name] for name in twice if name in assigned}
    named = f"; the index names {', '.join(sorted(homes))}" if homes else ""
    unequal = sum(
        any(
            held[0][1].info.shape != other.info.shape or held[0][1].raw() != other.raw()
            for _, other in held[1:]
        )
        for held in twice.values()
    )
    others = sorted(
        {path.name for name, held in twice.items() for path, _ in held} - homes if homes else ()
    )
    where = f" from {', '.join(others)}" if others else " from all shards but one"
    effect = (
        f"{unequal} of them differ, and a loader that reads every tensor of every shard takes the "
        "last one"
        if unequal
        else "the copies are equal"
    )
    more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
    indexed = all(name in assigned for name in twice)
    command = " (aprfmt repair FOLDER --by-index -o OUT)" * indexed
    return (
        f"tensor {first!r}{more} stand{'s' * (not more)} in {files}{named}; {effect}; names must "
        f"be unique over the set: remove the copies{where}{command}, or get the files of one model "
        "again"
    )
