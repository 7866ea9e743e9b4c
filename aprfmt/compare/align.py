"""Pairing: the union of both files' tensors by role; the unmatched stay in the denominator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aprfmt.errors import ArchError
from aprfmt.model import Model
from aprfmt.tensors.runs import published_equal
from aprfmt.tensors.view import View

AHEAD = 5  # pairs that are announced before they are read, and more while they are small:
AHEAD_BYTES, AHEAD_TENSORS = 192 << 20, 32  # of each side


@dataclass(frozen=True, slots=True)
class TensorPair:
    """One role (or plain name) of either file, with whatever each side has for it."""

    key: str
    a: View | None
    b: View | None
    layout: tuple[str, ...] = ()

    def expect(self) -> None:
        """Say that both sides will be read soon, unless digests say that they are equal."""
        if self.a is not None and self.b is not None:
            if published_equal(self.a.stored_runs(), self.b.stored_runs()):
                return
        for side in (self.a, self.b):
            for tensor in () if side is None else side.stored:
                tensor.expect()

    @property
    def tensors(self) -> int:
        """How many stored tensors the larger side is made of."""
        return max(0 if side is None else len(side.stored) for side in (self.a, self.b))

    @property
    def nbytes(self) -> int:
        """Bytes that the larger side is stored in, without companions."""
        return max(
            0 if side is None else sum(tensor.info.nbytes for tensor in side.stored)
            for side in (self.a, self.b)
        )

    def drop(self) -> None:
        """Release the mapped pages of both sides: mapped pages count as resident memory."""
        for side in (self.a, self.b):
            if side is not None:
                side.drop()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every name a user may mean this pair by."""
        names = [self.key]
        for side in (self.a, self.b):
            names += () if side is None else side.names
        return tuple(dict.fromkeys(names))


def in_turn(pairs: Sequence[TensorPair]) -> Iterator[tuple[int, TensorPair]]:
    """Yield every pair with its number from 1; the next ones are announced.

    Each is announced when it comes near, and again when it is next: a read elsewhere made the file
    forget it.
    """
    told, nbytes, tensors = 0, 0, 0
    for number, pair in enumerate(pairs, 1):
        for soon in pairs[number - 1 : min(told, number - 1 + AHEAD)]:
            soon.expect()
        while told < len(pairs) and (
            told < number - 1 + AHEAD or (nbytes < AHEAD_BYTES and tensors < AHEAD_TENSORS)
        ):
            pairs[told].expect()
            nbytes += pairs[told].nbytes
            tensors += pairs[told].tensors
            told += 1
        yield number, pair
        nbytes -= pair.nbytes
        tensors -= pair.tensors


@dataclass(frozen=True, slots=True)
class Alignment:
    """The pairs, whether roles or plain names paired them, and remarks on the way."""

    pairs: tuple[TensorPair, ...]
    by_role: bool
    notes: tuple[str, ...] = ()


def align(a: Model, b: Model) -> Alignment:
    """Pair two models by role where both architectures are known, else by stored name."""
    try:
        roles_a, roles_b = a.roles, b.roles
    except ArchError as error:
        pairs = [TensorPair(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))]
        return Alignment(tuple(pairs), False, (f"paired by stored name: {error}",))
    pairs = []
    for key in dict.fromkeys((*roles_a, *roles_b)):
        pairs.append(TensorPair(key, roles_a.get(key), roles_b.get(key)))
    pairs = [_tied(pair, a, b) for pair in pairs]
    extra_a, extra_b = _unclaimed(a), _unclaimed(b)
    for name in dict.fromkeys((*extra_a, *extra_b)):
        pairs.append(
            TensorPair(
                name, a[name] if name in extra_a else None, b[name] if name in extra_b else None
            )
        )
    return Alignment(tuple(pairs), True)


def _tied(pair: TensorPair, a: Model, b: Model) -> TensorPair:
    """Pair a head stored on one side only with the other side's tied embedding."""
    if pair.key != "output.weight" or (pair.a is None) == (pair.b is None):
        return pair
    embedding_a, embedding_b = a.roles.get("token_embd.weight"), b.roles.get("token_embd.weight")
    if pair.a is None and embedding_a is not None and a.hyper["tied_embeddings"]:
        return TensorPair(pair.key, embedding_a, pair.b, ("tied head stored as a copy in B",))
    if pair.b is None and embedding_b is not None and b.hyper["tied_embeddings"]:
        return TensorPair(pair.key, pair.a, embedding_b, ("tied head stored as a copy in A",))
    return pair


def _unclaimed(model: Model) -> Sequence[str]:
    """Return stored tensors of no role, less those that only restate hyperparameters."""
    derived = {row.name(model.style or "") for row in model.spec.derived}
    return [name for name in model.resolution.unbound if name not in derived]
