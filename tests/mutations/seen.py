"""Put into the traced copy as `aprfmt/_seen.py`: remembers which blocks of the product ran.

Every block there begins with `_seen_(NUMBER)`. In the process of pytest that is the `add` of a set;
in every other process, a forked one too, each number is appended once to a file of the process, so
that nothing is lost where a test kills it.
"""

import builtins
import os

SEEN: set[int] = set()
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".seen")
_open, _write, _close = os.open, os.write, os.close  # tests replace those of the module
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def note(number: int) -> None:
    """Append a number that is new; where no file can be written, it is lost."""
    if number in SEEN:
        return
    SEEN.add(number)
    try:
        file = _open(os.path.join(FOLDER, str(os.getpid())), _FLAGS, 0o644)
        try:
            _write(file, b"%d\n" % number)
        finally:
            _close(file)
    except OSError:
        pass


def in_memory() -> set[int]:
    """Let this process keep its numbers in a set, which is returned; children still write files."""
    builtins._seen_ = SEEN.add  # type: ignore[attr-defined]
    return SEEN


def in_files() -> None:
    """Let this process write its numbers, from none on."""
    SEEN.clear()
    builtins._seen_ = note  # type: ignore[attr-defined]


in_files()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=in_files)
