"""Digests of a model's weights as an engine holds them, for a script in the engine to compare.

Each parameter has its name in vLLM and SGLang (joined `qkv_proj` and `gate_up_proj`, stacked
experts) next to the published one, and one digest for each tensor-parallel rank: SHA-256 of the
little-endian float32 values of the rank's share. `rows` is how many rows of the share count: a
table of the vocabulary has padding after them. `of` are the published tensors in it: a published
tensor that is in no parameter of an engine was not loaded.
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
    """Return {engine's parameter name: {sha256, rows, of}}.

    `sha256` and `rows` have an entry per rank. `of` are the published tensors that the parameter
    holds, with the embedding in place of an equal head; [] for what an engine computes itself.
    Raises UsageError for a number of ranks that does not divide a tensor, or names that are not
    Hugging Face's.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"--ranks {ranks}: expected 1 to {MAX_RANKS}")
    found: dict[str, dict[str, Any]] = {}
    names = list(model)
    weights = set(names) - _not_weights(model)
    first = _first_names(model, names)
    for number, (name, shares, stored) in enumerate(_engine_parameters(model, names, ranks)):
        digests, counts = [], []
        for share in shares:
            values = np.ascontiguousarray(share, "<f4")
            digests.append(hashlib.sha256(values.tobytes()).hexdigest())
            counts.append(len(values) if values.ndim else 1)
        of = [first.get(one, one) for one in stored if one in weights]
        found[name] = {"sha256": digests, "rows": counts, "of": of}
        if progress is not None:
            progress(min(number + 1, len(names)), len(names))
    return found


def _not_weights(model: Model) -> set[str]:
    """Return the tensors that no engine needs: buffers, a draft head, and what no table lists."""
    found = model.resolution
    unread = () if found.unread is None else (info.name for info in found.unread.tensors)
    derived = (row.name(model.style or "") for row in model.spec.derived)
    return {*found.buffers, *found.draft, *derived, *unread}


def _first_names(model: Model, names: Sequence[str]) -> dict[str, str]:
    """Return {table with a row per token: the first such table}, for those equal to the first.

    An engine may hold equal tables once. Tables with other values are left out.
    """
    tables = [one for one in names if model[one].shape[:1] == (int(model.hyper["vocab_size"]),)]
    same = [one for one in tables if model[one].shape == model[tables[0]].shape]
    return {
        one: same[0]
        for one in same[1:]
        if np.array_equal(model[one].numpy(), model[same[0]].numpy(), equal_nan=True)
    }


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
) -> Iterator[tuple[str, list[Numbers], Sequence[str]]]:
    """Yield (name, [share of each rank], published tensors in it) of each parameter.

    Parameters come under published and engine names.

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
            yield name, [np.asarray(model[name].numpy(), np.float32)] * ranks, (name,)
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
        stored = [one for part in parameter.parts for one in part.stored]
        yield name, [layout.rank_array(arrays, rank) for rank in range(ranks)], stored
