"""What is found and done in a folder before something is written there, said to the user.

The writer of a file has no report of its own: who shows things, as the command line does, calls
`set_listener`. Without a listener it is a warning of Python's.
"""

import warnings
from collections.abc import Callable

from aprfmt.base.protocols import Note

_listeners: list[Callable[[Note], None]] = []


def set_listener(show: Callable[[Note], None]) -> None:
    """Have `show` called with every notice from now on, in place of who listened before."""
    _listeners[:] = [show]


def announce(note: Note) -> None:
    """Pass a notice on to the listener."""
    if _listeners:
        _listeners[0](note)
    else:
        warnings.warn(f"{note.where}: {note.text}", stacklevel=2)
