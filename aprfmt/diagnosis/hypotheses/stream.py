"""Hypotheses about the embedding, the residual stream, the factors on it and the logits."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.compare.measured import rel_l2
from aprfmt.diagnosis.hypotheses.attention import cap_of
from aprfmt.diagnosis.hypotheses.product import numbers, overlaid
from aprfmt.diagnosis.hypotheses.steps import side_by_side
from aprfmt.diagnosis.mismatch import Change, Layers, Mismatch, hyper_change
from aprfmt.inference.replay.patched_model import OperationCall, PatchedModel
from aprfmt.tensors.norms import norm

Array = NDArray[Any]
# Point -> the hyperparameter of the factor before it.
FACTORS = {
    "embd": "embedding_scale", "embd_scaled": "embedding_scale", "attn_contrib": "residual_scale",
    "ffn_contrib": "residual_scale", "mid": "residual_scale", "out": "residual_scale",
    "logits": "logit_scale", "logits_raw": "logit_scale",
}  # fmt: skip

EXPERTS = ("router", "experts", "expert_w", "router_margin")  # points inside a mixture


def embedding_rows(case: Mismatch) -> Iterator[Change]:
    """Find the embedding rows that the trace used for the tokens."""
    call = case.call("embed")
    if call is None or case.view.point not in ("embd", "embd_scaled") or len(case.view.calls) > 2:
        return
    if call.args[0].key != "token_embd.weight":
        return
    table = numbers(case.patched, "token_embd.weight")
    if table is None:
        return
    theirs = case.view.theirs[case.rows].astype(np.float64)
    scale = float(case.patched.hp["embedding_scale"]) if case.view.point == "embd_scaled" else 1.0
    found = []
    for row in theirs[:32]:
        away = np.linalg.norm(table * np.float32(scale) - row.astype(np.float32), axis=1)
        best = int(np.argmin(away))
        if away[best] > 10 * case.view.tolerance * max(norm(row), 1e-30):
            return
        found.append(best)
    ids = np.asarray(case.patched.ids)[case.rows][: len(found)]
    shift = np.unique((np.asarray(found) - ids) % len(table))
    if len(shift) == 1 and shift[0]:
        move = int(shift[0]) if shift[0] <= len(table) // 2 else int(shift[0]) - len(table)
        yield Change(
            "row_offset",
            f"token_embd.weight is read {abs(move)} row{'s' if abs(move) > 1 else ''} "
            f"{'further on' if move > 0 else 'too early'}",
            ("token_embd.weight",),
            overlaid({"token_embd.weight": np.roll(table, -move, axis=0)}),
            {"offset": move},
            scoped=False,
        )


def factor_change(name: str, value: float, told: float) -> Change:
    """Return the change to another factor."""
    says = f"{name} is {value:.9g}; the model says {told:.9g}"
    return hyper_change("multiplier", says, **{name: value})


def factor(case: Mismatch) -> Iterator[Change]:
    """Find one factor on the whole point, or on the value added to the stream."""
    name = FACTORS.get(case.view.point)
    scaled = case.call("scale")
    if scaled is not None and not case.exact(scaled):
        yield from _coarse_factor(case, scaled)
        return
    if name is None:
        return
    told = float(case.patched.hp[name])
    if case.view.point in ("mid", "out"):
        yield from _added_factor(case, name, told)
        return
    ours, theirs = case.view.mine, case.view.theirs
    if name == "embedding_scale" and case.patched.spec.block.position == "learned":
        return
    if name == "logit_scale" and case.patched.hp["final_softcap"] is not None:
        cap = float(case.patched.hp["final_softcap"])
        inside = np.abs(theirs) < 0.99 * cap
        ours, theirs = (cap * np.arctanh(x[inside] / cap) for x in (ours, theirs))
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    power = float(np.sum(ours * ours))
    if not power or ours.shape != theirs.shape:
        return
    found = float(np.sum(ours * theirs)) / power
    if found and rel_l2(ours * found, theirs) <= 20 * case.view.tolerance:
        if abs(found * told - 1) <= 20 * case.view.tolerance:
            yield factor_change(name, 1.0, told)
            return
        yield from case.rounded(lambda v: factor_change(name, v, told), found * told)


def _coarse_factor(case: Mismatch, call: OperationCall) -> Iterator[Change]:
    """Try common factors if the trace does not hold the scaled value itself."""
    name = (
        "embedding_scale"
        if call.at.point == "embd"
        else ("logit_scale" if call.at.point in ("final_norm", "logits_raw") else "residual_scale")
    )
    told = float(case.patched.hp[name])
    plain = factor_change(name, 1.0, told)
    if case.trial(plain) <= case.view.tolerance:
        yield plain
        return
    tries = (told * 2.0**k for k in (-3, -2, -1, 1, 2, 3))
    yield from case.best_number(lambda v: factor_change(name, v, told), tries)


def _added_factor(case: Mismatch, name: str, told: float) -> Iterator[Change]:
    call = case.call("add")
    if call is None or not case.exact(call) or case.patched.hp["parallel_residual"]:
        return
    stream, added = (case.array(x).astype(np.float64) for x in call.args)
    theirs = case.view.theirs - stream
    found = float(np.sum(theirs * added) / max(float(np.sum(added * added)), 1e-300))
    if found and rel_l2(added * found, theirs) <= 100 * case.view.tolerance:
        yield from case.rounded(lambda v: factor_change(name, v, told), found * told)


def residual(case: Mismatch) -> Iterator[Change]:
    """Leave out one summand, or give both sublayers the same input."""
    adds = case.calls("add")
    if case.layer < 0:
        return
    if case.view.point == "scores":
        for index, call in enumerate(adds):
            yield Change(
                "positions", "nothing is added to the scores for the distance", ("scores",),
                kept(call.at.point, 0, _turn(adds, index)), {"score_bias": None},
            )  # fmt: skip
        return
    for says, keep in (
        ("what the sublayer computed replaces the stream instead of being added", 1),
        ("what the sublayer computed is not added to the stream", 0),
    ):
        for index, call in enumerate(adds):
            if case.array(call.args[1]).ndim < 2:
                continue  # a bias
            if call.at.point.startswith(("per_layer", "altup")):
                continue  # no sublayer's sum: hypotheses of its own (per_layer.py)
            if call.at.point in EXPERTS:
                lost = "routed experts are" if keep else "shared expert is"
                yield Change(
                    "moe_routing", f"the {lost} left out", ("moe_out",),
                    kept(call.at.point, keep, _turn(adds, index)), {"left_out": lost},
                )  # fmt: skip
                continue
            yield Change(
                "residual",
                f"{says} (before {case.view.point})",
                ("residual",),
                kept(call.at.point, keep, _turn(adds, index)),
                {"kept": "added" if keep else "stream"},
            )
    if case.patched.spec.block.placement == "pre":
        yield parallel_change(case.patched)
        if not case.patched.hp["parallel_residual"]:
            yield beside()


def parallel_change(patched: PatchedModel) -> Change:
    """Return the change to sublayers in parallel where they stand in a row, or the reverse."""
    other = not patched.hp["parallel_residual"]
    says = "the MLP reads the stream after attention instead of the layer's input"
    if other:
        says = "attention and MLP read one input and are added together"
    return hyper_change("residual", says, parallel_residual=other)


def beside() -> Change:
    """Return the change to two norms that read one stream."""
    return Change(
        "residual", "attention and MLP read one stream, each by its own norm, and are added "
        "together", ("residual", "parallel_residual"), side_by_side, {"side_by_side": True},
    )  # fmt: skip


def _turn(adds: Any, index: int) -> int:
    """Return the number of this sum among the sums before the point."""
    return sum(call.at == adds[index].at for call in adds[:index])


def kept(point: str, keep: int, turn: int) -> Any:
    """Return a maker: the sum after a point keeps one summand only (1: what is added)."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        count: dict[Any, int] = {}

        def override(op: Any, at: Any, a: Any, b: Any) -> Any:
            if at.point != point or b.ndim < 2:
                return op(a, b)
            if count.get("at") != at:
                count.clear()
                count["at"], count["turn"] = at, 0
            here = count["turn"]
            count["turn"] += 1
            return (a, b)[keep] if here == turn else op(a, b)

        return patched.with_op("add", override, layers)

    return make


def final_cap(case: Mismatch) -> Iterator[Change]:
    """Try no cap on the logits, and the cap that gives the trace's logits."""
    if case.view.point != "logits":
        return
    told = case.patched.hp["final_softcap"]

    def change(value: float | None) -> Change:
        capped = "not capped" if value is None else f"capped at {value:g}"
        model = "caps none" if told is None else f"says {told:g}"
        says = f"the logits are {capped}; the model {model}"
        return hyper_change("softcap", says, final_softcap=value)

    ours = case.view.mine.astype(np.float64)
    if told is not None:
        yield change(None)
        inside = np.abs(ours) < float(told) * (1 - 1e-6)
        ours = np.where(inside, float(told) * np.arctanh(np.where(inside, ours, 0) / told), ours)
    found = cap_of(ours.reshape(-1), case.view.theirs.astype(np.float64).reshape(-1))
    if found is not None:
        yield from case.rounded(change, found)
