"""Orders of the parts that one role's rows consist of, as the architecture's table has them.

A *part* is rows with one meaning: the compressed row and the rotated keys of latent attention, the
unrotated and the rotated rows of a query head, x and z of a state space mixer. Rows of heads stand
head by head, each with its own parts. An *order* has, at each place, the number of the row in the
table's layout. A and B are the two files that are compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.engine_parameters import COUNTED
from aprfmt.arch.required_roles import find_rule
from aprfmt.arch.size_expressions import expression_terms, size_of
from aprfmt.base.protocols import Value
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.permutation import invert_permutation
from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

MOST = 5  # parts whose orders are tried
PROBED = 32  # rows compared before an order is worth trying
# Names of the parts by the hyperparameter that counts their rows, or by the role where it has two.
_NAMES = {
    "qk_nope_head_dim": "nope",
    "qk_rope_head_dim": "rope",
    "value_head_dim": "v",
    "kv_lora_rank": "compressed",
}
_OF_ROLE = {
    ("attn_kv_b", 2): ("k_nope", "v"),
    ("ssm_in", 2): ("x", "z"),
    ("ssm_in", 5): ("z", "x", "B", "C", "dt"),
    ("ssm_conv1d", 3): ("x", "B", "C"),
    ("ssm_x", 3): ("dt", "B", "C"),
}
_QUERIES = ("attn_q.", "attn_q_b.")  # whose heads have rows that rope leaves alone, and others
_OF_QUERIES = ("qk_nope_head_dim", "qk_rope_head_dim")


@dataclass(frozen=True)
class OwnParts:
    """The parts of a role's rows: (name, rows in each head) in order, and the number of heads.

    `heads` is 1 for rows that do not belong to heads.
    """

    parts: tuple[tuple[str, int], ...]
    heads: int

    @property
    def rows(self) -> int:
        """Number of rows of the role."""
        return self.heads * sum(size for _, size in self.parts)

    def layouts(self) -> "Iterator[tuple[str, Array]]":
        """Yield (words, order) of every way to store the parts, the table's own first."""
        starts = np.cumsum([0, *(size for _, size in self.parts)])
        rows = np.arange(self.rows).reshape(self.heads, -1)
        each = [rows[:, starts[i] : starts[i + 1]] for i in range(len(self.parts))]
        orders = list(permutations(range(len(self.parts))))
        if self.heads > 1:
            for chosen in orders:
                names = " ".join(self.parts[i][0] for i in chosen)
                order = np.concatenate([each[i] for i in chosen], axis=1).reshape(-1)
                yield f"[{names}] of each of {self.heads} heads", order
        for chosen in orders:
            words = " and then ".join(f"all {self.parts[i][0]}" for i in chosen)
            yield words, np.concatenate([each[i].reshape(-1) for i in chosen])

    def moves(self) -> "Iterator[tuple[str, Array]]":
        """Yield (words, p) of every order that one side alone has: row i of A is row p[i] of B."""
        (words, _), *others = self.layouts()
        for other, order in others:
            yield f"{words} in A, {other} in B", invert_permutation(order)
            yield f"{other} in A, {words} in B", order


def own_parts(case: DifferingPair) -> OwnParts | None:
    """Return the parts of a role's rows by the architecture's table; None where it has just one."""
    try:
        model = case.context.models["a"]
        hyper = model.hyper
        rule = find_rule(model.spec, case.key, hyper).shape
        found = None if not rule else _parts_of(case.role, rule[0], hyper)
    except (AprfmtError, KeyError):
        return None
    return found if found is not None and found.rows == case.a.rows == case.b.rows else None


def _parts_of(role: str, expression: str, hyper: "Mapping[str, Value]") -> OwnParts | None:
    """Return the parts that the expression of a role's rows, such as `a+2*b`, consists of."""
    names: list[tuple[str, int]] = []
    counts: list[str] = []
    for term in expression_terms(expression):
        times = int(np.prod([int(one) for one in term if one.isdecimal()], initial=1))
        counted = next((one for one in term if one in COUNTED), "")
        inner = [one for one in term if not one.isdecimal() and one != counted]
        size = size_of("*".join(inner), hyper) if inner else 1
        names += [("*".join(inner), size)] * times
        counts += [counted] * times
    if len(names) == 1 and role.startswith(_QUERIES) and counts[0]:
        inside = [(one, size_of(one, hyper)) for one in _OF_QUERIES]
        if sum(size for _, size in inside) != names[0][1]:
            return None
        names, counts = inside, counts * 2
    if not 1 < len(names) <= MOST or any(not size for _, size in names):
        return None
    # Rows of heads are stored head by head where all parts are counted by the same heads.
    heads = size_of(counts[0], hyper) if counts[0] and len(set(counts)) == 1 else 1
    if heads == 1:
        names = [
            (name, size * (size_of(count, hyper) if count else 1))
            for (name, size), count in zip(names, counts, strict=True)
        ]
    known = _OF_ROLE.get((role.split(".")[0], len(names)))
    said = known or tuple(_NAMES.get(name, f"part {i + 1}") for i, (name, _) in enumerate(names))
    return OwnParts(tuple((one, size) for one, (_, size) in zip(said, names, strict=True)), heads)


def moved_parts(case: DifferingPair) -> tuple[str, "Array"] | None:
    """Return (words, p) of an order of the parts that some rows of both sides follow; or None.

    Row i of A is row p[i] of B. The sides' values are compared within their rounding.
    """
    found = own_parts(case)
    if found is None:
        return None
    rows = np.sort(np.random.default_rng(16).permutation(found.rows)[:PROBED])
    mine, slack = case.a.take(rows), case.slack() * 2 + 1e-6
    size = slack * float(np.linalg.norm(mine))
    if not np.linalg.norm(mine - case.b.take(rows)) > size:
        return None  # none of these moved
    for words, p in found.moves():
        if np.linalg.norm(mine - case.b.take(p[rows])) <= size:
            return words, p
    return None
