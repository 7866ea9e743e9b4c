"""Finds codes and scales under names that their packing does not have, by A's values of weights.

A *part* is one of the stored tensors of a packed weight. A *group of inputs* shares a scale. A and
B are the two models, runs or traces that are compared; a *side* is one of them.
"""

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice, product

import numpy as np

from aprfmt.base.protocols import LazyTensor
from aprfmt.causes import CAUSES
from aprfmt.causes.hyperparameters import relation_cause
from aprfmt.codecs import CODECS
from aprfmt.codecs.dialect import OF_INPUTS, Dialect
from aprfmt.codecs.dialects import DIALECTS, dialects_of
from aprfmt.errors import AprfmtError
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import fixed_name
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model, open_model
from aprfmt.model.completeness import ANY
from aprfmt.model.name_relations import rename_relation
from aprfmt.model.packing import packing_config
from aprfmt.model.relations import opening_path
from aprfmt.model.renames import Rename, command_line, differing_run, rename_names, word_similarity
from aprfmt.tensors.companions import quantization_section

READ = 0.5  # relative L2 from A's values up to which a weight is read as it was made
TRIED = 12  # weights that are read again, of however many
_NAMES = 12  # names that one unknown part may have had, the most similar first
_PAIRS = 24  # pairs of names that are tried where two parts are unknown
_TRIPLES = 48  # of names that are tried where three parts are unknown
_GROUPS = (".g_idx", ".weight_g_idx")  # the group of each input
_PLAIN_PARAMETERS = ("weight", "bias")  # tensors that modules have without any packing

Rules = tuple[Rename, ...]


def read_with_renamed_parts(good: Model, bad: Model, label: str) -> tuple[Model, Finding] | None:
    """Return (`bad` read with parts of its packed weights renamed, the finding), or None.

    None where every tensor of its packed weights has a name of the packing that its configuration
    states, or no renaming of one to three parts brings more weights within READ of `good`'s values
    than are read without.
    A part that changes no value must be `good`'s own, byte for byte, or assign inputs to groups in
    order. `label` is the side of `bad`. The caller closes the model.
    """
    if quantization_section(packing_config(bad) or {}) is None:
        return None
    before: Mapping[str, float] = {}
    best: tuple[float, Rules] = (math.inf, ())
    for rules in _possible_rules(good, bad):
        before = before or weight_distances(good, bad, _weight_keys(good, bad))
        left = _distance_with(good, bad, rules, before)
        if left < best[0]:
            best = left, rules
    if not best[1]:
        return None
    best = _with_parts_of_no_effect(good, bad, best, before)
    made = open_model(bad.path, rename=best[1], allow_missing=ANY)
    names = rename_names(bad.source.tensors, best[1], bad.path, strict=False)
    relation = rename_relation(
        bad.path, best[1], ((old, new) for new, old in names.items()), len(bad.source.tensors)
    )
    cause = relation_cause(relation, bad)
    finding = Finding(
        cause,
        f"{label}: {relation.says}{relation.examples_text}",
        "tensor",
        CAUSES[cause].verdict,
        relation.where,
        True,
        "",
        1.0,
        best[0],
        "the furthest of the weights that are read with it; before: they are not read, counted as "
        "1",
        side=label,
        next=_convert_command(bad, best[1]) if label == "B" else "",
        counted=True,
        proof=unfitted_proof(len(relation.where)),
    )
    return made, finding


def _with_parts_of_no_effect(
    good: Model, bad: Model, best: tuple[float, Rules], before: Mapping[str, float]
) -> tuple[float, Rules]:
    """Return (distance, renames) `best` with renames added for one part that changes no value.

    Such a part must be `good`'s own bytes, or the groups of inputs in order. `before` is {role
    key: distance} without renames.
    """
    done = {rule.old for rule in best[1]}
    singles = [rules[0] for rules in _possible_rules(good, bad) if len(rules) == 1]
    further = [rule for rule in singles if rule.old not in done]
    for is_told in (_holds_same_parts, _holds_groups_in_order):
        for rule in further:
            rules = (*best[1], rule)
            try:
                with open_model(bad.path, rename=rules, allow_missing=ANY) as made:
                    if not is_told(good, made, (rule,)):
                        continue
                    if max(weight_distances(good, made, [*before]).values()) <= best[0]:
                        return best[0], rules
            except AprfmtError:
                continue
    return best


