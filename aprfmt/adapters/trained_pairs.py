"""The pairs of an adapter (factors A and B of a module) as trainable factors, for gradients."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.adapters.pair_placement import weight_name, with_base_names
from aprfmt.arch.binding import bind_names
from aprfmt.arch.element_moves import to_logical
from aprfmt.errors import ArchError, UnsupportedError
from aprfmt.inference.gradients.adapter_pairs import AdapterPair
from aprfmt.model import Model
from aprfmt.model.adapter_reading import Adapter, StoredPair, read_adapter, read_factors

if TYPE_CHECKING:
    from aprfmt.arch.binding import BoundGroup


def open_trained_pairs(adapter: Path | None, base: Model, stack: ExitStack) -> list[AdapterPair]:
    """Return the pairs of the adapter at a path, kept open by `stack`; [] without an adapter.

    Raises UnsupportedError for a pair that gradients cannot be computed for, and for whole trained
    tensors.
    """
    if adapter is None:
        return []
    opened, found = read_adapter(adapter)
    stack.enter_context(opened)
    return trained_pairs(found, base)


def trained_pairs(adapter: Adapter, base: Model) -> list[AdapterPair]:
    """Return every pair of an adapter as an AdapterPair, which gradients can be computed for.

    Of a joined projection (qkv_proj) each role has some rows. Raises UnsupportedError for a pair of
    an embedding or of stacked experts, for DoRA's lengths of another spelling than PEFT's, and for
    whole trained tensors (modules_to_save).
    """
    found, _ = with_base_names(adapter, base)
    if found.replacements:
        name = next(iter(found.replacements))
        raise UnsupportedError(
            f"{adapter.path}: {name} is a whole trained tensor (modules_to_save); gradients with "
            "one are not computed: merge it into the base"
        )
    return [_trained_pair(found, module, pair, base) for module, pair in found.pairs.items()]


def _trained_pair(adapter: Adapter, module: str, pair: StoredPair, base: Model) -> AdapterPair:
    """Return one pair for gradients; UnsupportedError unless it is LoRA or DoRA at a linear layer.

    DoRA's lengths are taken only from PEFT's files: in kohya's they may be lengths of the other
    axis.
    """
    what = (
        "a pair for an embedding"
        if pair.embedding
        else "a pair for a single parameter"
        if pair.parameters
        else f"a pair with DoRA's lengths as {adapter.spelling} writes them"
        if "magnitude" in pair.parts and adapter.spelling != "peft"
        else "a pair whose factors MLX stores transposed"
        if pair.turned
        else ""
    )
    if what:
        raise UnsupportedError(
            f"{adapter.path}: {module} is {what}; gradients are computed of LoRA pairs at linear "
            "layers"
        )
    # Number the weight's elements, to see which rows each role gets.
    a, b = read_factors(pair)
    name = weight_name(adapter, module, base)
    group = _find_group(adapter, name, base)
    shape = (a.shape[1], b.shape[0]) if adapter.turned else (b.shape[0], a.shape[1])
    places = np.arange(shape[0] * shape[1]).reshape(shape)
    parts = to_logical(group.binding.steps, [places], base.hyper)
    rows = {
        role: _output_rows(adapter, name, part, shape)
        for role, part in zip(group.roles, parts, strict=True)
    }
    if "magnitude" in pair.parts and any("ffn_gate_inp" in role for role in group.roles):
        raise UnsupportedError(
            f"{adapter.path}: {module} is a router with DoRA's lengths; gradients are computed of "
            "those at other linear layers"
        )
    key = group.roles[0] if len(group.roles) == 1 else name
    names = {f"{key}.lora_{which}": pair.parts[which].names[0] for which in ("a", "b")}
    lengths = None
    if "magnitude" in pair.parts:
        held = pair.parts["magnitude"]
        names[f"{key}.lora_magnitude"] = held.names[0]
        lengths = held.numpy().reshape(-1)
    return AdapterPair(names, a, b, pair.scale, rows, lengths)


def _find_group(adapter: Adapter, name: str, base: Model) -> "BoundGroup":
    """Return the binding of the base's weight called `name`: its roles and layout steps.

    UnsupportedError if it is no weight of the architecture, or is stored with others as one.
    """
    style = "gguf" if adapter.spelling == "gguf" else "hf"
    try:
        groups: Sequence[BoundGroup] = bind_names(base.spec, style, [name]).groups
    except ArchError:
        groups = ()
    if len(groups) != 1 or len(groups[0].stored) != 1:
        raise UnsupportedError(
            f"{adapter.path}: {name} is no weight of its own of {base.spec.name}; gradients are "
            "computed of LoRA pairs at linear layers"
        )
    return groups[0]


def _output_rows(
    adapter: Adapter, name: str, places: Any, shape: tuple[int, ...]
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return for each row of a role's weight which output of the module it computes (int64).

    `places` [out, in] has, for each element of the role's weight, its flat index in the stored
    weight, whose shape is `shape`. Raises UnsupportedError where columns are reordered too.
    """
    columns = np.arange(places.shape[-1])
    if adapter.turned:
        rows = places[:, 0] % shape[1]
        expected = columns[None, :] * shape[1] + rows[:, None]
    else:
        rows = places[:, 0] // shape[1]
        expected = rows[:, None] * shape[1] + columns[None, :]
    if places.ndim != 2 or not np.array_equal(places, expected):
        raise UnsupportedError(
            f"{adapter.path}: {name} is laid out in more than an order of rows; its gradients are "
            "not computed"
        )
    return np.ascontiguousarray(rows)
