"""Digests of a model's weights as an engine holds them, for a script in the engine to compare.

Each parameter has its name in vLLM and SGLang (joined `qkv_proj` and `gate_up_proj`, stacked
experts) beside the published one, and one digest for each tensor-parallel rank: SHA-256 of the
little-endian float32 values of the rank's share. `rows` is how many rows of the share count: a
table of the vocabulary has padding after them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import dumps
from aprfmt.model import Model
from aprfmt.model.engine_state import COLUMNS, JOINED, STACKED, TABLES

Numbers = NDArray[np.float32]
SCHEMA = "aprfmt.role-manifest/1"
# vLLM pads a vocabulary to a multiple of this, and ranks divide what comes out.
PADDED = 64
MAX_RANKS = 1024


def roles_path(model: Path) -> Path:
    """Return the path of a model's role manifest, in the model's folder."""
    return model.with_name(model.name + ".aprfmt-roles.json")


def parameter_rows(
    model: Model, ranks: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Return {engine's parameter name: {sha256, rows}} with one list entry per rank.

    Raises UsageError for a number of ranks that does not divide a tensor, or names that are not
    Hugging Face's.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"--ranks {ranks}: expected 1 to {MAX_RANKS}")
    found: dict[str, dict[str, Any]] = {}
    names = list(model)
    for number, (name, shares) in enumerate(_engine_parameters(model, names, ranks)):
        digests, counts = [], []
        for share in shares:
            values = np.ascontiguousarray(share, "<f4")
            digests.append(hashlib.sha256(values.tobytes()).hexdigest())
            counts.append(len(values) if values.ndim else 1)
        found[name] = {"sha256": digests, "rows": counts}
        if progress is not None:
            progress(min(number + 1, len(names)), len(names))
    return found


def write_role_manifest(model: Model, ranks: int, rows: Mapping[str, Any], *, force: bool) -> Path:
    """Write the role manifest into the model's folder and return its path.

    Raises OutputError where one exists and not `force`.
    """
    path = roles_path(model.path)
    body = {"schema": SCHEMA, "ranks": ranks, "parameters": dict(rows)}
    with FileSet(force=force) as files:
        files.create(path).write(dumps(body).encode() + b"\n")
    return path


def _engine_parameters(
    model: Model, names: Sequence[str], ranks: int
) -> Iterator[tuple[str, list[Numbers]]]:
    """Yield (name, [share of each rank]) of each parameter, under published and engine names.

    An engine's parameter joins several published ones, such as q, k and v.
    """
    there = set(names)
    head = int(model.hyper["head_dim"] or 1)

    def values(name: str) -> Numbers:
        """Return a tensor's values as float32."""
        return np.asarray(model[name].numpy(), np.float32)

    for name in names:
        above, _, leaf = name.rpartition(".")
        base, _, module = above.rpartition(".")
        yield name, _rank_shares(name, module, values(name), ranks, 1)
        for joined, parts in JOINED.items():
            every = [f"{base}.{part}.{leaf}" for part in parts]
            if module == parts[0] and joined != "W_pack" and there >= set(every):
                least = head if len(parts) == 3 else 1
                each = [
                    _rank_shares(one, part, values(one), ranks, least)
                    for one, part in zip(every, parts, strict=True)
                ]
                yield (
                    f"{base}.{joined}.{leaf}",
                    [np.concatenate([shares[rank] for shares in each]) for rank in range(ranks)],
                )
        before, _, number = base.rpartition(".")
        if number == "0" and before.endswith("experts"):
            yield from _expert_stacks(before, module, leaf, there, ranks, values)


def _expert_stacks(
    before: str,
    module: str,
    leaf: str,
    stored: set[str],
    ranks: int,
    values: Callable[[str], Numbers],
) -> Iterator[tuple[str, list[Numbers]]]:
    """Yield (name, [share of each rank]) of a stack [experts, ...] of all experts' matrices.

    Yields nothing unless `module` is the first of a stack's modules. `before` is the name before
    the expert's number, `stored` are all stored names, `values` reads a tensor.
    """
    for stacked, rows in STACKED.items():
        parts = next((row for row in rows if row[0] == module), None)
        if parts is None:
            continue
        experts = 0
        while f"{before}.{experts}.{module}.{leaf}" in stored:
            experts += 1
        at = 0 if len(parts) > 1 else 1
        each = [
            [
                np.concatenate(
                    [
                        np.split(values(f"{before}.{one}.{part}.{leaf}"), ranks, at)[rank]
                        for part in parts
                    ]
                )
                for one in range(experts)
            ]
            for rank in range(ranks)
        ]
        yield f"{before}.{stacked}", [np.stack(rank) for rank in each]


def _rank_shares(name: str, module: str, tensor: Numbers, ranks: int, least: int) -> list[Numbers]:
    """Return each rank's share of a tensor, as the engine divides this module.

    A share has at least `least` rows; several ranks share one if there are too few.
    """
    if ranks == 1 or (tensor.ndim < 2 and not _is_row_parallel(module)):
        return [tensor] * ranks
    if module in TABLES:
        total = -(-len(tensor) // PADDED) * PADDED
        if total % ranks:
            return _refuse_ranks(name, ranks)
        size = total // ranks
        return [tensor[rank * size : (rank + 1) * size] for rank in range(ranks)]
    if module in COLUMNS:
        if tensor.ndim < 2:
            return [tensor] * ranks
        return (
            list(np.split(tensor, ranks, 1))
            if tensor.shape[1] % ranks == 0
            else _refuse_ranks(name, ranks)
        )
    if not _is_row_parallel(module):
        return [tensor] * ranks
    if len(tensor) // ranks < least:
        copies = ranks * least // len(tensor)
        return [tensor[(rank // copies) * least :][:least] for rank in range(ranks)]
    return list(np.split(tensor, ranks)) if len(tensor) % ranks == 0 else _refuse_ranks(name, ranks)


def _is_row_parallel(module: str) -> bool:
    """Return whether ranks divide the rows of a module, as of q, k, v, gate and up."""
    return any(module in parts for parts in JOINED.values()) or module in ("w1", "w3")


def _refuse_ranks(name: str, ranks: int) -> list[Numbers]:
    """Raise UsageError: the tensor cannot be divided into that number of equal shares."""
    raise UsageError(f"--ranks {ranks}: {name} has no such number of equal shares")
