"""Joins the explanations of many tensors: a swapped layer is one finding, not nine."""

from collections.abc import Iterable, Sequence, Set

from aprfmt.arch.vocabulary import split_key
from aprfmt.compare.diffs import EQUAL, CauseGroup, TensorDiff
from aprfmt.compare.explain.guesses import Explanation


def findings(tensors: Sequence[TensorDiff]) -> tuple[CauseGroup, ...]:
    """Return the findings about differing tensors: confirmed first, then most tensors first."""
    groups: dict[tuple[str, str, bool], list[TensorDiff]] = {}
    for tensor in tensors:
        found = tensor.explanation
        if isinstance(found, Explanation):
            groups.setdefault(_same(found), []).append(tensor)
    equal = {tensor.key for tensor in tensors if tensor.verdict in EQUAL}
    made = [_finding(*key, rows, equal) for key, rows in groups.items()]
    return tuple(sorted(made, key=lambda row: (not row.confirmed, -len(row.keys))))


def _same(found: Explanation) -> tuple[str, str, bool]:
    """Return the key that explanations of one finding share."""
    if found.cause == "layer_order":
        return found.cause, "", found.confirmed
    if found.cause == "swapped_tensors" and len(found.where) > 1:
        (layer, role), (there, other) = map(split_key, found.where)
        if layer == there and any(text.endswith("are exchanged") for text in found.evidence):
            pair = " and ".join(sorted((role, other)))
            return found.cause, f"{pair} are exchanged", found.confirmed
    return found.cause, found.evidence[0], found.confirmed


def _finding(
    cause: str, text: str, confirmed: bool, rows: Sequence[TensorDiff], equal: Set[str]
) -> CauseGroup:
    keys = tuple(row.key for row in rows)
    if cause == "layer_order":
        return CauseGroup(cause, _layers(rows, equal), keys, confirmed)
    return CauseGroup(cause, f"{named(keys)} - {text}", keys, confirmed)


def _layers(rows: Sequence[TensorDiff], equal: Set[str]) -> str:
    """Return a sentence about which layers are exchanged, moved or copied.

    A layer is a copy where the other one, which its tensors are of, is `equal` in both files.
    """
    copied: dict[tuple[str, int], int] = {}  # side and layer -> the layer it is a copy of
    moved: dict[int, dict[int, int]] = {}  # layer -> other layer -> tensors
    for row in rows:
        assert isinstance(row.explanation, Explanation)
        (layer, _), (there, _) = map(split_key, row.explanation.where)
        if layer is not None and there is not None:
            counts = moved.setdefault(layer, {})
            counts[there] = counts.get(there, 0) + 1
            if row.explanation.where[1] in equal:
                copied[row.explanation.evidence[0][0], layer] = there
    whole = {layer: max(counts, key=lambda k: counts[k]) for layer, counts in moved.items()}
    tensors = {layer: sum(counts.values()) for layer, counts in moved.items()}
    said: list[str] = []
    done: set[int] = set()
    for layer, there in sorted(whole.items()):
        if layer not in done and whole.get(there) == layer:
            many = tensors[layer]
            each = f"{many} tensor{'s' if many > 1 else ''} each"
            said.append(f"layers {layer} and {there} are exchanged ({each})")
            done |= {layer, there}
    for (side, layer), there in sorted(copied.items(), key=lambda item: item[0][1]):
        if whole[layer] == there and layer not in done:
            own = f"{tensors[layer]} tensor{'s' * (tensors[layer] > 1)}"
            said.append(f"layer {layer} of {side} is a copy of layer {there} ({own})")
            done.add(layer)
    rest = {layer: there for layer, there in sorted(whole.items()) if layer not in done}
    if rest:
        shown = ", ".join(f"{layer} is {there}" for layer, there in list(rest.items())[:12])
        more = " ..." if len(rest) > 12 else ""
        said.append(f"layers stand elsewhere, by number in one file and the other: {shown}{more}")
    return "; ".join(said)


def named(keys: Iterable[str]) -> str:
    """Return keys in short form: each role with its layers as ranges."""
    roles: dict[str, list[int | None]] = {}
    for key in keys:
        layer, role = split_key(key)
        roles.setdefault(role, []).append(layer)
    said = []
    for role, layers in roles.items():
        numbers = sorted(layer for layer in layers if layer is not None)
        at = f" in layer{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}" if numbers else ""
        said.append(role + at)
    shown = ", ".join(said[:4])
    return shown if len(said) <= 4 else f"{shown} and {len(said) - 4} more roles"


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
