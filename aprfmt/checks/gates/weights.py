"""The gate on statistics of weights, by role, inside the bounds of bounds.py.

Statistics find weights that were never filled, were read under another type, or lost a scale. They
prove nothing about single elements: that is what `aprfmt diff` is for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.arch.spec import split_key
from aprfmt.base.encodings import find_encoding
from aprfmt.base.outcome import Check, check
from aprfmt.checks import bounds
from aprfmt.checks.bounds import RoleBounds, bounded_numbers, role_bounds, tensor_bounds
from aprfmt.checks.gates.model_under_test import ModelUnderTest
from aprfmt.checks.records import Measure, Result, list_names
from aprfmt.tensors.stats import Accumulator, Stats, merge_stats, tensor_stats
from aprfmt.tensors.view import View

ELEMENTS_AT_ONCE = 1 << 22  # elements decoded at a time


@dataclass(frozen=True)
class RoleStats:
    """One tensor of a role: its statistics, and those numbers of them that have bounds."""

    key: str
    stats: Stats
    numbers: Mapping[str, float]


def check_init_statistics(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks pass if mean, std, RMS and zeros of all weights are usual.

    Integers are no weights. The bounds are those of the tensor's role. `measures` has mean and std
    of each role.
    """
    model = subject.model
    arch, block = model.spec.name, model.spec.block
    by_role: dict[str, list[RoleStats]] = {}
    limits: dict[str, RoleBounds] = {}
    for key, tensor in model.roles.items():
        if find_encoding(tensor.encoding).numpy.startswith(("int", "uint", "bool")):
            continue
        role = split_key(key)[1]
        offset = float(block.norm_offset) if "rms" in role_bounds(arch, role) else 0.0
        limits[role] = tensor_bounds(arch, role, tensor.shape)
        stats = logical_stats(tensor)
        by_role.setdefault(role, []).append(RoleStats(key, stats, bounded_numbers(stats, offset)))
    checks = [_check_role(role, rows, limits[role]) for role, rows in by_role.items()]
    if "token_embd.weight" in model.roles:
        checks.append(_check_dead_rows(model.roles["token_embd.weight"]))
    measures = {
        f"{role} {name}": Measure(
            value, "weight", 1e-3, "relative", "the same weights have the same statistics"
        )
        for role, rows in by_role.items()
        for name, value in _mean_and_std(rows).items()
    }
    details = {role: _role_to_json(rows) for role, rows in by_role.items()}
    return Result(checks=checks, measures=measures, details={"roles": details})


def logical_stats(tensor: View) -> Stats:
    """Return the statistics of a logical tensor, decoded some rows at a time."""
    if tensor.moves is not None and len(tensor.roles) == 1:
        return merge_stats(tensor_stats(stored) for stored in tensor.stored)  # moved, not changed
    accumulator = Accumulator()
    for *_, rows in tensor.chunks(ELEMENTS_AT_ONCE):
        accumulator.add(rows)
    return accumulator.result()


def _check_role(role: str, rows: list[RoleStats], bound: RoleBounds) -> Check:
    """Return the check that all tensors of a role are inside its bounds.

    `rows` are the statistics of those tensors.
    """
    wrong: list[str] = []
    for row in rows:
        if row.stats.nan or row.stats.inf:
            wrong.append(f"{row.key} has {row.stats.nan} NaN and {row.stats.inf} infinities")
            continue
        for name, limit in bound.items():
            value = row.numbers[name]
            if not limit.holds(value):
                wrong.append(f"{row.key} {name} {value:.4g}")
    expected = "; ".join(f"{name} {limit}" for name, limit in bound.items())
    ranges = _role_to_json(rows)["range"].items()
    seen = ", ".join(f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in ranges)
    return check(f"weights-{role}", not wrong, list_names(wrong) if wrong else seen, expected,
                 "compare with the source: were these weights filled, and read as their own type?",
                 f"{len(rows)} tensors")  # fmt: skip


def _mean_and_std(rows: list[RoleStats]) -> dict[str, float]:
    """Return {"mean", "std"} over all tensors of a role; {} where no value is finite."""
    stats = merge_stats(row.stats for row in rows)
    return {} if stats.mean is None or stats.std is None else {"mean": stats.mean, "std": stats.std}


def _role_to_json(rows: list[RoleStats]) -> dict[str, Any]:
    """Return a role's JSON: number of tensors, statistics over all, range of each bounded number.

    `rows` are the statistics of the role's tensors.
    """
    names = ("mean", "std", "rms", "absmax")
    return {
        "tensors": len(rows),
        "stats": merge_stats(row.stats for row in rows).to_json(),
        "range": {name: [min(found), max(found)] for name in names
                  for found in [[row.numbers[name] for row in rows]]},
    }  # fmt: skip


def _check_dead_rows(tensor: View) -> Check:
    """Return the check that few rows of the embedding [vocab, hidden] are all zeros.

    Rows that pad the vocabulary are.
    """
    dead = 0
    for *_, rows in tensor.chunks(ELEMENTS_AT_ONCE):
        dead += int(np.count_nonzero(np.linalg.norm(rows, axis=-1) < bounds.DEAD_ROW_L2))
    share = dead / tensor.shape[0] if tensor.shape else 0.0
    bound = bounds.DEAD_ROWS
    return check("embedding-rows", bound.holds(share), f"{dead} of {tensor.shape[0]} are zeros",
                 f"{bound} {bound.unit}: {bound.reason}",
                 "compare with the source: part of the vocabulary is empty")  # fmt: skip
