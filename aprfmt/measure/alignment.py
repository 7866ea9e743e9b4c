"""Pairs the tensors of two models by role or name; an unmatched tensor is a pair by itself.

A *pair* is the tensors that models A and B have of one role, or under one name; a *side* is the
tensor of one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from aprfmt.errors import AprfmtError, ArchError
from aprfmt.measure.records import SideRelation
from aprfmt.model import Model
from aprfmt.model.own_keys import lacks_demanded_head
from aprfmt.model.relations import Relation
from aprfmt.tensors.runs import first_difference, published_equal
from aprfmt.tensors.view import View

WHOLE = 0.5  # share of the smaller model that a set of names under another prefix is at least
AHEAD = 5  # pairs that are announced before they are read, and more while they are small:
AHEAD_BYTES, AHEAD_TENSORS = 192 << 20, 32  # of each side


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The tensors of one role (or stored name) in both models; None for a model without it.

    `layout` are remarks on how the pair was made.
    """

    key: str
    a: View | None
    b: View | None
    layout: tuple[str, ...] = ()

    def prefetch(self) -> None:
        """Tell the files that both tensors are read soon, unless published digests are equal."""
        if self.a is not None and self.b is not None:
            if published_equal(self.a.stored_runs(), self.b.stored_runs()):
                return
        for side in (self.a, self.b):
            for tensor in () if side is None else side.stored:
                tensor.expect()

    @property
    def tensor_count(self) -> int:
        """The number of stored tensors of the side that has more."""
        return max(0 if side is None else len(side.stored) for side in (self.a, self.b))

    @property
    def nbytes(self) -> int:
        """Stored bytes of the larger side, without companions of packed weights."""
        return max(
            0 if side is None else sum(tensor.info.nbytes for tensor in side.stored)
            for side in (self.a, self.b)
        )

    def drop(self) -> None:
        """Release the mapped memory pages of both sides."""
        for side in (self.a, self.b):
            if side is not None:
                side.drop()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every name that a user may use for this pair: role key and stored names."""
        names = [self.key]
        for side in (self.a, self.b):
            names += () if side is None else side.names
        return tuple(dict.fromkeys(names))


def numbered_pairs(pairs: Sequence[TensorPair]) -> Iterator[tuple[int, TensorPair]]:
    """Yield (number from 1, pair) of every pair, and tell the files which pairs are read next.

    A pair is announced some pairs ahead, and again right before it: reading other bytes makes the
    file forget it.
    """
    announced, nbytes, tensors = 0, 0, 0
    for number, pair in enumerate(pairs, 1):
        for soon in pairs[number - 1 : min(announced, number - 1 + AHEAD)]:
            soon.prefetch()
        while announced < len(pairs) and (
            announced < number - 1 + AHEAD or (nbytes < AHEAD_BYTES and tensors < AHEAD_TENSORS)
        ):
            pairs[announced].prefetch()
            nbytes += pairs[announced].nbytes
            tensors += pairs[announced].tensor_count
            announced += 1
        yield number, pair
        nbytes -= pair.nbytes
        tensors -= pair.tensor_count


@dataclass(frozen=True, slots=True)
class Alignment:
    """The tensor pairs of two models, with remarks and relations between the models.

    `by_role` says that they were paired by role, not by stored name.
    """

    pairs: tuple[TensorPair, ...]
    by_role: bool
    notes: tuple[str, ...] = ()
    relations: tuple[SideRelation, ...] = ()


def align_models(a: Model, b: Model) -> Alignment:
    """Return the Alignment of two models: by role where both have roles, else by name."""
    try:
        roles_a, roles_b = a.roles, b.roles
    except ArchError as error:
        pairs, between = _pair_by_name(a, b, tuple(a), tuple(b))
        related = (*_one_sided_relations(a, b), *between)
        return Alignment(tuple(pairs), False, (f"paired by stored name: {error}",), related)
    pairs = []
    for key in dict.fromkeys((*roles_a, *roles_b)):
        pairs.append(TensorPair(key, roles_a.get(key), roles_b.get(key)))
    pairs = [_pair_tied_head(pair, a, b) for pair in pairs]
    pairs, mislabelled = _with_stored_shapes(pairs, a, b)
    more, between = _pair_by_name(a, b, _tensors_without_role(a), _tensors_without_role(b))
    related = tuple(
        one
        for one in _one_sided_relations(a, b)
        if one.relation.kind != "axes" or one.side not in mislabelled
    )
    return Alignment((*pairs, *more), True, (), (*related, *between))


def _with_stored_shapes(
    pairs: list[TensorPair], a: Model, b: Model
) -> tuple[list[TensorPair], frozenset[str]]:
    """Return (pairs, the sides, of "a" and "b", whose file states its axes in the wrong order).

    A model with exchanged axes is read transposed. Where the first such tensor has the bytes of the
    other side's, only the stated shapes are wrong, and the tensors of that side are replaced by
    ones with the stored shapes.
    """
    found: set[str] = set()
    for side, model in (("a", a), ("b", b)):
        names = {n for one in model.relations if one.kind == "axes" for n in one.where}
        mine = [p for p in pairs if (v := getattr(p, side)) is not None and names & {*v.names}]
        if not mine or not _is_same_tensor(mine[0]):
            continue
        found.add(side)
        plain = {pair.key: model[getattr(pair, side).names[0]] for pair in mine}
        pairs = [
            _replace_side(pair, side, plain[pair.key]) if pair.key in plain else pair
            for pair in pairs
        ]
    return pairs, frozenset(found)


def _replace_side(pair: TensorPair, side: str, view: View) -> TensorPair:
    """Return the pair with `view` as its side "a" or "b"."""
    return replace(pair, a=view) if side == "a" else replace(pair, b=view)


def _is_same_tensor(pair: TensorPair) -> bool:
    """Return whether both sides are one stored tensor each, of the same bytes."""
    sides = [side for side in (pair.a, pair.b) if side is not None and len(side.stored) == 1]
    if len(sides) != 2 or any(side.stored[0].parts for side in sides):
        return False
    one, other = (side.stored[0] for side in sides)
    return one.info.nbytes == other.info.nbytes and one.raw() == other.raw()


def _pair_by_name(
    a: Model, b: Model, names_a: Sequence[str], names_b: Sequence[str]
) -> tuple[list[TensorPair], Sequence[SideRelation]]:
    """Return (pairs, relations) of tensors paired by their stored names.

    Where the names of two sets of tensors differ by one prefix, they are paired without it, and a
    relation says so. Of several sets of the same names, such as weights and their averages, the one
    with the nearest values is paired. Towers may be in either of their layouts.
    """
    here, there = _names_for_pairing(a, names_a), _names_for_pairing(b, names_b)
    related: Sequence[SideRelation] = ()
    if here.keys() - there.keys() and there.keys() - here.keys():
        there, related = _without_prefixes(a, b, here, there)
    pairs = []
    for name in dict.fromkeys((*here, *there)):
        mine, other = here.get(name), there.get(name)
        key = mine or other or name
        pairs.append(
            TensorPair(key, None if mine is None else a[mine], None if other is None else b[other])
        )
    return pairs, related


def _without_prefixes(
    a: Model, b: Model, here: Mapping[str, str], there: dict[str, str]
) -> tuple[dict[str, str], Sequence[SideRelation]]:
    """Return B's tensors by names without the prefixes that A's lack, and a relation for each.

    `here` and `there` are {name used for pairing: stored name} of A and of B. Of several sets of
    the same names the one with the nearest values loses its prefix.
    """
    from aprfmt.model.name_relations import relation_between_names, side_of_other_names
    from aprfmt.model.renames import Rename, prefix_rules_between

    fewest = max(2, WHOLE * min(len(here), len(there)))
    found: dict[Rename, dict[str, str]] = {}
    partial_rules: list[Rename] = []
    while True:
        ours = {name: stored for name, stored in here.items() if name not in there}
        theirs = {name: stored for name, stored in there.items() if name not in here}
        rules = prefix_rules_between(theirs, ours, fewest)
        if found:  # what one prefix leaves over is another set only if that is whole as well
            rules = {rule: names for rule, names in rules.items() if len(names) >= fewest}
        if not rules:
            break
        apart = {rule: (0.0, 0.0) for rule in rules}
        if len(rules) > 1:
            apart = {
                rule: _set_distance(
                    [(a[ours[name]], b[theirs[other]]) for other, name in names.items()]
                )
                for rule, names in rules.items()
            }
            # Of several renames one that fits no shape is none: q, k or v alone for the joined one.
            rules = {rule: names for rule, names in rules.items() if apart[rule][0] < 1}
            if not rules:
                break
        rule = min(rules, key=lambda one: apart[one])
        found[rule] = rules[rule]
        there = {rules[rule].get(name, name): stored for name, stored in there.items()}
        partial_rules += [one for one in rules if one != rule and apart[one][0] < WHOLE]
    left = [one.old for one in partial_rules if one.old not in {rule.old for rule in found}]
    more = [one.new for one in partial_rules if one.new not in {rule.new for rule in found}]
    related = [
        SideRelation(
            side_of_other_names(a, b),
            relation_between_names(a, b, rule, names, left, more),
            between=True,
        )
        for rule, names in found.items()
    ]
    return there, related


def _set_distance(pairs: Sequence[tuple[View, View]]) -> tuple[float, float]:
    """Return how far two sets of paired tensors differ: (share of unequal shapes, mean distance).

    The mean is over up to about five pairs of equal shape: the relative L2 distance of a few rows,
    at most 1. A pair that cannot be read counts 1; without any pair the mean is 1.
    """
    from aprfmt.measure.numbers import to_float64
    from aprfmt.measure.row_reader import RowReader
    from aprfmt.tensors import norms

    alike = [(x, y) for x, y in pairs if x.shape == y.shape]
    apart = []
    for x, y in sorted(alike, key=lambda pair: -len(pair[0].shape))[:: max(1, len(alike) // 4)]:
        one, other = RowReader(x), RowReader(y)
        rows = list(range(0, one.rows, max(1, one.rows // 4)))
        try:
            left, right = to_float64(one.take(rows)), to_float64(other.take(rows))
        except AprfmtError:
            apart.append(1.0)
            continue
        size = norms.exact_norm(left)
        away = norms.exact_norm(left - right)
        apart.append(min(1.0, away / size if size else float(away > 0)))
    return 1 - len(alike) / len(pairs), sum(apart) / len(apart) if apart else 1.0


def _names_for_pairing(model: Model, names: Sequence[str]) -> dict[str, str]:
    """Return {name used for pairing: stored name} of tensors without a role.

    Where several would have one name, the one that is stored under it has it, else the first. The
    others keep their stored names. Adapters of diffusion pipelines are paired by module and factor,
    weight norm by torch's older names.
    """
    if not names:
        return {}
    from aprfmt.model.towers import has_towers, tower_name
    from aprfmt.model.weight_norm import older_spellings

    own = frozenset(names)
    in_towers = has_towers(model.config)
    rules = [rule.function for relation in model.relations for rule in relation.rules]
    modules = older_spellings(names)
    if model.kind is not None and model.kind.name == "adapter":
        from aprfmt.model.adapter_parts import diffusion_names

        modules = {**modules, **diffusion_names(model)}
    found: dict[str, str] = {}
    for stored in names:
        name = modules.get(stored, stored)
        for apply in rules:
            name = apply(name)
        if in_towers:
            name = tower_name(name) or name
        found[stored if name in found or name in own else name] = stored
    return found


def _one_sided_relations(a: Model, b: Model) -> tuple[SideRelation, ...]:
    """Return the relations (as of names or axes) under which only one of the two models is read."""
    same = {(one.kind, one.rules, one.where) for one in a.relations}
    same &= {(one.kind, one.rules, one.where) for one in b.relations}
    return tuple(
        SideRelation(side, one)
        for side, model in (("a", a), ("b", b))
        for one in model.relations
        if one.kind != "extension"
        and (one.kind, one.rules, one.where) not in same
        and not _is_stated_alike(one, a, b)
    )


def _is_stated_alike(relation: Relation, a: Model, b: Model) -> bool:
    """Return whether both files state the same values of the keys that a relation corrects.

    Then another key is wrong, and the corrected ones are only a consequence.
    """
    from aprfmt.model.wrong_size import value_at

    stated = [(value_at(a, key), value_at(b, key)) for key, _ in relation.values]
    return bool(stated) and all(x is not None and x == y for x, y in stated)


def _has_head_unlike_table(model: Model) -> bool:
    """Return whether a model stores an output head that is no copy of its embedding's bytes."""
    head, table = model.roles.get("output.weight"), model.roles.get("token_embd.weight")
    if head is None or table is None:
        return head is not None
    if (head.encoding, head.shape) != (table.encoding, table.shape):
        return True
    return first_difference(head.stored_runs(), table.stored_runs()) is not None


