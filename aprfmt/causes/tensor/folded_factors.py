"""Factors moved from one tensor into the next: norms folded into products, activation scales.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A norm's weights may stand in the columns of every product that reads it; the rows of v (or up) may
be divided by factors that the columns of the output product (or down) bring back. All tensors of a
layer are put right together, because one tensor can take part in two folds. If each then equals the
other side's, the function is equal. If the second tensor does not undo the factors, that is a bug.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import UNIT, pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof
from aprfmt.measure.records import TensorDiff
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "norm_folded", "tensor", "same",
        "The weights of norms were multiplied into the products that read them, and set to one; "
        "the function is equal.",
        "Columns of products are multiplied by the norm's weights, and the norm is one everywhere.",
        "Every product that reads the norm equals the other side's times the norm's weights.",
    ),
    Cause(
        "scales_folded", "tensor", "same",
        "Factors were moved from one tensor into the next (activation-aware scaling): the function "
        "is equal.",
        "Rows or norms are divided by factors, and columns of what reads them multiplied by them.",
        "Every tensor that reads the factors undoes them.",
    ),
    Cause(
        "partial_fold", "tensor", "bug",
        "Factors were folded into products and not taken out where they came from, taken out of a "
        "norm that does not feed these products, or folded only into some of what reads them.",
        "The columns of products are multiplied by the norm's own weights, by factors that undo a "
        "change of another norm, or by those that undo one of their norm in some products only.",
        "Undoing the fold makes the named products equal; the partner does not undo it.",
    ),
)  # fmt: skip

MLP = ("ffn_gate", "ffn_up", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_shexp",
       "ffn_up_shexp", "ffn_gate_inp_shexp")  # fmt: skip
# What reads a norm of a layer. Without a norm of its own the MLP reads attention's.
READERS: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("attn_q", "attn_k", "attn_v", "attn_q_a", "attn_kv_a_mqa"),
    "ffn_norm": MLP,
    "attn_q_a_norm": ("attn_q_b",),
    "attn_kv_a_norm": ("attn_kv_b",),
    "output_norm": ("output",),
}
# (rows, what reads them): linear in between, where the MLP is gated
LINEAR = (("attn_v", "attn_output"), ("ffn_up", "ffn_down"), ("ffn_up_exps", "ffn_down_exps"),
          ("ffn_up_shexp", "ffn_down_shexp"))  # fmt: skip
# Explanations of a single tensor that give way to a fold.
ALONE = ("scale", "stale_tensor", "function_of", "norm_offset", "bit_rot", "quantisation")
LEAST = 1e-6  # relative distance that float32 arithmetic makes
BETTER = 0.9  # of the distance at most is left: a coarse copy is within its rounding of much
SURE = 5.0  # standard errors of a share that decides what a coarse copy does
STRAY = 4.0  # a column so many roundings away was not undone
NORMS = (
    "the weights of norms stand in the products that read them, and the norms are one: the "
    "function is equal"
)
SCALES = (
    "factors were moved from one tensor into the next, which undoes them: the function is equal"
)

COARSE = (
    "factors were moved from a norm into the products that read it, which undo them but for the "
    "rounding of the norm: 1 + w near 0 is stored coarsely"
)


@dataclass
class LayerTensors:
    """One layer's tensors: A's and B's values by role, and `folded`, A's with the folds made.

    `start` is the prefix of the layer's keys, "" outside layers. `pairs` has the tensors of all
    layers by key.
    """

    context: PairContext
    start: str
    pairs: Mapping[str, TensorPair]
    a: "dict[str, Array]" = field(default_factory=dict)
    b: "dict[str, Array]" = field(default_factory=dict)
    folded: "dict[str, Array]" = field(default_factory=dict)
    # Role of a reader -> relative rounding [columns] of the norm that its columns were divided by.
    gain_rounding: "dict[str, Array]" = field(default_factory=dict)

    def has(self, role: str) -> bool:
        """Return whether both sides have a tensor of this role, of one shape and finite.

        Its values are read once, on the first call that finds them usable.
        """
        if role in self.a:
            return True
        pair = self.pairs.get(self.start + role)
        if pair is None or pair.a is None or pair.b is None or pair.a.shape != pair.b.shape:
            return False

        a, b = (np.asarray(side.numpy(), np.float32) for side in (pair.a, pair.b))
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return False
        self.a[role], self.b[role], self.folded[role] = a, b, a
        return True

    def slack(self, role: str) -> float:
        """Return the relative distance at which a role's tensors count as equal, two roundings."""
        pair = self.pairs[self.start + role]
        assert pair.a is not None and pair.b is not None
        return 2 * pair_noise(pair.a.encoding, pair.b.encoding, moved=False) + LEAST

    def is_block_encoded(self, role: str) -> bool:
        """Return whether either side is stored in another encoding than plain floats."""
        pair = self.pairs[self.start + role]
        sides = (pair.a, pair.b)
        return any(name not in UNIT for side in sides if side for name in side.encodings)

    def roundings_apart(self, role: str, value: "Array", *, of_gain: bool = False) -> float:
        """Return the distance of B from `value` over the role's slack; up to 1 is equal.

        It is that of the whole tensor or of its worst column, whichever is larger. Infinite where A
        is zero, or a difference is not finite. `of_gain`: what the rounding of a norm makes of the
        columns is removed first.
        """
        y = self.b[role].reshape(-1, self.b[role].shape[-1]).astype(np.float64)
        x = value.reshape(y.shape).astype(np.float64)
        delta, norm = x - y, np.maximum(norms.exact_norm(x), norms.exact_norm(y))
        if not norm or not np.isfinite(delta).all():
            return 0.0 if not np.any(delta) else float("inf")
        slack = self.slack(role)
        if of_gain and role in self.gain_rounding:
            # A norm is one number for each column: no more of the difference is its rounding.
            square = (x * x).sum(0)
            along = np.where(square > 0, (x * delta).sum(0) / np.where(square > 0, square, 1), 0.0)
            delta = delta - x * np.clip(along, -1, 1) * (
                np.abs(along) <= slack + self.gain_rounding[role]
            )
        whole = float(norms.exact_norm(delta) / norm) / slack
        # The error of a block is that of its largest value, whatever the column's own size.
        least = 1.0 if self.is_block_encoded(role) else 0.01
        own = np.maximum(np.linalg.norm(y, axis=0), least * float(norm) / y.shape[1] ** 0.5)
        return max(whole, float((np.linalg.norm(delta, axis=0) / own).max()) / (slack * STRAY))

    def matches_factor(self, role: str, factor: "Array") -> bool:
        """Return whether a few rows of B are A's times `factor`, one number for each column."""
        x, y = (v[role].reshape(-1, v[role].shape[-1]) for v in (self.a, self.b))
        rows = np.linspace(0, len(x) - 1, min(8, len(x))).astype(np.int64)
        away = norms.exact_norm(x[rows] * factor - y[rows])
        return bool(away <= STRAY * self.slack(role) * norms.exact_norm(y[rows]))

    def is_nearer(self, role: str, value: "Array") -> bool:
        """Return whether `value` is clearly nearer to B than A with each row scaled to fit is.

        Clearly means by more than the rounding of a coarse encoding. Factors that could be scales
        of the rows show nothing about columns.
        """
        x, y = (v[role].reshape(-1, v[role].shape[-1]).astype(np.float64) for v in (self.a, self.b))
        square = (x * x).sum(1, keepdims=True)
        scale = (x * y).sum(1, keepdims=True) / np.where(square > 0, square, 1.0)
        scaled = (x * scale).reshape(value.shape)
        return self.distance(role, value) <= BETTER * self.distance(role, scaled)

    def proof(self, fold: "Fold") -> Proof:
        """Return the proof of a fold: its factor is measured on one tensor, judged on its readers.

        The number of free parameters is that of a norm's values, or of the first source's rows.
        """
        judges = [self.b[role] for role in fold.readers]
        free = self.b[fold.sources[0]].shape[-1 if self.b[fold.sources[0]].ndim == 1 else -2]
        slack = max(self.slack(role) for role in fold.readers)
        sample = judges[0].reshape(-1)[:FEW]
        return prove_values(sample, sum(one.size for one in judges), free, slack)

    def undo(self, roles: Sequence[str], factor: "Array") -> bool | None:
        """Return whether B's products undo a factor: they are A's, columns divided by it.

        None where B's rounding leaves it open. The difference of B and A is projected onto what
        the factor would make of A: that is all of it, or none. All values of all `roles` count,
        so that the answer is certain even if the factor is far smaller than the rounding of one
        value.
        """
        square = along = rest = 0.0
        count = 0
        for role in roles:
            x = self.a[role].reshape(-1, self.a[role].shape[-1]).astype(np.float64)
            off, wanted = self.b[role].reshape(x.shape) - x, x / factor - x
            square += float((wanted * wanted).sum())
            along += float((off * wanted).sum())
            rest += float((off * off).sum())
            count += off.size
        if not square:
            return None
        share = along / square
        error = SURE * (max(0.0, rest - share * along) / (square * count)) ** 0.5
        return None if abs(share - 0.5) <= error else share > 0.5

    def distance(self, role: str, value: "Array") -> float:
        """Return ||value - B|| / ||B|| for a role's tensor; 0 if B is zero."""
        norm = norms.exact_norm(self.b[role])
        return norms.exact_norm(value - self.b[role]) / norm if norm else 0.0


