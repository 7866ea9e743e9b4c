"""Opens the model of a diagnosis with an adapter merged into it, as an engine serves both."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.adapters.merge_answers import wrong_scale_factors
from aprfmt.adapters.merging import MergedTensor, RenamedTensor, merge_adapter
from aprfmt.inference.replay.served_adapter import ServedAdapter
from aprfmt.model import Model
from aprfmt.tensors.view import View

Array = NDArray[Any]


def merge_served_adapter(
    model: Model, adapter: Path, stack: ExitStack
) -> tuple[Model, ServedAdapter]:
    """Return the model with an adapter merged, and the adapter, to be merged otherwise.

    The merged weights are float32, as what an engine adds at run time is not rounded to the type
    of the base's. Packed weights are decoded first. `stack` closes the adapter's file. Raises
    ConversionError for an adapter of another base, and what `merge_adapter` raises.
    """
    made, opened, found = merge_adapter(model, adapter, decoded=True, encoding="F32")
    stack.enter_context(opened)
    changed = {
        key: view
        for key, view in made.roles.items()
        if any(isinstance(one, MergedTensor | RenamedTensor) for one in view.stored)
    }
    mistakes: dict[str, dict[str, float]] = {}
    for key, view in changed.items():
        for factor in wrong_scale_factors(view, found):
            words = factor.says.rpartition(" (")[0]
            mistakes.setdefault(words, {})[key] = factor.times
    held: dict[str, tuple[Array, Array]] = {}

    def merged(times: Mapping[str, float]) -> Mapping[str, Array]:
        """Return {role key: values, float32}, each change multiplied by its number."""
        return {
            key: _values(changed[key], number, model, key, held) for key, number in times.items()
        }

    def rounded() -> Mapping[str, Array]:
        """Return {role key: values} of the weights as they are stored in the base's plain types."""
        views = {key: _in_types_of_base(view) for key, view in changed.items()}
        return {key: np.asarray(one.numpy(), np.float32) for key, one in views.items() if one}

    return made, ServedAdapter(
        str(adapter),
        tuple(changed),
        tuple((says, each) for says, each in mistakes.items()),
        merged,
        rounded,
    )


def _in_types_of_base(view: View) -> View | None:
    """Return the view of a merged weight in the types of the base's; None if these are float32."""
    pairs = [one for one in view.stored if isinstance(one, MergedTensor)]
    if all(one.base.info.encoding == "F32" for one in pairs):
        return None
    stored = [
        MergedTensor(one.base, one.pair) if isinstance(one, MergedTensor) else one
        for one in view.stored
    ]
    return View(*stored, role=view.role, group=view.group, hp=view.sizes)


def _values(
    view: View, times: float, base: Model, key: str, held: dict[str, tuple[Array, Array]]
) -> Array:
    """Return a merged weight's values with the adapter's change multiplied by `times`, float32.

    `held` keeps (the base's values, the change) of weights without magnitudes. A tensor that the
    adapter replaces as a whole is the base's where `times` is 0, and otherwise the adapter's.
    """
    pairs = [one for one in view.stored if isinstance(one, MergedTensor)]
    if not pairs:
        stored = base.find(key)
        chosen = view if times or stored is None or stored.shape != view.shape else stored
        return np.asarray(chosen.numpy(), np.float32)
    if any(one.pair.magnitude is not None for one in pairs):
        return np.asarray(_scaled(view, times).numpy(), np.float32)
    if key not in held:
        own, whole = (np.asarray(_scaled(view, n).numpy(), np.float32) for n in (0.0, 1.0))
        held[key] = own, whole - own
    own, change = held[key]
    found: Array = own + np.float32(times) * change
    return found


def _scaled(view: View, times: float) -> View:
    """Return the view of a merged weight with each pair's scale multiplied; of the base for 0."""
    stored = [
        one
        if not isinstance(one, MergedTensor)
        else one.with_pair(replace(one.pair, scale=one.pair.scale * times))
        if times
        else one.base
        for one in view.stored
    ]
    return View(*stored, role=view.role, group=view.group, hp=view.sizes)
