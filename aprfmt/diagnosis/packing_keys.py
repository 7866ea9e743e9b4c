"""Finds quantization keys that make packed weights decode correctly, tried on B's own bytes."""

import math
from collections.abc import Iterator, Mapping

from aprfmt.base.protocols import Value
from aprfmt.diagnosis.packing_repairs import CLAIMS
from aprfmt.diagnosis.renamed_parts import READ, TRIED, weight_distances
from aprfmt.errors import AprfmtError
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.model import Model
from aprfmt.model.config_paths import GONE, Changes, Key, differing_keys, read_with_changes
from aprfmt.model.packing_sizes import changes_text, in_every_section, size_changes
from aprfmt.tensors.companions import quantization_section

_GONE = 0.8  # of the distance at most is left with the key that mends
_WORSE = 1.01  # times its distance that a weight may have with a key that mends others
# The values that a key may have instead, by method. Source: GPTQModel, FORMAT; classic GPTQ stores
# zero points less one.
_OTHERS: Mapping[str, Mapping[str, tuple[Value, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2")}
}
_DEFAULTS: Mapping[str, Value] = {"checkpoint_format": "gptq"}


def repair_packing_command(good: Model, bad: Model, finding: Finding) -> str:
    """Return the `set` command that makes the packed weights of `bad` decode to those of `good`.

    It sets keys of the quantization section; "" where no change of them does. Every weight that
    is tried must come nearer to A's, and no other may get worse. Of several changes the one that
    brings them nearest is used.
    """
    section = None if bad.config is None else quantization_section(bad.config)
    if section is None or bad.folder is None or bad.folder.config is None:
        return ""
    best: tuple[float, Changes] = (math.inf, {})
    before = weight_distances(good, bad, [*good.roles])
    for changes in _section_changes(good, section, finding):
        inside = in_every_section(bad.folder.config, changes)
        try:
            made = read_with_changes(bad, inside)
            left = _remaining_distance(good, made, finding, before)
        except AprfmtError:
            continue
        if left < best[0]:
            best = (left, inside)
    if not best[1]:
        return ""
    return set_command(bad.path, changes_text(best[1]), in_place=bool(bad.damage))


def _section_changes(
    good: Model, section: Mapping[str, Value], finding: Finding
) -> Iterator[Changes]:
    """Yield changes {path: value} of B's quantization section to try, for a finding's weights.

    They are A's values one by one and together, other formats, and other bits and group sizes, of
    all modules or of the finding's.
    """
    theirs = None if good.config is None else quantization_section(good.config)
    if theirs is not None:
        apart = {key: value for key, value in differing_keys(theirs, section) if value is not GONE}
        yield from ({key: value} for key, value in apart.items())
        if len(apart) > 1:
            yield apart
    for key, values in _OTHERS.get(str(section.get("quant_method")), {}).items():
        now = section.get(key, _DEFAULTS.get(key))
        yield from (_single_change((key,), value) for value in values if value != now)
    for name, claims in CLAIMS.items():
        if name in section:
            yield from (
                _single_change((name,), value) for value in claims if value != section[name]
            )
    yield from size_changes(section, finding.where)


def _single_change(key: Key, value: Value) -> Changes:
    """Return the change of one key to a value, as {key: value}."""
    return {key: value}


def _remaining_distance(
    good: Model, made: Model, finding: Finding, before: Mapping[str, float]
) -> float:
    """Return the largest relative L2 of the tried weights from A's; inf if the change is no repair.

    It is no repair if a weight of the finding stays far off, or another weight gets further off
    than it was `before`, {weight: distance}.
    """
    packed = [key for key, view in made.roles.items() if any(one.packed for one in view.stored)]
    own = [
        key
        for key in packed
        if key in finding.keys or set(finding.where) & {key, *made.roles[key].names}
    ]
    others = [key for key in packed if key not in own]
    if not own or any(key in made.roles and key not in own for key in finding.keys):
        return math.inf
    after = weight_distances(good, made, [*own[:TRIED], *others[:TRIED]])
    for key, distance in after.items():
        was = before.get(key, math.inf)
        limit = min(_GONE * was, READ) if key in own else _WORSE * was
        if not distance <= limit:
            return math.inf
    return max(after.values(), default=math.inf)
