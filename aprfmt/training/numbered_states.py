"""Which parameter each number of an optimizer's state is, where the file does not name them.

A *number* is the index under which an optimizer's state has a parameter. A *group* is a parameter
group of the optimizer.

torch numbers parameters in the order in which they were handed over, group by group, and a
checkpoint does not keep that order. A number is recognized by what its moments did: the step that
they make is the change of its own parameter, up to a factor and a sign. Within a group layers
follow each other, so a number that looks like the parameter of another layer is not taken for it:
then the order of the other layers says which one it is. What is still open is told by the order of
`named_parameters`: that of the modules of a layer, where all shapes and all known numbers fit it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key

Array = NDArray[Any]
LEAST = 0.3  # cosine of a parameter's change and the step of its own moments, at least
SECOND_SHARE = 0.5  # a second parameter may be so much like a number, as a share of the first
SAMPLE = 1 << 15  # elements that are looked at
BLOCKS = 16  # runs of rows that they are spread over


# Orders in which models declare the modules of a layer, by the first words of their roles: what
# `named_parameters` goes by. A weight comes before its bias; other roles keep their own order.
_ATTENTIONS = (
    ("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
    ("attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output"),
    ("attn_k", "attn_v", "attn_q", "attn_output"),
)
_MLP = ("ffn_gate_inp", "ffn_gate", "ffn_up", "ffn_down")
_LAYERS: tuple[tuple[str, ...], ...] = (
    ("attention", "mlp", "norms"),  # transformers' llama and what follows it
    ("attn_norm", "attention", "norms", "mlp"),  # GPT-2
    ("norms", "attention", "mlp"),  # GPT-NeoX
    ("attention", "attn_norm", "mlp", "norms"),  # OPT
)
_BEFORE, _AFTER = ("token_embd", "position_embd", "token_types"), ("output_norm", "output")
_OUTER = ((_BEFORE, _AFTER), ((*_BEFORE, "output_norm"), ("output",)))  # the second is OPT's


@dataclass(frozen=True)
class Numbered:
    """A numbered entry of an optimizer's state: the shape of its moments, and their step.

    `step()` returns a flat sample of the step that the moments make.
    """

    number: str
    shape: tuple[int, ...]
    step: Callable[[], Array]


@dataclass(frozen=True)
class Candidate:
    """A parameter that a numbered entry may be: stored name, a role key of it, and its shape.

    `change()` returns a flat sample of what the step changed in it.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    change: Callable[[], Array]


def sample_of(values: Array) -> Array:
    """Return the elements of an array as flat float64, at most SAMPLE of them.

    Of a larger array they are BLOCKS ranges of elements, spread evenly over it.
    """
    flat = values.reshape(-1)
    if flat.size <= SAMPLE:
        return flat.astype(np.float64)
    length = SAMPLE // BLOCKS
    starts = np.linspace(0, flat.size - length, BLOCKS).astype(int)
    return np.concatenate([flat[at : at + length] for at in starts]).astype(np.float64)


def recognize_numbers(
    numbered: Sequence[Numbered], candidates: Sequence[Candidate], groups: Sequence[Sequence[str]]
) -> tuple[dict[str, str], bool]:
    """Return ({number of a state's entry: parameter name}, whether values told any of them).

    `groups` are the numbers of each parameter group, in order.
    """
    found: dict[str, Candidate] = {}
    looked = False
    for shape in dict.fromkeys(row.shape for row in numbered):
        mine = [row for row in numbered if row.shape == shape]
        theirs = [row for row in candidates if row.shape == shape]
        if len(mine) == len(theirs) == 1:
            found[mine[0].number] = theirs[0]
        elif theirs:
            alike = _match_changes(mine, theirs)
            looked = looked or bool(alike)
            found |= alike
    for group in groups:
        _drop_out_of_order(group, found)
    every = {split_key(row.key) for row in candidates}
    for group in groups:  # a parameter out of the order of all other layers
        for at, number in enumerate(group):
            if number not in found or _layer(found[number]) is None:
                continue
            places = [p for p in _roles_by_order(group, at, found) if p in every]
            if places and split_key(found[number].key) not in places:
                del found[number]
    shapes = {row.number: row.shape for row in numbered}
    while _settle_by_order(groups, found, shapes, candidates):
        pass
    found |= _settle_by_modules(groups, found, shapes, candidates)
    return {number: row.name for number, row in found.items()}, looked


