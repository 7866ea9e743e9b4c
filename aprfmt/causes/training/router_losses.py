"""Gradients with other factors of the routers' auxiliary losses than the batch states."""

from collections.abc import Iterator

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.backward_case import BackwardCase, BackwardGuess, BackwardHypothesis
from aprfmt.causes.training.batch_samples import FEWEST, NEAR, loss_differs
from aprfmt.causes.training.gradient_case import distance
from aprfmt.causes.training.optimizers import F64
from aprfmt.inference.gradients.changes import BackwardChange, RouterFactors

CAUSE_ROWS = (
    Cause(
        "router_loss",
        "gradient",
        "bug",
        "The auxiliary loss of the routers (load balancing, z-loss) is in the gradient where the "
        "batch does not state it, is missing where it does, or has another factor.",
        "Routers and what is below them differ, the head does not.",
        "The batch's gradients, computed with that loss, give every parameter's.",
    ),
)
LEAST = 1e-9  # a smaller factor is what rounding leaves of none
ROUTER = "ffn_gate_inp"
# What is tried, the fewest losses first: the fields of RouterFactors.
WAYS = (("balance",), ("by_layer",), ("z",), ("balance", "z"), ("by_layer", "z"))
WORDS = {
    "balance": "load balancing over all layers",
    "by_layer": "load balancing of each layer",
    "z": "the router's z-loss",
}


def guess_router_losses(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses of other factors of the routers' losses, solved on one gradient.

    A gradient is linear in these factors. The one used is that of the router that differs most;
    of an adapter, which trains no router, that of the parameter that differs most.
    """
    if not case.experts or loss_differs(case):
        return  # the loss of the labels is another one, too
    unlike = case.wrong | case.open
    every = [key for key in sorted(unlike) if case.case(key).given.size >= FEWEST]
    keys = [key for key in every if ROUTER in key]
    if not keys and not any(ROUTER in key for key in case.right):
        keys = every
    if not keys:
        return
    key = max(keys, key=lambda each: float(case.case(each).distance))
    plain = _gradient_with_losses(case, key, RouterFactors())
    units = {
        field: _gradient_with_losses(case, key, RouterFactors(**{field: 1.0})) - plain
        for field in dict.fromkeys(field for way in WAYS for field in way)
    }
    given = case.case(key).given.astype(np.float64).reshape(-1)
    found: list[tuple[float, RouterFactors]] = [(distance(given, plain), RouterFactors())]
    for way in WAYS:
        parts = np.stack([units[field] for field in way], axis=1)
        solved, *_ = np.linalg.lstsq(parts[::2], (given - plain)[::2], rcond=1e-9)
        values = [
            _written_number(float(x), getattr(case.routers, field))
            for x, field in zip(solved, way, strict=True)
        ]
        apart = distance(given, plain + parts @ np.array(values))
        if all(value > LEAST for value in values):
            found.append((apart, RouterFactors(**dict(zip(way, values, strict=True)))))
    # Of those that are as near, the one of fewer losses is first.
    for apart, factors in sorted(found, key=lambda each: float(f"{each[0]:.1g}")):
        if apart <= NEAR and factors != case.routers:
            yield BackwardGuess(
                "router_loss",
                _losses_sentence(factors, case.routers),
                BackwardChange(router=factors),
            )


def _gradient_with_losses(case: BackwardCase, key: str, factors: RouterFactors) -> F64:
    """Return a parameter's gradient, float64 [elements], with routers' losses of these factors."""
    found = case.recompute(BackwardChange(router=factors), case.names[key])
    return np.asarray(found.gradient(key), np.float64).reshape(-1)


def _written_number(value: float, stated: float) -> float:
    """Return the number that someone wrote: the stated one, or one of two digits, if near `value`.

    Else `value` itself.
    """
    for near in (stated, float(f"{value:.2g}")):
        if near and abs(value - near) <= NEAR * near:
            return near
    return value


def _losses_sentence(found: RouterFactors, stated: RouterFactors) -> str:
    """Return a sentence on each loss whose factor in the gradients is not the stated one."""
    fields = [field for field in WORDS if getattr(found, field) != getattr(stated, field)]
    parts = [
        _loss_sentence(field, getattr(found, field), getattr(stated, field)) for field in fields
    ]
    return "; ".join(parts)


def _loss_sentence(field: str, found: float, stated: float) -> str:
    """Return the sentence on one loss: its factor found in the gradients, and the stated one."""
    if not found:
        return f"{WORDS[field]} is not in the gradient, and is stated {stated:.3g} times"
    said = f"stated {stated:.3g} times" if stated else "not stated"
    return f"{WORDS[field]}, an auxiliary loss, is in the gradient {found:.3g} times; it is {said}"


HYPOTHESES = (
    BackwardHypothesis(
        ("router_loss",), guess_router_losses, 303, "begins at the router, with a gradient"
    ),
)
