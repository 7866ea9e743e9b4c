"""Finds what makes packed weights decode correctly, tried on B's own bytes.

That is a key of the quantization, or the name of a part.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from aprfmt.base.protocols import Value
from aprfmt.codecs import CODECS
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.diagnosis.config_changes import differing_keys
from aprfmt.diagnosis.packing_repairs import CLAIMS
from aprfmt.errors import AprfmtError
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import fixed_name, set_command
from aprfmt.model import Model, open_model
from aprfmt.model.config_paths import GONE, Changes, Key, read_with_changes
from aprfmt.model.packing_sizes import changes_text, in_every_section, size_changes
from aprfmt.model.relations import opening_path
from aprfmt.model.renames import Rename, command_line, differing_run, word_similarity
from aprfmt.tensors.companions import quantization_section

_GONE = 0.8  # of the distance at most is left with the key that mends
_READ = 0.5  # relative L2 from A's values up to which a weight is read as it was made
_WORSE = 1.01  # times its distance that a weight may have with a key that mends others
_TRIED = 12  # weights that are read again, of those found and of the others
_NAMES = 12  # names that an unknown part may have had, the most similar first
# The values that a key may have instead, by method. Source: GPTQModel, FORMAT; classic GPTQ stores
# zero points less one.
_OTHERS: Mapping[str, Mapping[str, tuple[Value, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2")}
}
_DEFAULTS: Mapping[str, Value] = {"checkpoint_format": "gptq"}


def repair_packing_command(good: Model, bad: Model, finding: Finding) -> str:
    """Return the command that makes a finding's packed weights of B decode to A's values, or "".

    It is a `convert --rename` for a part that stands under another name, else a `set` of keys of
    the quantization.
    """
    missing = finding.cause == "scales_missing" and finding.side != "A"
    renamed = _rename_command(good, bad, finding) if missing else ""
    return renamed or _set_command(good, bad, finding)


def _rename_command(good: Model, bad: Model, finding: Finding) -> str:
    """Return the `convert --rename` that makes weights which lack a part decode to A's, or ""."""
    best: tuple[float, Rename | None] = (math.inf, None)
    where = {*finding.where}
    for rule in _part_renames(bad, finding.where):
        try:
            with open_model(bad.path, rename=(rule,)) as made:
                if all(name in made and made[name].parts for name in finding.where):
                    own = [k for k, v in made.roles.items() if not where.isdisjoint(v.names)]
                    after = _weight_distances(good, made, own[:_TRIED])
                    left = max(after.values(), default=math.inf)
                    if left < best[0]:
                        best = (left, rule)
        except AprfmtError:
            continue
    if best[1] is None or not best[0] <= _READ:
        return ""
    path = opening_path(bad.path)
    source = command_line("convert", path)
    return f"{source} {fixed_name(path)} --rename {shlex.quote(str(best[1]))}"


def _part_renames(bad: Model, weights: Sequence[str]) -> list[Rename]:
    """Return rules that give a tensor beside packed weights the name of a part, likely ones first.

    Only tensors are renamed whose names no packing knows, and that stand beside most of `weights`.
    """
    stems = {f"{name.rpartition('.')[0]}." for name in weights}
    known = sorted(_part_suffixes())
    endings = tuple(f".{one}" for one in known)
    beside: Counter[str] = Counter()
    for name in bad.source.tensors:
        ends = (i + 1 for i, letter in enumerate(name) if letter == ".")
        end = next((i for i in ends if name[:i] in stems), 0)
        tail = name[end:]
        if end and not f".{tail}".endswith(endings):
            beside[tail] += 1
    rules: dict[Rename, float] = {}
    for tail in (one for one, count in beside.items() if 2 * count > len(stems)):
        parts = tail.split(".")
        for suffix in known:
            wanted = suffix.split(".")
            target = [*parts[: -len(wanted)], *wanted]
            run = differing_run(parts, target)
            if run is not None:
                rules[Rename(*run)] = word_similarity(tail, ".".join(target))
    return sorted(rules, key=lambda rule: -rules[rule])[:_NAMES]


def _part_suffixes() -> set[str]:
    """Return the suffixes of all tensors that any packing stores for a weight, without the dot."""
    found = {
        part for name in CODECS for part in (*CODECS[name].parts, *CODECS[name].optional_parts)
    }
    for key in DIALECTS:
        row = DIALECTS[key]
        called = (one for each in row.called.values() for one in each)
        found |= {row.main, row.weight, *row.parts, *row.optional, *called}
    return {part.lstrip(".") for part in found} - {""}


def _set_command(good: Model, bad: Model, finding: Finding) -> str:
    """Return the `set` command that brings the packed weights of `bad` back to those of `good`.

    It sets keys of the quantization section. "" where no change of them does.

    Every weight that is tried must come nearer to A's, and no other may get worse. Of several
    changes the one that brings them nearest is taken.
    """
    section = None if bad.config is None else quantization_section(bad.config)
    if section is None or bad.folder is None or bad.folder.config is None:
        return ""
    best: tuple[float, Changes] = (math.inf, {})
    before = _weight_distances(good, bad, good.roles)
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
    """Yield changes of B's quantization section to try, for a finding's weights.

    They are A's values one by one and together, other formats, and other bits and group sizes: of
    all modules, or of those that have their own and are the finding's.
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
    """Return the change of one key."""
    return {key: value}


def _weight_distances(good: Model, model: Model, keys: Iterable[str]) -> dict[str, float]:
    """Return {role key: relative L2 from A's weight}; inf for those that are not read."""
    found = {}
    for key in keys:
        if key not in good.roles or len(good.roles[key].shape) < 2:
            continue
        view = model.roles.get(key)
        try:
            near = view is not None and view.shape == good.roles[key].shape
            found[key] = (
                rel_l2(view.numpy(), good.roles[key].numpy())
                if view is not None and near
                else math.inf
            )
        except AprfmtError:
            found[key] = math.inf
    return found


def _remaining_distance(
    good: Model, made: Model, finding: Finding, before: Mapping[str, float]
) -> float:
    """Return the largest distance of the tried weights from A's; inf if the change is no repair.

    It is no repair if a weight of the finding stays far off, or another one gets worse than
    `before`.
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
    after = _weight_distances(good, made, [*own[:_TRIED], *others[:_TRIED]])
    for key, distance in after.items():
        was = before.get(key, math.inf)
        limit = min(_GONE * was, _READ) if key in own else _WORSE * was
        if not distance <= limit:
            return math.inf
    return max(after.values(), default=math.inf)