def _match_changes(mine: Sequence[Numbered], theirs: Sequence[Candidate]) -> dict[str, Candidate]:
    """Return {number: parameter} where the moments' step resembles one parameter's change.

    `mine` are the numbered entries, `theirs` the parameters, all of one shape. They resemble each
    other if the absolute cosine is at least LEAST, and every other cosine of that number or
    parameter is at most SECOND_SHARE times as large.
    """
    steps = np.stack([_normalize(row.step()) for row in mine])
    changes = np.stack([_normalize(row.change()) for row in theirs])
    scores = np.abs(steps @ changes.T)
    found = {}
    for at, row in enumerate(mine):
        to = int(scores[at].argmax())
        best = float(scores[at, to])
        others = max(
            float(np.delete(scores[at], to).max(initial=0.0)),
            float(np.delete(scores[:, to], at).max(initial=0.0)),
        )
        if best >= LEAST and others <= SECOND_SHARE * best:
            found[row.number] = theirs[to]
    return found


def _normalize(values: Array) -> Array:
    """Return values divided by their norm; zeros where that is zero or not finite."""
    size = float(np.linalg.norm(values))
    return values / size if size and np.isfinite(size) else np.zeros_like(values)


def _layer(row: Candidate) -> int | None:
    """Return the layer number of a parameter; None outside all layers."""
    return split_key(row.key)[0]


def _drop_out_of_order(group: Sequence[str], found: dict[str, Candidate]) -> None:
    """Remove from `found` the numbers of a group that break the order of layers.

    Layers may ascend or descend along the group: the longest sequence in either order is kept.
    """
    layered = [(n, layer) for n in group if n in found and (layer := _layer(found[n])) is not None]
    upwards = _longest_run([layer for _, layer in layered])
    downwards = _longest_run([-layer for _, layer in layered])
    kept = max(upwards, downwards, key=len)
    for at, (number, _) in enumerate(layered):
        if at not in kept:
            del found[number]


def _longest_run(values: Sequence[int]) -> set[int]:
    """Return the indices of the longest subsequence of `values` that never falls."""
    best: list[tuple[int, int]] = []  # its length where it ends here, the place before
    for at, value in enumerate(values):
        runs = [(best[i][0], i) for i in range(at) if values[i] <= value]
        length, before = max(runs, default=(0, -1))
        best.append((length + 1, before))
    kept = set()
    at = max(range(len(best)), key=lambda i: best[i][0], default=-1)
    while at >= 0:
        kept.add(at)
        at = best[at][1]
    return kept


def _settle_by_order(
    groups: Sequence[Sequence[str]],
    found: dict[str, Candidate],
    shapes: Mapping[str, tuple[int, ...]],
    candidates: Sequence[Candidate],
) -> bool:
    """Add to `found` the numbers that order or elimination tells; return whether one was added.

    The numbers of a group are those of its parameters in their order. A number gets the parameter
    that other layers have at the same index. Without such a layer it gets the only free one of its
    shape between the layers of its neighbours. `groups` are the optimizer's, `shapes` {number:
    shape}.
    """
    taken = {row.name for row in found.values()}
    free = {(_layer(row), split_key(row.key)[1]): row for row in candidates}
    free = {place: row for place, row in free.items() if row.name not in taken}
    every = {split_key(row.key) for row in candidates}
    added = False
    for group in groups:
        for at, number in enumerate(group):
            if number in found or number not in shapes:
                continue
            votes = [p for p in _roles_by_order(group, at, found) if p in every]
            fitting = [free[p] for p in votes if p in free]
            fitting = [row for row in fitting if row.shape == shapes[number]]
            if not votes:
                low, high = _layers_around(group, at, found)
                fitting = [
                    row
                    for (layer, _), row in free.items()
                    if row.shape == shapes[number] and (layer is None or low <= layer <= high)
                ]
            if len(fitting) == 1:
                found[number] = fitting[0]
                free = {p: row for p, row in free.items() if row.name != fitting[0].name}
                added = True
    return added


