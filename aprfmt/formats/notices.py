"""Passes notices about a folder (leftovers, completed writes) from writers to the user.

The writer of a file has no report of its own. A program that shows notices, as the command line
does, calls `set_listener`. Without a listener a notice is a Python warning.
"""

import warnings
from collections.abc import Callable

from aprfmt.base.protocols import Note

_listeners: list[Callable[[Note], None]] = []


def set_listener(show: Callable[[Note], None]) -> None:
    """Have `show` called with every notice from now on; it replaces the listener before."""
    _listeners[:] = [show]


def announce(note: Note) -> None:
    """Pass a notice to the listener, or warn if there is none."""
    if _listeners:
        _listeners[0](note)
    else:
        warnings.warn(f"{note.where}: {note.text}", stacklevel=2)