def weight_distances(good: Model, model: Model, keys: Sequence[str]) -> dict[str, float]:
    """Return {role key: relative L2 of a weight from `good`'s}; inf where it is not read."""
    found = {}
    for key in keys:
        if key not in good.roles or len(good.roles[key].shape) < 2:
            continue
        try:
            view = model.roles.get(key)
            near = view is not None and view.shape == good.roles[key].shape
            found[key] = (
                rel_l2(view.numpy(), good.roles[key].numpy())
                if view is not None and near
                else math.inf
            )
        except AprfmtError:
            found[key] = math.inf
    return found


def _convert_command(bad: Model, rules: Rules) -> str:
    """Return the `convert` command that writes a model with its tensors renamed by `rules`."""
    path = opening_path(bad.path)
    options = " ".join(f"--rename {shlex.quote(str(rule))}" for rule in rules)
    return f"{command_line('convert', path)} {fixed_name(path)} {options}"


def _weight_keys(good: Model, bad: Model) -> list[str]:
    """Return the role keys of the matrices in layers that are tested, TRIED of them at most.

    Those that lack a part in `bad` come first.
    """
    keys = [key for key, view in good.roles.items() if len(view.shape) > 1 and key.startswith("L")]
    lost = {name for one in bad.lost_parts.values() for name in one.stored}
    lacking = {key for name in lost for key in bad.roles_of.get(name, ())}
    return sorted(keys, key=lambda key: key not in lacking)[:TRIED]


def _distance_with(good: Model, bad: Model, rules: Rules, before: Mapping[str, float]) -> float:
    """Return the largest relative L2 of the tested weights from A's under renames `rules`.

    Infinite where the renames are no repair. `before` are the distances without renames.
    """
    try:
        with open_model(bad.path, rename=rules, allow_missing=ANY) as made:
            gained = [key for key, was in before.items() if not was <= READ]
            told = _holds_same_parts(good, made, rules) or _holds_groups_in_order(good, made, rules)
            if not gained and not told:
                return math.inf
            after = weight_distances(good, made, [*before])
            if any(not left <= min(READ, before[key]) for key, left in after.items()):
                return math.inf
            return max((after[key] for key in gained or after), default=math.inf)
    except AprfmtError:
        return math.inf


def _holds_same_parts(good: Model, made: Model, rules: Rules) -> bool:
    """Return whether all tensors that `rules` rename are `good`'s of the new name, byte for byte.

    `made` is the model read with the renames.
    """
    ends = tuple(f".{rule.new}" for rule in rules)
    names = [name for name in made.source.tensors if name.endswith(ends)]
    mine, theirs = made.source.tensors, good.source.tensors
    return bool(names) and all(
        name in theirs and _raw(mine[name]) == _raw(theirs[name]) for name in names
    )


