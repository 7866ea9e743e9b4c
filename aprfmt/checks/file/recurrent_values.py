"""Checks of the parameters of recurrent layers: decay rates, skips and biases of time steps."""

import math
from collections.abc import Iterator, Mapping

from aprfmt.arch.recurrent_steps import NegativeExp
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.checks.records import CheckFinding, Level
from aprfmt.tensors.stats import Stats
from aprfmt.tensors.view import View

RATES = "ssm_a.weight"
CONSTANT = ("ssm_d.weight", "ssm_dt.bias")  # which begin as one number, and are trained
FEW = 4  # values from which a sign that all have is no chance
LARGEST = math.log(3.4028e38)  # logarithm of the largest number of float32
STEEP = 8.0  # logarithms of rates above it forget within a token; training begins up to log(16)


def stores_rates(logical: View) -> bool:
    """Return whether a file has the decay rates themselves, minus exponentials of `A_log`."""
    return any(isinstance(step, NegativeExp) for step in logical.layout)


def check_recurrent(measured: Mapping[str, tuple[View, Stats]]) -> Iterator[CheckFinding]:
    """Yield findings on parameters of recurrent layers, by the statistics of their stored values.

    `measured` has them by the keys of their roles. A rate above zero is impossible, as no minus
    exponential is; so is a logarithm whose exponential overflows. Logarithms that are all below
    zero or very large, and skips or biases that are one number in some layers alone, are warnings:
    a training may make them.
    """
    by_role: dict[str, dict[str, tuple[View, Stats]]] = {}
    for key, row in measured.items():
        by_role.setdefault(split_key(key)[1], {})[key] = row
    rates = by_role.get(RATES, {})
    stored = {key: row for key, row in rates.items() if stores_rates(row[0])}
    yield from _check_rates(stored)
    yield from _check_logarithms({key: row for key, row in rates.items() if key not in stored})
    for role in CONSTANT:
        yield from _check_constants(by_role.get(role, {}))


def _check_rates(rates: Mapping[str, tuple[View, Stats]]) -> Iterator[CheckFinding]:
    """Yield a failure if stored decay rates are above zero."""
    wrong = [key for key, (_, stats) in rates.items() if (stats.max or 0.0) > 0]
    if wrong:
        stats = rates[wrong[0]][1]
        yield CheckFinding(
            _place(rates, wrong),
            f"decay rates up to {stats.max:.4g}",
            "rates of zero or below: minus the exponential of A_log",
            "convert again: A_log, or its exponential, was stored as it is",
        )


def _check_logarithms(rates: Mapping[str, tuple[View, Stats]]) -> Iterator[CheckFinding]:
    """Yield findings on stored logarithms of decay rates that give none, or unusual ones."""
    over = [key for key, (_, stats) in rates.items() if (stats.max or 0.0) > LARGEST]
    steep = [key for key, (_, stats) in rates.items() if STEEP < (stats.max or 0.0) <= LARGEST]
    levels: tuple[tuple[list[str], Level], ...] = ((over, "fail"), (steep, "warning"))
    for wrong, level in levels:
        if wrong:
            stats = rates[wrong[0]][1]
            yield CheckFinding(
                _place(rates, wrong),
                f"logarithms of decay rates up to {stats.max:.4g}",
                "logarithms whose exponentials are rates: training begins with 0 to 2.8",
                "are these the rates themselves?",
                level,
            )
    values = sum(stats.count for _, stats in rates.values())
    if values >= FEW and all((stats.max or 0.0) < 0 for _, stats in rates.values()):
        yield CheckFinding(
            _place(rates, [*rates]),
            "every logarithm of a decay rate is below zero",
            "logarithms of both signs, or above zero",
            "are these the rates, minus the exponentials?",
            "warning",
        )


def _check_constants(found: Mapping[str, tuple[View, Stats]]) -> Iterator[CheckFinding]:
    """Yield a warning if one role's values are one number in some layers and not in others."""
    flat = [
        key
        for key, (_, stats) in found.items()
        if stats.count >= FEW and stats.min == stats.max is not None
    ]
    if flat and len(flat) < len(found):
        yield CheckFinding(
            _place(found, flat),
            f"every value is {found[flat[0]][1].min:g}",
            "different values, as in the other layers",
            "was the parameter loaded and trained?",
            "warning",
        )


def _place(rows: Mapping[str, tuple[View, Stats]], keys: list[str]) -> str:
    """Return the first key with its stored name, and how many more there are."""
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{keys[0]} ({rows[keys[0]][0].stored[0].info.name}){more}"