def _settle_by_modules(
    groups: Sequence[Sequence[str]],
    found: Mapping[str, Candidate],
    shapes: Mapping[str, tuple[int, ...]],
    candidates: Sequence[Candidate],
) -> dict[str, Candidate]:
    """Return {number: parameter} for unknown numbers on which all possible orders of modules agree.

    An order is possible if the groups have as many numbers as parameters, with these shapes, and
    every known number in `found` keeps its parameter. There is one group, or one of matrices and
    one of vectors. `shapes` are {number: shape}. {} if no order is possible, no number is unknown,
    or none is in `found`, without which no order could be excluded.
    """
    if not found or shapes.keys() <= found.keys():
        return {}
    parts: list[Callable[[Candidate], bool]] = [lambda row: True]
    if len(groups) == 2:
        parts = [lambda row: len(row.shape) > 1, lambda row: len(row.shape) < 2]
    elif len(groups) != 1:
        return {}
    fitting: list[dict[str, Candidate]] = []
    for attention, layer, outer in product(_ATTENTIONS, _LAYERS, _OUTER):
        order = sorted(candidates, key=_module_rank(attention, layer, outer, candidates))
        made: dict[str, Candidate] = {}
        for group, part in zip(groups, parts, strict=True):
            mine = [row for row in order if part(row)]
            if len(mine) != len(group):
                return {}
            made |= dict(zip(group, mine, strict=True))
        right = all(made[n].shape == shape for n, shape in shapes.items() if n in made)
        if right and all(made[n].name == row.name for n, row in found.items() if n in made):
            fitting.append(made)
    if not fitting:
        return {}
    return {
        number: fitting[0][number]
        for number in shapes
        if number not in found and len({made[number].name for made in fitting}) == 1
    }


def _module_rank(
    attention: Sequence[str],
    layer: Sequence[str],
    outer: tuple[Sequence[str], Sequence[str]],
    candidates: Sequence[Candidate],
) -> Callable[[Candidate], tuple[int, ...]]:
    """Return a sort key that puts parameters into one order of modules.

    `attention` is the order of modules within attention, `layer` that of the modules of a layer,
    `outer` are the modules before and after the layers. Roles of no such module, as other norms,
    come where `layer` has "norms", in the order of `candidates`.
    """
    inner = {"attention": attention, "mlp": _MLP}
    own = {row.name: number for number, row in enumerate(candidates)}

    def rank(row: Candidate) -> tuple[int, ...]:
        """Return the key that sorts a parameter in the order of modules.

        It says whether the parameter is before, in or after the layers, then its layer, its module
        and its number there.
        """
        number, role = split_key(row.key)
        module, _, kind = role.partition(".")
        bias = int(kind == "bias")
        if number is None:
            early = module in outer[0]
            side = outer[0] if early else outer[1]
            place = side.index(module) if module in side else len(side)
            return (0 if early else 2, 0, 0, place, bias, own[row.name])
        for at, part in enumerate(layer):
            if module in inner.get(part, (part,)):
                within = inner.get(part, (part,)).index(module)
                return (1, number, at, within, bias, own[row.name])
        return (1, number, layer.index("norms"), 99, own[row.name], bias)

    return rank


def _roles_by_order(
    group: Sequence[str], at: int, found: Mapping[str, Candidate]
) -> list[tuple[int | None, str]]:
    """Return the (layer, role) that index `at` of a group should have, judged by other layers.

    For each known number near `at` the same role in another layer is looked up. The parameter at
    the same distance from it gets a vote, moved into the layer of the known number. All (layer,
    role) with the most votes are returned; a layer of None is outside all layers; [] without any
    vote.
    """
    votes: Counter[tuple[int | None, str]] = Counter()
    places = {i: split_key(found[n].key) for i, n in enumerate(group) if n in found}
    for i, (layer, role) in places.items():
        if layer is None or abs(i - at) > 32:
            continue
        for j, (other, same) in places.items():
            there = places.get(j + at - i)
            if same == role and other is not None and other != layer and there is not None:
                if there[0] is not None:
                    votes[layer + there[0] - other, there[1]] += 1
    most = max(votes.values(), default=0)
    return [place for place, count in votes.items() if count == most]


def _layers_around(
    group: Sequence[str], at: int, found: Mapping[str, Candidate]
) -> tuple[int, int]:
    """Return (lowest, highest) layer that index `at` of a group may be in, by its known neighbours.

    The lowest is 0 if no number before it is known, the highest 2**30 if none after it is.
    """
    layers = {i: _layer(found[n]) for i, n in enumerate(group) if n in found}
    below = [layer for i, layer in sorted(layers.items()) if i < at and layer is not None][-1:]
    above = [layer for i, layer in sorted(layers.items()) if i > at and layer is not None][:1]
    around = (*below, *above)
    if len(around) == 2:
        return min(around), max(around)
    return 0, 1 << 30
