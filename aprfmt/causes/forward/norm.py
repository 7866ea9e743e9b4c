"""Hypotheses about a norm: its epsilon, the 1 added to its weight, the weight itself."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import role_key, split_key
from aprfmt.causes.forward.mismatch import Change, FittedNumber, Hypothesis, Layers, Mismatch
from aprfmt.causes.forward.norm_changes import (
    NORMS,
    exchange_norm_kind,
    offset_norm_weights,
    point_before_norm,
    repeat_norms,
    round_before_weight,
    use_eps,
)
from aprfmt.causes.forward.operation_patches import add_eps_outside_root
from aprfmt.causes.forward.point_signatures import ALIKE, PointPair, PointSignature
from aprfmt.causes.forward.product import (
    other_weight_changes,
    replace_weights,
    weights_of_same_shape,
)
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2

CAUSE_ROWS = (
    Cause(
        "norm_eps", "config", "bug",
        "The norms use another epsilon.",
        "The ratio is constant along a row and largest for small rows, from the first norm on.",
        "Solving both sides' rows gives one epsilon; the norms with it are equal.",
        keys=("norm_eps", "lora_norm_eps", "ssm_inner_eps", "delta_norm_eps"),
    ),
)  # fmt: skip

EPS = tuple(10.0**-k for k in range(1, 13))
STEPS = 3  # towards an epsilon that is seen behind other operations
NEARER = 0.5  # what is left after them of the difference, at most


def eps_change(
    patched: PatchedModel, eps: float, name: str = "norm_eps", point: str = "", seen: str = ""
) -> Change:
    """Return the change of the norms' epsilon to `eps`.

    `name` is the hyperparameter. With `point` only the norm that follows that capture point is
    changed, and `seen` is the point by which the sentence names it.
    """
    which = f"the norm at {seen} alone adds" if point else "the norms add"
    return Change(
        "norm_eps", f"{which} eps {eps:g} where the model says {patched.hp[name]:g}", (name,),
        use_eps(eps, point), {name: eps},
    )  # fmt: skip


def _eps_change_here(case: Mismatch, eps: float, point: str = "") -> Change:
    """Return the change of epsilon for norms of the kind at the differing point.

    With `point` only the norm that follows that capture point is changed.
    """
    name = "lora_norm_eps" if case.view.point.endswith("_a_norm") else "norm_eps"
    return eps_change(case.patched, eps, name, point, case.view.point)


def find_eps(case: Mismatch) -> Iterator[Change]:
    """Yield changes of epsilon to the value that the norm's rows show, for all norms and this one.

    The rows with the smallest mean square give the most exact value.
    """
    call = case.call(*NORMS)
    if call is None:
        return
    theirs = case.recorded_result(call)
    if theirs is None:
        yield from case.best_number(lambda e: _eps_change_here(case, e), EPS)
        solved = _solve_eps(case, float(call.kwargs["eps"]))
        if solved is not None:
            yield from case.rounded_change(lambda e: _eps_change_here(case, e), solved)
        return
    # Reduce a layer norm to the form of an RMS norm.
    x, ours = case.array(call.args[0]), case.array(call.result)
    if call.op == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
        bias = call.args[2]
        if bias is not None:
            ours, theirs = ours - case.array(bias), theirs - case.array(bias)
    # The ratio to the reference must be one number in each row.
    width = x.shape[-1]
    square = np.mean(x.astype(np.float64) ** 2, -1).reshape(-1)
    mine, other = (np.asarray(v, np.float64).reshape(-1, width) for v in (ours, theirs))
    ratio = np.sum(other * mine, -1) / np.maximum(np.sum(mine * mine, -1), 1e-300)
    if rel_l2(mine * ratio[:, None], other) > 10 * case.view.tolerance or not (ratio > 0).all():
        return
    # Solve for epsilon; small rows are the most exact.
    found = (square + call.kwargs["eps"]) / ratio**2 - square
    smallest = np.argsort(square, kind="stable")[: max(1, len(square) // 4)]
    value = float(np.median(found[smallest]))
    if value <= 0:
        yield _eps_change_here(case, 0.0)
        return
    # Try it in all norms, then in this one alone.
    for change in case.rounded_change(lambda e: _eps_change_here(case, e), value):
        yield change
        [found] = change.values.values()
        yield _eps_change_here(case, float(found), point_before_norm(case.patched, call.location))


def _solve_eps(case: Mismatch, eps: float) -> float | None:
    """Return the epsilon nearest to the trace, by steps from `eps`, where norms lie further back.

    Each step follows what the last one moved at the point. None where no step comes nearer.
    """
    last, at = case.view, eps
    number = eps * 2 if eps else EPS[5]
    for _ in range(STEPS):
        tried = case.attempt(_eps_change_here(case, number))
        if tried is None or tried.residual is None:
            return None
        mine, before, theirs = (
            np.float64(np.take(x, case.rows, case.view.axis))
            for x in (tried.mine, last.mine, case.view.theirs)
        )
        slope = (mine - before) / (number - at)
        square = float(np.sum(slope * slope))
        step = float(np.sum((theirs - mine) * slope)) / square if square else 0.0
        if not math.isfinite(step) or not 0 < number + step or not step:
            return None
        last, at, number = tried, number, number + step
    return number if (last.residual or 0.0) < NEARER * (case.view.residual or 0.0) else None


def eps_outside_change() -> Change:
    """Return the change that adds the norms' epsilon to the root, not to the mean square."""
    return Change(
        "norm_eps", "the norms add eps to the root, not below it", ("norm_eps",),
        add_eps_outside_root, {"eps_outside": True},
    )  # fmt: skip


