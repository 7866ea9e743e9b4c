"""Models that consist of another model's layers or MLP channels: which of them.

Layers were removed, repeated or put in another order (depth pruning and up-scaling), or channels
of the MLP were cut (width pruning). All values that are left are the other model's, to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.number_ranges import number_ranges
from aprfmt.causes import CAUSES
from aprfmt.causes.tensor.context import sample_line
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.row_reader import RowReader
from aprfmt.model import Model
from aprfmt.model.config_paths import path_of_name, value_at_path
from aprfmt.tensors.view import View

SIZES = ("n_layers", "ffn_size")  # those that differ when layers or channels were taken
_ALL_SIZES = (*SIZES, "hidden_size", "vocab_size", "n_experts")
_CUT = ("ffn_gate.", "ffn_up.", "ffn_down.")  # begin the roles that have the MLP's channels

SHOWN = 8  # runs of channels that a sentence names
_MOST = 16  # runs of layers

Layer = Mapping[str, View]


def taken_parts_text(a: Model, b: Model, labels: tuple[str, str] = ("A", "B")) -> str:
    """Return the sentence that B consists of certain layers and MLP channels of A, else "".

    "" too where the two have different blocks, or the same layers and channels. Values are compared
    as stored: layers that were rounded, quantized or trained since are not found. `labels` are the
    letters of the two models.
    """
    if not a.hyper or not b.hyper or a.spec.block != b.spec.block:
        return ""
    other = {name for name in _ALL_SIZES if a.hyper[name] != b.hyper[name]}
    if not other or not other <= {*SIZES}:
        return ""
    whole, part = labels
    first, second = _layers_of(a.roles), _layers_of(b.roles)
    outside, others = first.pop(None, {}), second.pop(None, {})
    if not first or not second or not _all_equal(outside, others):
        return ""
    narrower = a.hyper["ffn_size"] != b.hyper["ffn_size"]
    origins: list[int] = []
    channels: dict[int, list[int]] = {}
    for layer in sorted(number for number in second if number is not None):
        mine = second[layer]
        near = [layer, *(number for number in first if number not in (layer, None))]
        for number in near:
            if number not in first or not _all_equal(first[number], mine, narrower):
                continue
            if narrower:
                found = _channels(first[number], mine)
                if found is None:
                    continue
                channels[layer] = found
            origins.append(int(number or 0))
            break
        else:
            return ""
    said = []
    if origins != list(range(len(first))):
        from_layers = number_ranges(origins, _MOST)
        said.append(f"{part}'s layers 0-{len(origins) - 1} are {whole}'s layers {from_layers}")
        lost = sorted({n for n in first if n is not None} - set(origins))
        said += (
            [f"{whole}'s {_layers_text(lost)} {'are' if len(lost) > 1 else 'is'} not in {part}"]
            if lost
            else []
        )
    if channels:
        wide = a.hyper["ffn_size"]
        layer, own = next(iter(channels.items()))
        some = len(own)
        shown = f"layer {layer}: {number_ranges(own, SHOWN)}"
        said.append(
            f"{some} of {whole}'s {wide} channels of each MLP were kept, such as of {shown}"
        )
    if not said:
        return ""
    said.append(f"all values are {whole}'s")
    return "; ".join([*said, *_other_kinds(a, b, origins, labels)])


def _other_kinds(
    a: Model, b: Model, origins: Sequence[int], labels: tuple[str, str]
) -> Iterator[str]:
    """Yield a clause for each per-layer hyperparameter whose value in B is not that of A's layer.

    `origins` gives, for each layer of B, its layer in A. This happens where a list of the
    configuration was cut at its end while layers were removed from the middle. `labels` are the
    letters of the two models.
    """
    whole, part = labels
    for name, mine in b.hyper.items():
        theirs = a.hyper.get(name)
        if not (isinstance(mine, tuple) and isinstance(theirs, tuple)):
            continue
        if len(mine) != len(origins) or len(theirs) != a.hyper["n_layers"] or mine == theirs:
            continue
        other = [at for at, origin in enumerate(origins) if mine[at] != theirs[origin]]
        if other:
            at = other[0]
            read = b.resolution.report.read
            keys = [key for key in read if read[key] == name and _is_list(b, key)]
            stated = f" ({', '.join(keys)})" if keys else ""
            many = "are" if len(other) > 1 else "is"
            yield (
                f"but {part}'s {_layers_text(other)} {many} of another kind: {name}{stated} is "
                f"{mine[at]!r} for layer {at}, and {theirs[origins[at]]!r} for {whole}'s layer "
                f"{origins[at]}"
            )


def _is_list(model: Model, key: str) -> bool:
    """Return whether a key of config.json, or of the metadata, has a list as its value."""
    config = model.config or {}
    value = value_at_path(config, path_of_name(config, key))
    return isinstance(model.metadata.get(key) if value is None else value, list | tuple)


def _layers_text(layers: list[int]) -> str:
    """Return layers in words, such as "layer 1" or "layers 1, 3-4"."""
    return f"layer{'s' if len(layers) > 1 else ''} {number_ranges(layers, _MOST)}"


def _layers_of(roles: Mapping[str, View]) -> dict[int | None, dict[str, View]]:
    """Return {layer: {role: tensor}}; None for what is in no layer."""
    found: dict[int | None, dict[str, View]] = {}
    for key, view in roles.items():
        layer, role = split_key(key)
        found.setdefault(layer, {})[role] = view
    return found


def _all_equal(first: Layer, second: Layer, narrower: bool = False) -> bool:
    """Return whether two layers have the same tensors with equal values.

    With `narrower` the tensors that have the MLP's channels as an axis are left out.
    """
    if first.keys() != second.keys():
        return False
    pairs = [
        (RowReader(first[role]), RowReader(second[role]))
        for role in first
        if not (narrower and role.startswith(_CUT))
    ]
    if any(a.shape != b.shape or a.encoding != b.encoding for a, b in pairs):
        return False
    # A sample of each, then all values.
    if not all(np.array_equal(sample_line(a), sample_line(b)) for a, b in pairs):
        return False
    equal = all(np.array_equal(a.whole, b.whole) for a, b in pairs)
    for a, b in pairs:
        a.drop()
        b.drop()
    return equal


def _channels(first: Layer, second: Layer) -> list[int] | None:
    """Return, for each channel of the second MLP, its index in the first.

    None if a matrix of the MLP disagrees.
    """
    roles = [role for role in first if role.startswith(_CUT)]
    made: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for role in roles:
        x, y = (RowReader(side[role]).whole for side in (first, second))
        made[role] = (x.T, y.T) if role == "ffn_down.weight" else (x, y)
    down = "ffn_down.weight"
    if down not in made or made[down][0].shape[1] != made[down][1].shape[1]:
        return None
    own = {row.tobytes(): number for number, row in enumerate(np.ascontiguousarray(made[down][0]))}
    at = [own.get(row.tobytes(), -1) for row in np.ascontiguousarray(made[down][1])]
    if -1 in at:
        return None
    for role, (x, y) in made.items():
        kept = x if role == "ffn_down.bias" else x[at]
        if not np.array_equal(kept, y):
            return None
    return at


def taken_finding(says: str, tensors: int) -> Finding:
    """Return the finding that one model consists of layers or channels of the other.

    `says` is its sentence. `tensors` is the number of tensors of the smaller model, all of which
    were found equal.
    """
    return Finding(
        "derived", says, "identity", CAUSES["derived"].verdict, (), True, "", 1.0, 0.0,
        "share of the smaller model's tensors that are not the other's; before: by their names, "
        "counted as 1",
        counted=True, proof=unfitted_proof(tensors),
    )  # fmt: skip
