"""Sets of equal tensor names in one file, each behind a prefix: a model and its average (EMA)."""

import re
from collections.abc import Collection, Iterable, Mapping

_LEAST = 3  # names of a set, at least
# Prefixes of what is no model's weights, or an older or averaged set of them.
_ASIDE = re.compile(
    r"(?:^|[._])(?:ema|avg|averaged?|shadow|teacher|target|ref(?:erence)?|old|exp_avg(?:_sq)?|grads?)"
    r"(?:$|[._])",
    re.IGNORECASE,
)


def repeated_prefixes(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the prefixes under which a file has one set of tensor names, in order; [] if one only.

    `shapes` are those of all tensors by name. "" is among the prefixes if the names stand there
    without one too. The tensors of a name have the same shape in all sets.
    """
    sets: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        if rest and not first.isdigit():
            sets.setdefault(f"{first}.", {})[rest] = shape
    for prefix, held in sets.items():
        if len(held) < _LEAST:
            continue
        found = [other for other, theirs in sets.items() if theirs == held]
        bare = {rest: shapes[rest] for rest in held if rest in shapes}
        if bare == held:
            return ["", *(other for other in found if other != "")]
        if len(found) > 1 and found[0] == prefix:
            return found
    return []


def prefix_to_read(prefixes: Collection[str]) -> str:
    """Return which of several sets is the model's own: the first that is named no average.

    "" stands for the names without a prefix, which go first; the first of all if all are averages.
    """
    own = [one for one in prefixes if not one or not _ASIDE.search(one)]
    return "" if "" in own else next(iter(own or prefixes))


def copies_text(prefixes: Iterable[str], shapes: Mapping[str, tuple[int, ...]], path: str) -> str:
    """Return a sentence on sets of equal names: where they stand, and the command that takes one.

    `prefixes` are those that `repeated_prefixes` returned for `shapes`; `path` is the file's, or ""
    for a set of several files, from which no command takes one.
    """
    known = list(prefixes)
    count = sum(name.startswith(known[-1]) for name in shapes)
    places = [f"under {one}" if one else "without a prefix" for one in known]
    aside = known[-1]
    command = f"aprfmt convert {path} OUT.safetensors --generic --drop 're:^(?!{re.escape(aside)})'"
    how = f"alone: {command}" if path else "save them alone"
    where = " and ".join(places)
    return f"the same {count} tensor names stand {where}; to take those under {aside} {how}"