def _holds_groups_in_order(good: Model, made: Model, rules: Rules) -> bool:
    """Return whether the tensors that `rules` rename are groups of inputs in their usual order.

    Then input i is in group i / size, of two groups or more, which readers assume without such a
    tensor. `good` has none of them.
    """
    if any(name.endswith(_GROUPS) for name in good.source.tensors):
        return False
    ends = tuple(f".{rule.new}" for rule in rules)
    names = [name for name in made.source.tensors if name.endswith(ends)]
    if not names or not all(name.endswith(_GROUPS) for name in names):
        return False
    for name in names:
        tensor = made.source.tensors[name]
        if tensor.info.encoding != "I32":
            return False
        index = np.frombuffer(_raw(tensor), "<i4")
        size = int((index == 0).sum())
        if not 0 < size < len(index) or (index != np.arange(len(index)) // size).any():
            return False
    return True


def _raw(tensor: LazyTensor) -> bytes:
    """Return a stored tensor's bytes."""
    return bytes(tensor.raw())


# --- what may stand for what ---------------------------------------------------------------------


def _possible_rules(good: Model, bad: Model) -> Iterator[Rules]:
    """Yield tuples of renames to try: of one unknown part of packed weights, of two, of three.

    The likely ones of each number come first. An unknown part is one that most packed weights
    have under a name that their packing does not have; where weights lack parts, most of these.
    """
    modules = _unknown_tails(good, bad)
    lacking = {n for weight in bad.lost_parts for n in (weight, weight.rpartition(".")[0])}
    of_lacking = {n: tails for n, tails in modules.items() if tails and n in lacking}
    modules = of_lacking or modules
    counts = Counter(tail for tails in modules.values() for tail in tails)
    tails = [tail for tail, count in counts.items() if 2 * count > len(modules)]
    suffixes = _own_suffixes(bad)
    ways = [_names_of_part(tail, suffixes) for tail in tails]
    for way in ways:
        yield from ((rule,) for rule in [*way][:_NAMES])
    for count, most in ((2, _PAIRS), (3, _TRIPLES)):
        for chosen in combinations(ways, count):
            likely = [dict(islice(way.items(), _NAMES)) if count > 2 else way for way in chosen]
            joint = [
                rules for rules in product(*likely) if len({rule.new for rule in rules}) == count
            ]
            joint.sort(
                key=lambda rules: -sum(way[rule] for way, rule in zip(chosen, rules, strict=True))
            )
            yield from joint[:most]


def _unknown_tails(good: Model, bad: Model) -> dict[str, list[str]]:
    """Return {module of a packed weight: ends of tensor names in it that its packing has not}.

    A module counts as packed where `good` has its weight and `bad` has not, whatever its tensors
    are called.
    """
    own = {*_own_suffixes(bad), *_PLAIN_PARAMETERS}
    ends = {f".{one}": one not in _PLAIN_PARAMETERS for one in own}
    stems: dict[str, bool] = {}  # and whether a part of a packing stands there
    strange: list[str] = []
    for name in bad.source.tensors:
        end = _known_end(name, ends)
        if end:
            stem = name.removesuffix(end)
            stems[stem] = stems.get(stem, False) or ends[end]
        elif not OF_INPUTS.search(name):  # such a scale changes no value of a weight
            strange.append(name)
    for name in good.source.tensors:
        end = _known_end(name, ends)
        stem = name.removesuffix(end)
        if end not in ("", ".bias") and f"{stem}.weight" not in bad.source.tensors:
            stems[stem] = True
    found: dict[str, list[str]] = {stem: [] for stem, packed in stems.items() if packed}
    for name in strange:
        cuts = (i for i in range(len(name) - 1, 0, -1) if name[i] == ".")
        module = next((name[:i] for i in cuts if name[:i] in stems), None)
        if module is not None:
            found.setdefault(module, []).append(name[len(module) + 1 :])
    return found


def _known_end(name: str, ends: Collection[str]) -> str:
    """Return the longest end of a tensor's name that is in `ends` and begins with a dot; or ""."""
    dots = (i for i, letter in enumerate(name) if letter == ".")
    return next((name[i:] for i in dots if name[i:] in ends), "")


def _names_of_part(tail: str, suffixes: Collection[str]) -> dict[Rename, float]:
    """Return {rule that gives an unknown part a name of a packing: similarity}, likely first.

    `suffixes` are those of the packing.
    """
    parts = tail.split(".")
    rules: dict[Rename, float] = {}
    for suffix in sorted(suffixes):
        wanted = suffix.split(".")
        target = [*parts[: -len(wanted)], *wanted]
        run = differing_run(parts, target)
        if run is not None:
            rules[Rename(*run)] = word_similarity(tail, ".".join(target))
    return dict(sorted(rules.items(), key=lambda row: -row[1]))


def _own_suffixes(model: Model) -> frozenset[str]:
    """Return the suffixes of the tensors of the packing that a model's configuration states.

    They are without the dot. Those of every packing where none that is known is stated.
    """
    section = quantization_section(packing_config(model) or {}) or {}
    if section.get("quant_method") == "bitsandbytes":
        return _suffixes_of_codecs()
    try:
        return _suffixes_of(dialects_of(section)) or part_suffixes()
    except AprfmtError:
        return part_suffixes()


def _suffixes_of_codecs() -> frozenset[str]:
    """Return the suffixes of the parts of encodings that stand without a dialect, without the dot.

    They are bitsandbytes', and those of other packages.
    """
    found = {
        part for name in CODECS for part in (*CODECS[name].parts, *CODECS[name].optional_parts)
    }
    return frozenset(part.lstrip(".") for part in found if part)


def _suffixes_of(rows: Iterable[Dialect]) -> frozenset[str]:
    """Return the suffixes of the tensors of some dialects, without the dot."""
    found: set[str] = set()
    for row in rows:
        called = (one for each in row.called.values() for one in each)
        found |= {row.main, row.weight, *row.parts, *row.optional, *called}
    return frozenset(part.lstrip(".") for part in found) - {""}


@cache
def part_suffixes() -> frozenset[str]:
    """Return the suffixes of all tensors that any packing stores for a weight, without the dot."""
    return _suffixes_of_codecs() | _suffixes_of(map(DIALECTS.__getitem__, DIALECTS))