def try_eps_outside(case: Mismatch) -> Iterator[Change]:
    """Yield the change of adding epsilon to the root, where a norm's own rows differ."""
    if case.gives_point_value(case.call(*NORMS)):
        yield eps_outside_change()


# Points that a norm follows -> what the norm is called.
PLACES: Mapping[str, str] = {
    "in": "before attention", "mid": "before the MLP", "out": "before the head",
    "attn_out": "after attention", "ffn_out": "after the MLP", "moe_out": "after the experts",
    "v": "of q", "q_norm": "of k", "embd": "of the embedding",
}  # fmt: skip
ROWS: tuple[tuple[str, ...], ...] = (
    ("in",), ("mid",), ("out",), ("v", "q_norm"), ("attn_out", "ffn_out", "moe_out"),
    ("attn_out",), ("ffn_out", "moe_out"), ("v",), ("q_norm",), ("embd",), ("in", "mid"),
)  # fmt: skip


def try_norm_offsets(case: Mismatch) -> Iterator[Change]:
    """Yield changes that add 1 to norm weights or take 1 from them, in all norms and in one alone.

    gemma adds 1. The one norm is that of the operation where `case` differs; nothing if it is none.
    """
    call = case.call(*NORMS)
    if call is not None:
        yield from norm_offset_changes(case.patched)
        points = (point_before_norm(case.patched, call.location),)
        for plus in (1, -1):
            yield _norm_offset_change(case.patched.norm_addend, plus, points)


