"""A blend of two models: B with some weights and hyperparameters replaced by A's.

A *part* of B is some of its weights and hyperparameters: those that one finding is about. A *stage*
is the embedding, one layer, or the head. A and B are the two models, runs or traces that are
compared; a *side* is one of them.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.arch.spec import HyperParams
from aprfmt.arch.value_checks import same_value
from aprfmt.diagnosis.records import Touched
from aprfmt.inference.rows import RowSource, StoredRows
from aprfmt.inference.weights import Holder, Weights
from aprfmt.model import Model

# Hyperparameters that only the head reads; and those that are read before the first layer.
_LATE = ("final_softcap", "logit_scale", "tied_embeddings")
_EARLY = ("embedding_scale", "vocab_size", "hidden_size")


class PairHolder(Holder):
    """A holder of placed weights that keeps two models' weights of one key apart.

    Both share one memory budget.
    """

    def __init__(self, base: Holder, label: Callable[[str], str]) -> None:
        """Wrap `base`; `label` turns a weight's key into one that also names its model."""
        super().__init__(base.budget)
        self._base, self._label = base, label

    def has_room(self, size: int) -> bool:
        """Return whether `size` bytes more fit the common budget."""
        return self._base.has_room(size)

    def hold(self, key: str, owner: Hashable, placed: Any, size: int) -> None:
        """Hold a weight of `size` bytes that the backend `owner` has placed."""
        self._base.hold(self._label(key), owner, placed, size)

    def find(self, key: str, owner: Hashable) -> Any | None:
        """Return the weight of this key that the backend `owner` has placed; None if it has not."""
        return self._base.find(self._label(key), owner)

    def replace(self, key: str, owner: Hashable, placed: Any) -> None:
        """Replace a weight that the backend `owner` placed by an equal one at another address."""
        self._base.replace(self._label(key), owner, placed)

    def is_placed_by(self, key: str, owner: Hashable) -> bool:
        """Return whether the backend `owner` has placed the weight of this key."""
        return self._base.is_placed_by(self._label(key), owner)

    def is_placed(self, key: str) -> bool:
        """Return whether any backend has placed a weight of this key."""
        return self._base.is_placed(self._label(key))


class Blend:
    """A model made of B with some weights and hyperparameters replaced by A's.

    `weights` and `hp` are those of the blend; `own` are the stages in which it differs from A.
    """

    def __init__(
        self,
        a: Model,
        b: Model,
        equal: frozenset[str],
        holder: Holder,
        parts: Sequence[Touched] | None,
    ) -> None:
        """Build the blend from the `parts` of B that A's replace; None as `parts` means A itself.

        `equal` are keys with equal weights on both sides, which are read from A.
        """
        self.spec, self.hp = (a.spec, a.hyper) if parts is None else (b.spec, b.hyper)
        taken = set(a.roles) if parts is None else set(equal)
        for part in parts or ():
            values = {name: a.hyper[name] for name in part.hyper if name in a.hyper}
            self.hp = self.hp.with_values(**values)
            taken |= set(part.keys)
        rows: dict[str, RowSource] = {}
        for key in a.roles if parts is None else dict.fromkeys((*b.roles, *taken)):
            side = a if key in taken else b
            if key in side.roles:
                rows[key] = StoredRows(side.roles[key])
        self.of_a = frozenset(taken)
        self.weights = Weights(rows, holder.budget, str(b.path))
        self.weights.holder = PairHolder(holder, self._label)
        self.own = [] if parts is None else _differing_stages(a, self)

    def _label(self, key: str) -> str:
        """Return a weight's key with the letter of the model it is from, for the shared holder."""
        name = key.partition("[")[0].partition("@")[0]
        return f"{'A' if name in self.of_a else 'B'} {key}"


def count_stages(*models: Model) -> int:
    """Return how many stages a pass of these models can be split into; 1 if it cannot.

    Stage 0 embeds, stage i is layer i - 1, the last one is the head.
    """
    if any(model.spec.forward for model in models):
        return 1
    return int(models[0].hyper["n_layers"]) + 2


def _differing_stages(a: Model, blend: Blend) -> list[int]:
    """Return the numbers of the stages in which a blend differs from A, ascending.

    [] if there is none.
    """
    keys = set(blend.weights)
    weights = {key for key in keys if key not in blend.of_a} | (set(a.roles) - keys)
    numbers = [
        name
        for name in dict.fromkeys((*a.hyper, *blend.hp))
        if not same_value(_hyper_value(a.hyper, name), _hyper_value(blend.hp, name))
    ]
    other = blend.spec.block != a.spec.block or blend.spec.forward != a.spec.forward
    count = count_stages(a)
    if other or count == 1:
        return list(range(count)) if other or weights or numbers else []
    found: set[int] = set()
    for key in weights:
        found |= _stages_reading(key, count - 1, tied="output.weight" not in keys)
    for name in numbers:
        found |= _stages_changed_by(
            name, _hyper_value(a.hyper, name), _hyper_value(blend.hp, name), count - 1
        )
    return sorted(found)


def _hyper_value(hp: HyperParams, name: str) -> Any:
    """Return a hyperparameter's value, None where the model has none."""
    return hp[name] if name in hp else None


def _stages_reading(key: str, head: int, *, tied: bool) -> set[int]:
    """Return the numbers of the stages that read a weight; `head` is the last stage's number.

    `tied`: the head reads the embedding too.
    """
    layer, role = split_key(key)
    if layer is not None:
        return {layer + 1}
    if role == "token_embd.weight":
        return {0, head} if tied else {0}
    return {head} if role.startswith("output") else {0}


def _stages_changed_by(name: str, mine: Any, other: Any, head: int) -> set[int]:
    """Return the numbers of the stages that a differing hyperparameter changes.

    `mine` and `other` are its two values, `head` is the number of the last stage. Two lists with
    a value per layer change the layers in which they differ.
    """
    if name in _LATE:
        return {head}
    lists = [value for value in (mine, other) if isinstance(value, (tuple, list))]
    if len(lists) == 2 and len(lists[0]) == len(lists[1]) == head - 1:
        return {i + 1 for i, pair in enumerate(zip(*lists, strict=True)) if pair[0] != pair[1]}
    return set(range(0 if name in _EARLY else 1, head + 1))