@dataclass(frozen=True)
class Fold:
    """Factors multiplied into the rows of `sources` and divided out of the columns of `readers`.

    All are roles.
    """

    sources: tuple[str, ...]
    readers: tuple[str, ...]
    cause: str
    kept: tuple[str, ...] = ()  # readers that are equal as they are: they undo nothing


def layers_to_explain(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield, for each layer with an unexplained tensor, a function without arguments.

    It returns {tensor key: finding} of the factors that were folded in the layer. Tensors outside
    of layers form one more group. Nothing without hyperparameters.
    """
    if not context.hyper:
        return
    starts = {"": None} | {
        f"L{layer}.": None for key in rows for layer, _ in [split_key(key)] if layer is not None
    }
    for start in starts:
        if any(
            row.is_unexplained(ALONE) for key, row in rows.items() if _layer_prefix(key) == start
        ):
            yield partial(_explain_open_tensors, LayerTensors(context, start, pairs), rows)


def _explain_open_tensors(
    layer: LayerTensors, rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of a layer's folds, for tensors without a better explanation."""
    found = _explain_layer_folds(layer)
    return {key: one for key, one in found.items() if rows[key].is_unexplained(ALONE)}


def _layer_prefix(key: str) -> str:
    """Return the layer prefix of a tensor key, such as "L3."; "" outside of layers."""
    layer, _ = split_key(key)
    return "" if layer is None else f"L{layer}."


def _explain_layer_folds(layer: LayerTensors) -> dict[str, Finding]:
    """Return {tensor key: finding} of a layer's tensors that are equal once factors are moved back.

    If there are none, the findings are of products that took a norm's factor while the norm kept
    it. {} if neither fits.
    """
    folds = [*_norm_folds(layer), *_row_folds(layer)]
    found: dict[str, Finding] = {}
    for fold in folds:
        roles = (*fold.sources, *fold.readers)
        good = bool(fold.readers) and all(
            layer.roundings_apart(role, layer.folded[role], of_gain=True) <= 1 for role in roles
        )
        if good:
            found |= (
                _partial_explanations(layer, fold)
                if fold.kept
                else _equal_explanations(layer, fold, roles)
            )
    return (
        found
        or _wrong_norm_explanations(layer)
        or _kept_norm_explanations(layer, {role for fold in folds for role in fold.sources})
    )


def _norm_folds(layer: LayerTensors) -> Iterator[Fold]:
    """Yield the folds of norms into the products that read them.

    Sets `layer.folded` to A with each fold made: the weight of a product that reads a norm is
    divided by the norm's change.
    """
    for norm, readers in _norm_readers(layer):
        weight = f"{norm}.weight"
        if not layer.has(weight):
            continue
        # The factor by which the norm changed.
        a, b = _norm_gains(layer, weight)
        factor = np.where((a == 0) & (b == 0), 1.0, b / np.where(a == 0, 1.0, a))
        if not factor.all() or not _moved_by_factor(layer, weight, factor, stray=1.0):
            continue
        # Readers that did not change undo nothing. A coarse copy of one that did may be within a
        # rounding of both: then all of its values together say which it is, or the fold is open.
        chosen = tuple(f"{role}.weight" for role in readers if layer.has(f"{role}.weight"))
        undone = {
            role: layer.undo([role], factor)
            for role in chosen
            if layer.matches_factor(role, np.ones(1))
            and layer.roundings_apart(role, layer.a[role]) <= 1
        }
        if None in undone.values():  # then what all of them say together is that of each
            every = layer.undo(list(undone), factor)
            if every is None or (not every) in undone.values():
                continue
            undone = dict.fromkeys(undone, every)
        kept = tuple(role for role, undoes in undone.items() if not undoes)
        sources = [weight]
        if layer.has(f"{norm}.bias"):
            layer.folded[f"{norm}.bias"] = layer.a[f"{norm}.bias"] * factor
            sources.append(f"{norm}.bias")
        layer.folded[weight] = layer.b[weight]
        for role in chosen:
            if role not in kept:
                layer.folded[role] = layer.folded[role] / factor
                layer.gain_rounding[role] = _gain_rounding(layer, weight, a, b)
        one = max(_distance_from_one(a), 0.0) < 1e-3 or max(_distance_from_one(b), 0.0) < 1e-3
        cause = "norm_folded" if one else "scales_folded"
        yield Fold(tuple(sources), tuple(r for r in chosen if r not in kept), cause, kept)


def _distance_from_one(gain: "Array") -> float:
    """Return the largest absolute difference of a gain's elements from 1."""
    return float(np.abs(gain - 1).max(initial=0.0))


def _norm_readers(layer: LayerTensors) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (norm, roles of the products that read it) of this layer, or of the end of the model.

    Nothing for blocks with norms after their sublayers, and for a tied head.
    """
    model = layer.context.models["a"]
    if not layer.start:
        if layer.pairs.get("output.weight") is not None and not model.hyper["tied_embeddings"]:
            yield "output_norm", READERS["output_norm"]
        return
    if model.spec.block.placement == "post":
        return
    for norm, readers in READERS.items():
        own = layer.pairs.get(f"{layer.start}ffn_norm.weight") is not None
        yield norm, readers if own or norm != "attn_norm" else (*readers, *MLP)


def _norm_gains(layer: LayerTensors, weight: str) -> "tuple[Array, Array]":
    """Return (A's, B's) factors of a norm's elements: 1 + w where the block adds one."""
    plus = layer.context.models["a"].spec.block.norm_offset
    return (layer.a[weight].astype(np.float64) + plus, layer.b[weight].astype(np.float64) + plus)


def _gain_rounding(layer: LayerTensors, weight: str, a: "Array", b: "Array") -> "Array":
    """Return the relative rounding [columns] of the ratio of B's gain to A's, as they are stored.

    Where 1 is added to a weight, one near -1 has a gain near 0, which is rounded far more
    coarsely than its own size would say. `a` and `b` are the gains.
    """
    unit = layer.slack(weight)
    rounding = np.zeros(a.shape)
    for stored, gain in ((layer.a[weight], a), (layer.b[weight], b)):
        rounding += unit * np.abs(stored) / np.maximum(np.abs(gain), 1e-300)
    return rounding


def _moved_by_factor(layer: LayerTensors, role: str, factor: "Array", stray: float = STRAY) -> bool:
    """Return whether some element of a role's factor differs from 1 by more than rounding.

    `stray` is how many roundings are allowed: one where the tensors that read the factor judge it.
    """
    return bool(np.abs(factor - 1).max(initial=0.0) > stray * layer.slack(role))


def _row_folds(layer: LayerTensors) -> Iterator[Fold]:
    """Yield folds where rows of one weight are scaled and the next weight's columns scaled back.

    The factor of each row is measured between A and B. For each fold, both weights in
    `layer.folded` become A's rows times the factor and A's columns divided by it.
    """
    hyper, block = layer.context.hyper[0], layer.context.models["a"].spec.block
    for first, second in LINEAR:
        attention = first == "attn_v"
        if attention and block.attention != "gqa":
            continue
        if not attention and (block.mlp != "gated" or hyper.get("swiglu_limit") is not None):
            continue
        rows, reader = f"{first}.weight", f"{second}.weight"
        if not (layer.has(rows) and layer.has(reader)):
            continue
        # The factor of each row, by least squares.
        x, y = layer.folded[rows].astype(np.float64), layer.b[rows].astype(np.float64)
        square = (x * x).sum(-1)
        factor = np.where(square > 0, (x * y).sum(-1) / np.where(square > 0, square, 1), 1.0)
        if not factor.all() or not _moved_by_factor(layer, rows, factor):
            continue
        # The reader's columns take the inverse factor.
        back = _spread_factor(layer, factor) if attention else factor
        if back is None or back.shape[-1] != layer.a[reader].shape[-1]:
            continue
        sources = [rows]
        layer.folded[rows] = x * factor[..., None]
        if layer.has(f"{first}.bias"):
            layer.folded[f"{first}.bias"] = layer.a[f"{first}.bias"] * factor
            sources.append(f"{first}.bias")
        layer.folded[reader] = layer.folded[reader] / back[..., None, :]
        yield Fold(tuple(sources), (reader,), "scales_folded")


def _spread_factor(layer: LayerTensors, factor: "Array") -> "Array | None":
    """Return the factors of v's rows spread to the columns of the output product, or None.

    Each query head has the factors of its key-value head. None if the heads do not divide.
    """
    hyper = layer.context.hyper[0]
    heads, kv = int(hyper["n_heads"]), int(hyper["n_kv_heads"])
    if heads % kv or len(factor) % kv:
        return None
    return np.repeat(factor.reshape(kv, -1), heads // kv, 0).reshape(-1)


def _equal_explanations(
    layer: LayerTensors, fold: Fold, roles: Sequence[str]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of a fold that all its readers undo: nothing is wrong."""
    text = NORMS if fold.cause == "norm_folded" else SCALES
    source, readers = fold.sources[0], ", ".join(fold.readers)
    line = f"{source} is divided by factors, and the columns of {readers} multiplied by them"
    cause = fold.cause
    if any(layer.roundings_apart(role, layer.folded[role]) > 1 for role in fold.readers):
        cause, text = "rounding", COARSE
    # A fold is one thing: what its readers leave is left of all of it.
    rest = max(layer.distance(role, layer.folded[role]) for role in roles)
    return {
        layer.start + role: make_finding(
            cause,
            (layer.start + role,),
            (text, line),
            layer.distance(role, layer.a[role]),
            rest,
            layer.proof(fold),
        )
        for role in roles
        if layer.roundings_apart(role, layer.a[role]) > 1
        or layer.distance(role, layer.folded[role]) < layer.distance(role, layer.a[role])
    }


def _partial_explanations(layer: LayerTensors, fold: Fold) -> dict[str, Finding]:
    """Return {tensor key: finding} of factors that left a norm and reached some readers only."""
    text = (
        f"factors were moved out of {fold.sources[0]} into {', '.join(fold.readers)}, but not into "
        f"{', '.join(fold.kept)}, which reads it too"
    )
    return {
        layer.start + role: make_finding(
            "partial_fold",
            (layer.start + role,),
            (text,),
            layer.distance(role, layer.a[role]),
            layer.distance(role, layer.folded[role]),
            layer.proof(fold),
        )
        for role in (*fold.sources, *fold.readers)
    }


def _wrong_norm_explanations(layer: LayerTensors) -> dict[str, Finding]:
    """Return {tensor key: finding} of factors that left a norm and reached another norm's products.

    The norm that feeds these products is unchanged. {} where no such factors are found.
    """
    if not layer.start:
        return {}
    every = [
        key.removeprefix(layer.start)
        for key in layer.pairs
        if key.startswith(layer.start) and key.endswith("norm.weight")
    ]
    changed = [role for role in every if layer.has(role) and not _is_unchanged(layer, role)]
    for norm, readers in _norm_readers(layer):
        weight = f"{norm}.weight"
        if not layer.has(weight) or not _is_unchanged(layer, weight):
            continue
        products = [f"{role}.weight" for role in readers if layer.has(f"{role}.weight")]
        products = [role for role in products if not _is_unchanged(layer, role)]
        for other in changed:
            a, b = _norm_gains(layer, other)
            if a.shape != layer.a[weight].shape or not (a.all() and b.all()):
                continue
            factor = a / b
            for role in products:
                layer.gain_rounding[role] = _gain_rounding(layer, other, a, b)
            if (
                not products
                or not _moved_by_factor(layer, other, factor)
                or any(
                    layer.roundings_apart(role, layer.a[role] * factor, of_gain=True) > 1
                    or not layer.is_nearer(role, layer.a[role] * factor)
                    for role in products
                )
            ):
                continue
            text = (
                f"the columns of {', '.join(products)} hold factors that were taken out of {other},"
                f" which does not feed them, and not out of {weight}, which does"
            )
            # The factors are the norm's: none was found on the products, which judge them.
            sample, size = layer.b[products[0]], sum(layer.b[role].size for role in products)
            proof = prove_values(sample.reshape(-1)[:FEW], size, 0, layer.slack(products[0]))
            return {
                layer.start + role: make_finding(
                    "partial_fold",
                    (layer.start + role,),
                    (text,),
                    layer.distance(role, layer.a[role]),
                    layer.distance(role, layer.a[role] * factor) if role in products else 0.0,
                    proof,
                )
                for role in (*products, other)
            }
    return {}


def _is_unchanged(layer: LayerTensors, role: str) -> bool:
    """Return whether a role's tensors are equal on both sides within their rounding."""
    return layer.roundings_apart(role, layer.a[role]) <= 1


def _kept_norm_explanations(layer: LayerTensors, changed: set[str]) -> dict[str, Finding]:
    """Return {tensor key: finding} of products multiplied by a norm's weights, which the norm kept.

    `changed` are the roles that some fold changed; their norms are left out.
    """
    found: dict[str, Finding] = {}
    for norm, readers in _norm_readers(layer):
        weight = f"{norm}.weight"
        if (
            weight in changed
            or not layer.has(weight)
            or layer.roundings_apart(weight, layer.a[weight]) > 1
        ):
            continue
        gain, _ = _norm_gains(layer, weight)
        if not gain.all() or not _moved_by_factor(layer, weight, gain):
            continue
        # The weights may be in the products of either side.
        for label, factor in (("B", gain), ("A", 1 / gain)):
            chosen = [f"{role}.weight" for role in readers if layer.has(f"{role}.weight")]
            held = [
                role
                for role in chosen
                if layer.matches_factor(role, factor)
                and layer.roundings_apart(role, layer.a[role] * factor) <= 1
                and layer.is_nearer(role, layer.a[role] * factor)
            ]
            text = (
                f"{label}'s products hold the weights of the norms that they read, which were not "
                "set to one there"
            )
            for role in held:
                key = layer.start + role
                # The factors are the norm's own: none was found on the products.
                proof = prove_values(layer.b[role], layer.b[role].size, 0, layer.slack(role))
                found[key] = make_finding(
                    "partial_fold", (key,), (text, f"the weights of {norm}"),
                    layer.distance(role, layer.a[role]),
                    layer.distance(role, layer.a[role] * factor), proof,
                )  # fmt: skip
    return found


HYPOTHESES = (
    JointHypothesis(
        ("norm_folded", "scales_folded", "partial_fold", "rounding"),
        layers_to_explain,
        430,
        "factors of rows and columns, before weights that are only related",
        weak=ALONE,
    ),
)