def norm_offset_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield two changes: 1 is added to, or taken from, the weights of all norms."""
    for plus in (1, -1):
        yield _norm_offset_change(patched.norm_addend, plus)


def norm_offset_changes_by_place(patched: PatchedModel) -> Iterator[Change]:
    """Yield a change for each kind of norm in a layer: 1 is added to its weights, or left out.

    It is left out (-1) if the architecture adds 1 to its norm weights, else added.
    """
    for points in norm_places(patched):
        plus = -1 if patched.spec.block.norm_offset else 1
        yield _norm_offset_change(patched.norm_addend, plus, points)


def _norm_offset_change(addend: int, plus: int, points: tuple[str, ...] = ()) -> Change:
    """Return the change that adds `plus` (1 or -1) to norm weights, in the norms after `points`.

    `points` are capture points; empty means all norms. `addend` is what the model's own pass adds
    to the weights as the file stores them: the sentence speaks of these.
    """
    does, whose = ("multiplies", "its") if len(points) == 1 else ("multiply", "their")
    return Change(
        "norm_offset",
        f"{norm_name(points)} {does} by {_offset_weight(addend + plus)}, where "
        f"{_offset_weight(addend)} is meant (w is {whose} weight in the file)",
        ("norm_offset",),
        offset_norm_weights(plus, points),
        {"offset": plus, **({"behind": points} if points else {})},
    )


def _offset_weight(addend: int) -> str:
    """Return in words what a norm multiplies by: its stored weight w plus `addend`, as "1 + w"."""
    if addend < 0:
        return f"w - {-addend}"
    return f"{addend} + w" if addend else "w"


def norm_places(patched: PatchedModel) -> list[tuple[str, ...]]:
    """Return where a model has norms: for each place the capture points that its norms follow.

    A place is, for instance, before attention in all layers, or before the head.
    """
    block = patched.spec.block
    held = {row.point.name for row in patched.points.values() if not row.absent}
    found = {"out"} if "output_norm.weight" in patched.weights else set()
    if any(key.endswith(".attn_norm.weight") for key in patched.weights):
        found.add("in")
    if any(key.endswith(".ffn_norm.weight") for key in patched.weights):
        found.add("mid")
    if block.placement in ("post", "sandwich"):
        found |= {"attn_out", "ffn_out", "moe_out"} & held
    if patched.hp["qk_norm"] and block.attention != "mla":
        found |= {"v", "q_norm"}
    if "token_embd_norm.weight" in patched.weights:
        found.add("embd")
    rows = [tuple(point for point in row if point in found) for row in ROWS]
    return list(dict.fromkeys(row for row in rows if row))


def norm_name(points: tuple[str, ...]) -> str:
    """Return the norms after these capture points in words; "the norms" for no points."""
    names = dict.fromkeys(PLACES.get(point, f"after {point}") for point in points)
    return f"the norm{'' if len(points) == 1 else 's'} {' and '.join(names)}".strip()


def norm_kind_change(patched: PatchedModel, points: tuple[str, ...] = (), seen: str = "") -> Change:
    """Return the change from RMS norms to layer norms, or the reverse.

    It acts on all norms, or only on those after the capture points `points`. `seen` is the point
    by which the sentence names a norm that differs alone.
    """
    layer = patched.spec.block.norm == "layer"
    does = ("keep", "keeps") if layer else ("take away", "takes away")
    which = f"the norm at {seen}" if seen else norm_name(points)
    return Change(
        "norm_kind",
        f"{which} {does[len(points) == 1]} the mean of a row",
        ("norm",),
        exchange_norm_kind(points),
        {"mean": not layer, **({"behind": points} if points else {})},
    )


def try_norm_kinds(case: Mismatch) -> Iterator[Change]:
    """Yield the changes from RMS to layer norm or the reverse, in all norms and in this one."""
    call = case.call(*NORMS)
    if call is not None and case.gives_point_value(call):
        yield norm_kind_change(case.patched)
        points = (point_before_norm(case.patched, call.location),)
        yield norm_kind_change(case.patched, points, case.view.point)


def try_repeated_norm(case: Mismatch) -> Iterator[Change]:
    """Yield the change that applies the norm of the differing point twice."""
    call = case.call(*NORMS)
    if call is not None and case.gives_point_value(call):
        points = (point_before_norm(case.patched, call.location),)
        says = f"the norm at {case.view.point} is applied twice"
        values = {"times": 2, "behind": points}
        yield Change("norm_skipped", says, ("norm",), repeat_norms(points), values)


def try_rounded_norms(case: Mismatch) -> Iterator[Change]:
    """Yield the changes that round norms to a 16-bit type before the weight is multiplied."""
    if case.gives_point_value(case.call(*NORMS)):
        for dtype in ("bfloat16", "float16"):
            says = f"norms are rounded to {dtype} before their weight is multiplied"
            yield Change("rounding", says, NORMS, round_before_weight(dtype), {"dtype": dtype})


def find_norm_weight(case: Mismatch) -> Iterator[Change]:
    """Yield the change to the norm weight solved from the trace, if it fits all rows."""
    call = case.call(*NORMS)
    if call is None:
        return
    theirs = case.recorded_result(call)
    key = norm_key(case)
    if theirs is None or key is None:
        return
    yield from _exchanged_norms(case, key)
    # Remove bias and weight from the reference's result.
    ours, bias = case.array(call.result), None
    if call.op == "layer_norm" and call.args[2] is not None:
        bias = case.array(call.args[2])
    w = np.asarray(case.patched.stored[key].numpy(), np.float64)
    width = ours.shape[-1]
    factor = w.reshape(-1)[-width:] + float(call.kwargs.get("offset", 0)) if w.ndim == 1 else None
    if factor is None or factor.shape != (width,):
        return
    shift = 0.0 if bias is None else np.asarray(bias, np.float64)
    mine = (np.asarray(ours, np.float64) - shift).reshape(-1, width)
    other = (np.asarray(theirs, np.float64) - shift).reshape(-1, width)
    plain = np.divide(mine, factor, out=np.zeros_like(mine), where=factor != 0)
    # The least-squares weight of each column must explain all rows.
    weights = np.sum(other * plain, 0) / np.maximum(np.sum(plain * plain, 0), 1e-300)
    if not case.agree(plain * weights, other):
        return
    stored = weights - float(call.kwargs.get("offset", 0))
    yield from _name_norm_weight(case, key, stored)


def _exchanged_norms(case: Mismatch, key: str) -> Iterator[Change]:
    """Yield changes in which the norm `key` has weight and bias of another norm of its layer.

    The two are exchanged, or the other one keeps its own: in parallel branches that is one norm for
    both.

    Nothing for norms without a bias: their weight is solved.
    """
    stored = case.patched.stored
    if key.replace(".weight", ".bias") not in stored:
        return
    for other in weights_of_same_shape(case.patched, key):
        biases = [each.replace(".weight", ".bias") for each in (key, other)]
        if split_key(other)[0] != split_key(key)[0] or not all(b in stored for b in biases):
            continue
        role, read = (split_key(name)[1].removesuffix(".weight") for name in (key, other))
        if (role, read) in BRANCHES and case.patched.hp["parallel_residual"]:
            yield _shared_norm_change(case.patched, role, read)
        else:
            says = f"{read} is read in place of {role}, too, weight and bias"
            make = replace_weights(_norms_of_role(case.patched, role, read))
            yield Change("copied_tensor", says, (role,), make, {"read": read})
        pairs = {key: other, other: key, biases[0]: biases[1], biases[1]: biases[0]}
        yield Change(
            "swapped_tensors", f"{key} and {other} stand under each other's names, biases too",
            (key, other), replace_weights({a: stored[b].numpy() for a, b in pairs.items()}),
            scoped=False,
        )  # fmt: skip


# Roles of two norms of one stream, in a layer with parallel branches -> who reads the other's.
BRANCHES: Mapping[tuple[str, str], str] = {
    ("ffn_norm", "attn_norm"): "the MLP reads attention's norm, not its own",
    ("attn_norm", "ffn_norm"): "attention reads the MLP's norm, not its own",
}


def usual_shared_norms(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes that give a branch the other one's norm; only for two norms of one stream."""
    if not patched.hp["parallel_residual"]:
        return
    for role, read in BRANCHES:
        if _norms_of_role(patched, role, read):
            yield _shared_norm_change(patched, role, read)


