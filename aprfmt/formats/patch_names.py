"""The hidden file next to a file that is changed in place, as long as the change is incomplete."""

import os
from pathlib import Path

from aprfmt.remote.paths import RemotePath

SUFFIX = ".aprfmt-patch"


def patch_path(path: Path) -> Path:
    """Return the path of the hidden file that notes a change in place until it is complete."""
    return path.parent / f".{path.name}{SUFFIX}"


def may_be_half_changed(path: Path) -> bool:
    """Return whether a file may be half old and half new: its patch exists, or it is a link.

    The file that a link leads to may have a patch in its own folder.
    """
    if isinstance(path, RemotePath):
        return False
    return os.path.islink(path) or os.path.lexists(patch_path(path))
