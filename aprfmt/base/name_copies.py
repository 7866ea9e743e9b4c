"""Sets of equal tensor names in one file, each under a prefix: a model and its average (EMA)."""

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
    """Return the prefixes under which a file repeats the same tensor names; [] if nothing repeats.

    Such prefixes are "model." and "ema.", for instance. `shapes` is {tensor name: shape} of the
    file; a repeated name must have the same shape under every prefix. The list is in the file's
    order, and starts with "" if the names also occur without a prefix.
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
    """Return the prefix of the model's own weights among prefixes that repeat its tensor names.

    It is the first one that is not named as an average (such as "ema."). "", the names without a
    prefix, is preferred. If all are averages, the first one is returned.
    """
    own = [one for one in prefixes if not one or not _ASIDE.search(one)]
    return "" if "" in own else next(iter(own or prefixes))


def copies_text(prefixes: Iterable[str], shapes: Mapping[str, tuple[int, ...]], path: str) -> str:
    """Return a sentence on tensor names that a file repeats, and how to save one copy alone.

    `prefixes` are those that `repeated_prefixes` returned for `shapes`. `path` is the file, for
    which the sentence gives an `aprfmt convert` command; "" for several files, which get none.
    """
    known = list(prefixes)
    count = sum(name.startswith(known[-1]) for name in shapes)
    places = [f"under {one}" if one else "without a prefix" for one in known]
    aside = known[-1]
    command = f"aprfmt convert {path} OUT.safetensors --generic --drop 're:^(?!{re.escape(aside)})'"
    how = f"alone: {command}" if path else "save them alone"
    where = " and ".join(places)
    return f"the same {count} tensor names stand {where}; to take those under {aside} {how}"