def _shared_norm_change(patched: PatchedModel, role: str, read: str) -> Change:
    """Return the change that the branch with the norm `role` reads the norm `read` of the other."""
    make = replace_weights(_norms_of_role(patched, role, read))
    return Change("residual", BRANCHES[role, read], (role,), make, {"reads": read})


def _norms_of_role(patched: PatchedModel, role: str, read: str) -> dict[str, Any]:
    """Return {key of a norm's weight or bias of `role`: values of the one of `read`}, all layers.

    Layers that lack one of the two norms are left out.
    """
    stored = patched.stored
    pairs = [
        (role_key(layer, f"{role}.{part}"), role_key(layer, f"{read}.{part}"))
        for layer in range(patched.n_layers)
        for part in ("weight", "bias")
    ]
    return {own: stored[there].numpy() for own, there in pairs if own in stored and there in stored}


def _name_norm_weight(case: Mismatch, key: str, stored: Any) -> Iterator[Change]:
    """Yield the change to a norm weight solved from the trace, named by what it is.

    It is another tensor of the model, a multiple of the weight, or other values. `key` is the
    norm's weight, `stored` the solved values.
    """
    own = np.asarray(case.patched.stored[key].numpy(), np.float64)
    for other in weights_of_same_shape(case.patched, key):
        if case.agree(np.asarray(case.patched.stored[other].numpy(), np.float64), stored):
            yield from other_weight_changes(case, key, other)
            return
    factor = float(np.sum(stored * own) / np.sum(own * own)) if own.any() else 0.0
    if factor and case.agree(own * factor, stored):
        cause, says = "scale", f"{key} is multiplied by {factor:.6g}"
    else:
        cause, says = "stale_tensor", f"{key} has other values (solved from the norm's output)"
    yield Change(
        cause, says, (key,), replace_weights({key: stored.reshape(own.shape)}),
        {"factor": factor} if cause == "scale" else {}, scoped=False, general=True,
    )  # fmt: skip


