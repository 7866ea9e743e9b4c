"""Matches the PATTERN with which a user names tensors, in any spelling.

A pattern is whole dot-components from the left (`blk.1` does not match `blk.10`;
`blk.3.ffn_gate` matches its weight and bias, not `ffn_gate_inp`), a glob, or `re:...`. If plain
components match nothing from the left, they are tried anywhere in a name: `ffn_gate` then
matches the gate of every layer. Every spelling of a tensor is tried: its name in either file,
and its role.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import translate

from aprfmt.base.sequences import join_first
from aprfmt.errors import UsageError

_GLOB = "*?["  # characters by which a pattern is a glob


def spelling_predicate(pattern: str, names: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a name matches the pattern.

    A pattern is `re:REGEX`, a glob, or components between dots. `names` holds the names it may be
    meant for: where none starts with the pattern's components, they match anywhere in a name.
    Raises UsageError for a broken regular expression.
    """
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:]).search  # type: ignore[return-value]
        except re.error as error:
            raise UsageError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    if any(c in pattern for c in _GLOB):
        return re.compile(translate(pattern)).match  # type: ignore[return-value]
    wanted = pattern.split(".")
    size = len(wanted)

    def starts_with_components(name: str) -> bool:
        """Return whether a tensor name's first components between dots are those of the pattern."""
        return name.split(".")[:size] == wanted

    def contains_components(name: str) -> bool:
        """Return whether the pattern's components follow one another anywhere in a tensor name."""
        parts = name.split(".")
        return any(parts[at : at + size] == wanted for at in range(len(parts) - size + 1))

    return (
        starts_with_components if any(map(starts_with_components, names)) else contains_components
    )


def exact_predicate(pattern: str) -> Callable[[str, bool], bool]:
    """Return a function of (name, whether dots divide it) that says if the pattern matches it.

    A pattern is `re:REGEX`, a glob, or the name itself. Where dots divide a name into components,
    it may also be the first of them. Raises UsageError for a broken regular expression.
    """
    if pattern.startswith("re:") or any(c in pattern for c in _GLOB):
        matches = spelling_predicate(pattern, ())
        return lambda name, parts: bool(matches(name))
    return lambda name, parts: name == pattern or (parts and name.startswith(f"{pattern}."))


def spelling_predicates(
    patterns: Iterable[str], names: Sequence[str], subject: str
) -> list[Callable[[str], bool]]:
    """Return one predicate per pattern, as `spelling_predicate` does; `names` are all names.

    Raises UsageError with three near names for a pattern that matches none. `subject` begins the
    message.
    """
    found = []
    for pattern in patterns:
        matches = spelling_predicate(pattern, names)
        if not any(map(matches, names)):
            raise UsageError(
                f"{subject}: no tensor matches {pattern!r}; near names: "
                f"{', '.join(similar_names(pattern, names)) or 'none'}"
            )
        found.append(matches)
    return found


def matching_indices(
    spellings: Sequence[Sequence[str]], patterns: Iterable[str], subject: str
) -> list[int]:
    """Return the indices of the tensors with a spelling that matches any pattern, in order.

    `spellings` has all spellings of each tensor. Every pattern must match something: otherwise
    UsageError with three near names.
    """
    every = [name for names in spellings for name in names]
    wanted = spelling_predicates(patterns, every, subject)
    return [
        i
        for i, names in enumerate(spellings)
        if any(matches(name) for matches in wanted for name in names)
    ]


def one_matching_index(spellings: Sequence[Sequence[str]], pattern: str, subject: str) -> int:
    """Return the index of the tensor with exactly this spelling, else of the only match.

    `spellings` has all spellings of each tensor. Raises UsageError where the pattern matches none
    or several. `subject` begins the message.
    """
    exact = [i for i, names in enumerate(spellings) if pattern in names]
    found = exact if len(exact) == 1 else matching_indices(spellings, [pattern], subject)
    if len(found) > 1:
        shown = join_first([spellings[i][0] for i in found], 4)
        raise UsageError(
            f"{subject}: {pattern!r} matches {len(found)} tensors ({shown}); name one of them"
        )
    return found[0]


def close_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` names so similar that `name` may be a typo of them, best first."""
    return get_close_matches(name, dict.fromkeys(names), count, cutoff=0.6)


def similar_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that look like `name`, best first; the first ones if none does."""
    every = list(dict.fromkeys(names))
    found = get_close_matches(name, every, 3, cutoff=0.3) if len(every) <= 20_000 else []
    return found or every[:3]
