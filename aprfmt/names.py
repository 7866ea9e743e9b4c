"""PATTERN: how a user names tensors, in whichever spelling.

A pattern is whole dot-components from the left (`blk.1` does not match `blk.10`;
`blk.3.ffn_gate` matches its weight and bias, not `ffn_gate_inp`), a glob, or `re:...`. It is
tried against every spelling of a tensor: its name in either file, and its role.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import translate

from aprfmt.errors import UsageError


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a predicate over one spelling; UsageError for a broken regular expression."""
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:]).search  # type: ignore[return-value]
        except re.error as error:
            raise UsageError(f"pattern {pattern!r} is no regular expression: {error}") from None
    if any(c in pattern for c in "*?["):
        return re.compile(translate(pattern)).match  # type: ignore[return-value]
    wanted = pattern.split(".")

    def components(name: str) -> bool:
        return name.split(".")[: len(wanted)] == wanted

    return components


def select(spellings: Sequence[Sequence[str]], patterns: Iterable[str], subject: str) -> list[int]:
    """Return the indices whose spellings match any pattern, in order.

    Every pattern must match something: otherwise UsageError with three near names.
    """
    chosen: set[int] = set()
    for pattern in patterns:
        matches = compile_pattern(pattern)
        found = {i for i, names in enumerate(spellings) if any(matches(name) for name in names)}
        if not found:
            every = [name for names in spellings for name in names]
            raise UsageError(
                f"{subject}: no tensor matches {pattern!r}; near names: "
                f"{', '.join(near(pattern, every)) or 'none'}"
            )
        chosen |= found
    return sorted(chosen)


def near(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` names that look like `name`, best first."""
    every = list(dict.fromkeys(names))
    found = get_close_matches(name, every, count, cutoff=0.3) if len(every) <= 20_000 else []
    return found or every[:count]