# A head of its own may be a copy of the embedding, or not: the values say so.
HEAD_ALONE = "head stored in {} alone, and the embedding in {}"


def _pair_tied_head(pair: TensorPair, a: Model, b: Model) -> TensorPair:
    """Return the pair, with an embedding in place of a head that is stored on one side only.

    The side without a head has to tie it to its embedding; else the pair is returned unchanged. A
    head that its configuration demands is lost, unless the other side's is a copy of the embedding.
    """
    if pair.key != "output.weight" or (pair.a is None) == (pair.b is None):
        return pair
    stored, alone = (b, a) if pair.a is None else (a, b)
    if lacks_demanded_head(alone) and _has_head_unlike_table(stored):
        return pair
    embedding_a, embedding_b = a.roles.get("token_embd.weight"), b.roles.get("token_embd.weight")
    if pair.a is None and embedding_a is not None and a.hyper["tied_embeddings"]:
        return TensorPair(pair.key, embedding_a, pair.b, (HEAD_ALONE.format("B", "A"),))
    if pair.b is None and embedding_b is not None and b.hyper["tied_embeddings"]:
        return TensorPair(pair.key, pair.a, embedding_b, (HEAD_ALONE.format("A", "B"),))
    return pair


def _tensors_without_role(model: Model) -> Sequence[str]:
    """Return stored names without a role, except tensors that repeat hyperparameters."""
    derived = {row.name(model.style or "") for row in model.spec.derived}
    return [name for name in model.resolution.unbound if name not in derived]
