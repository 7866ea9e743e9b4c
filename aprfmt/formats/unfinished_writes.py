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
    """Return whether an interrupted patch may have left a file half old and half new.

    It may if the file's patch journal exists. It may, too, if the path is a link: the journal may
    then be in the folder of the link's target. False for a remote address.
    """
    if isinstance(path, RemotePath):
        return False
    return os.path.islink(path) or os.path.lexists(patch_path(path))


def is_journal(name: str) -> bool:
    """Return whether a file name is that of a journal, which notes unfinished renames."""
    return name.startswith(JOURNAL_PREFIX) and name.endswith(JOURNAL_SUFFIX)


def journal_names(folder: Path) -> list[str]:
    """Return the names of a folder's journals, sorted; OSError if it cannot be listed."""
    return sorted(name for name in os.listdir(folder) if is_journal(name))


def known_journal_names(folder: Path) -> list[str]:
    """Return the names of the journals in a folder, sorted.

    Each is of a set of files whose publishing may have been interrupted. [] for a folder that
    cannot be listed, and for a remote address.
    """
    if isinstance(folder, RemotePath):
        return []
    try:
        return journal_names(folder)
    except OSError:
        return []
