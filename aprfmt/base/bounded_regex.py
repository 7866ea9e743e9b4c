r"""Regular expressions out of files, matched in a time that a hostile one cannot run away with.

Python's own engine has no limit. The library `regex`, which reads the same patterns, stops after a
time; what a pattern of a checkpoint takes is microseconds. It differs from Python's in what no name
of a tensor has: `\s` is Unicode's white space, without the separators U+001C to U+001F, and `\B`
matches an empty text, as in Python from 3.14 on.
"""

import math
import re
from collections.abc import Callable
from functools import lru_cache

from aprfmt.errors import CodecError

LONGEST = 256  # bytes of a name that patterns are matched with
MOST = 1024  # characters of a pattern
SECONDS = 1.0  # for one name: a thousand times what the slowest pattern of a checkpoint takes
_COUNTS = (
    4096  # the largest product of a pattern's counts: the library unrolls them when it compiles
)

_COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
# What means something else to the library than to Python: fuzzy matching, and POSIX classes.
_OTHERWISE = re.compile(r"(?<!\\)\{(?![0-9,]+\})|\[:\^?[A-Za-z_]+:\]")


def matches_start(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches at the start of `name`, as `re.match` does.

    False for a name longer than any tensor's. Raises CodecError for a pattern that is wrong, is too
    long, or takes longer than a second.
    """
    return len(name) <= LONGEST and _compile_matcher(pattern)(name)


@lru_cache(maxsize=1024)
def _compile_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function of a name: whether the pattern matches at its start.

    Raises CodecError for a pattern that is wrong or too long, or that the two libraries read in
    different ways.
    """
    import regex

    if len(pattern) > MOST:
        raise CodecError(f"pattern of {len(pattern)} characters; expected at most {MOST}")
    if _OTHERWISE.search(pattern):
        raise CodecError(f"pattern {pattern!r} has a brace that is no count, or a class by name")
    found = _COUNT.findall(pattern)
    if math.prod(max(int(least or 1), int(most or 1), 1) for least, _, most in found) > _COUNTS:
        raise CodecError(f"pattern {pattern!r} has counts whose product is over {_COUNTS}")
    try:
        re.compile(pattern)
        compiled = regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise CodecError(f"pattern {pattern!r} is no regular expression: {error}") from None

    def matches(name: str) -> bool:
        """Return whether `pattern` matches at the name's start; raise CodecError after SECONDS."""
        try:
            return compiled.match(name, timeout=SECONDS) is not None
        except TimeoutError:
            raise CodecError(
                f"pattern {pattern!r} takes longer than {SECONDS:.0f} s on a name of {len(name)} "
                "characters; write it without repeats inside repeats"
            ) from None

    return matches