_ROLES = {
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "attn_contrib": "post_attention_norm",
    "ffn_contrib": "post_ffw_norm", "q_a_norm": "attn_q_a_norm", "kv_a_norm": "attn_kv_a_norm",
    "final_norm": "output_norm",
}  # fmt: skip


def norm_key(case: Mismatch) -> str | None:
    """Return the key of the weight of the norm that gives the differing capture point.

    The key is "L3.attn_norm.weight" or the like. None if no norm gives the point, or it has no
    weight.
    """
    role = _ROLES.get(case.view.point)
    if role is None:
        return None
    key = f"{role}.weight" if case.layer < 0 else f"L{case.layer}.{role}.weight"
    return key if key in case.patched.weights else None


# What is said of weights [heads, d] -> those that the engine took.
HEAD_WEIGHTS: Mapping[str, Callable[[Any], Any]] = {
    "every head has the first one's norm weight": lambda w: np.repeat(w[:1], len(w), 0),
    "the norm's weights are read with heads and elements exchanged": lambda w: np.ascontiguousarray(
        w.reshape(w.shape[::-1]).T
    ),
}
SIDES: Mapping[str, tuple[str, ...]] = {"q and k": ("v", "q_norm"), "q": ("v",), "k": ("q_norm",)}


def head_weight_changes() -> Iterator[Change]:
    """Yield changes of norms with a weight per head: the first head's for all, or transposed.

    They change nothing where all heads have one weight.
    """
    for says, used in HEAD_WEIGHTS.items():
        for side, points in SIDES.items():
            yield Change(
                "qk_norm",
                f"of {side} {says}",
                ("qk_norm",),
                partial(_use_head_weights, used, points),
                {"weights": says, "of": side},
            )


def _use_head_weights(
    used: Callable[[Any], Any], points: Collection[str], patched: PatchedModel, layers: Layers
) -> PatchedModel:
    """Return the model whose norms after `points`, in `layers`, use used(weights [heads, d])."""

    def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of `x`, with used(w) as weights where they are [heads, d].

        Only norms that follow one of the capture points `points` are changed.
        """
        own = getattr(w, "ndim", 1) > 1 and point_before_norm(patched, at) in points
        return op(x, used(np.asarray(w)) if own else w, *args, **kwargs)

    return patched.with_ops(NORMS, override, layers)


def try_head_weights(case: Mismatch) -> Iterator[Change]:
    """Yield changes of norm weights by head, where a norm before the point has them."""
    if any(getattr(call.args[1], "ndim", 1) > 1 for call in case.calls(*NORMS)):
        yield from head_weight_changes()


def see_factors_of_rows(pair: PointPair) -> str:
    """Return that each row of a norm's result differs by its own factor; "" if not."""
    if not pair.point.endswith("norm"):
        return ""
    squares = np.maximum(np.sum(pair.rows * pair.rows, 1), 1e-300)
    theirs = pair.rows + pair.away
    ratio = np.sum(pair.rows * theirs, 1) / squares
    alike = rel_l2(pair.rows * ratio[:, None], theirs) < ALIKE
    return "each row differs by a factor of its own" if alike else ""


HYPOTHESES = (
    Hypothesis("norm_eps", find_eps, 50, "one number for all rows, before weights"),
    Hypothesis("norm_eps", try_eps_outside, 52, "another rule of it, after its number"),
    Hypothesis("norm_kind", try_norm_kinds, 54, "the rule, once its number is right"),
    Hypothesis("norm_skipped", try_repeated_norm, 56, "the right rule, too often"),
    Hypothesis("rounding", try_rounded_norms, 58, "the right rule, rounded"),
    Hypothesis("qk_norm", try_head_weights, 59, "the right weights, of other heads"),
    Hypothesis("norm_offset", try_norm_offsets, 60, "one constant, before weights of other values"),
    Hypothesis(
        "stale_tensor", find_norm_weight, 70, "a vector that is solved fits more than a number"
    ),
    PointSignature("norm_eps", see_factors_of_rows, 1060, "a factor of each row, after one of all"),
    FittedNumber("norm_eps", eps_change, 2030, "the smallest effect of them all"),
)
