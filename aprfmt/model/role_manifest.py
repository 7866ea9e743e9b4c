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

    An engine's parameter joins several published ones, such as q, k and v. Where an engine stores
    rows of a published tensor in another order, its order counts. Raises UsageError for a parameter
    that cannot be divided into `ranks` equal shares.
    """
    from aprfmt.arch.binding import bind_names
    from aprfmt.arch.element_moves import to_logical
    from aprfmt.arch.engine_parameters import divide_parameter, list_parameters

    shapes = {name: model[name].shape for name in names}
    bound = bind_names(model.spec, "hf", names)
    hyper = model.hyper
    found = {}
    for parameter in list_parameters(model.spec, bound.groups, shapes, hyper):
        if not parameter.megatron and not (parameter.regrouped and parameter.names[0] in found):
            found.update(dict.fromkeys(parameter.names, parameter))
    for name in names:
        if name not in found:
            yield name, [np.asarray(model[name].numpy(), np.float32)] * ranks
    for name, parameter in found.items():
        layout = divide_parameter(parameter, ranks, PADDED)
        if layout is None:
            raise UsageError(f"--ranks {ranks}: {name} has no such number of equal shares")
        arrays = [
            array
            for part in parameter.parts
            for array in to_logical(
                part.steps,
                [np.asarray(model[one].numpy(), np.float32) for one in part.stored],
                hyper,
            )
        ]
        yield name, [layout.rank_array(arrays, rank) for rank in range(ranks)]
