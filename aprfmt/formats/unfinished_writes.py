"""The hidden files that an unfinished write leaves: patches of files, journals of folders."""

import os
from pathlib import Path

from aprfmt.remote.paths import RemotePath

PATCH_SUFFIX = ".aprfmt-patch"
JOURNAL_PREFIX, JOURNAL_SUFFIX = ".aprfmt-journal-", ".json"


def patch_path(path: Path) -> Path:
    """Return the path of the hidden file that notes a change in place until it is complete."""
    return path.parent / f".{path.name}{PATCH_SUFFIX}"


def may_be_half_changed(path: Path) -> bool:
    """Return whether a file may be half old and half new: its patch exists, or it is a link.

    The file that a link leads to may have a patch in its own folder.
    """
    if isinstance(path, RemotePath):
        return False
    return os.path.islink(path) or os.path.lexists(patch_path(path))


def is_journal(name: str) -> bool:
    """Return whether a file name is that of a journal."""
    return name.startswith(JOURNAL_PREFIX) and name.endswith(JOURNAL_SUFFIX)


def journal_names(folder: Path) -> list[str]:
    """Return the names of a folder's journals, sorted; OSError if it cannot be listed."""
    return sorted(name for name in os.listdir(folder) if is_journal(name))


def known_journal_names(folder: Path) -> list[str]:
    """Return the names of a folder's journals, sorted, each of a set that may be half published.

    [] for a folder that cannot be listed, and for an address: nothing is written there.
    """
    if isinstance(folder, RemotePath):
        return []
    try:
        return journal_names(folder)
    except OSError:
        return []
