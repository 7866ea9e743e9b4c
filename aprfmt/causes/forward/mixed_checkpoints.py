"""Finds a run that used one part of another checkpoint: head, embedding or a layer.

So it is where only some weights are synchronised: a rollout engine keeps its old head. A *part* is
the head, the embedding, another tensor outside layers, or one layer. One part of the other
checkpoint is put into the model at a time: the part that gives the recorded values is the cause. No
number is fitted to them.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes import CAUSES
from aprfmt.errors import AprfmtError
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, record_points, run_shadow_pass
from aprfmt.inference.trace import Trace
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import short_keys
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model

_CAUSE = "stale_tensor"
_MOST_LAYERS = 48  # layers that are tried one by one


def find_mixture(
    model: Model, other: Model, trace: Trace, ids: Sequence[int], dtype: str, label: str
) -> Finding | None:
    """Return the finding that a run of `model` used one part of `other`, or None.

    None if no part explains the run, the run agrees with `model` itself, or a pass fails. `label`
    is the run's letter, "A" or "B".
    """
    recorded = RecordedTrace(trace, tuple(ids), {})
    patched = PatchedModel.unpatched(model, ids, dtype)
    try:
        for key, value in record_points(patched).items():
            recorded.shapes.setdefault(key, value.shape)
        before = run_shadow_pass(patched, recorded)
        if not before.compared_count or _worst_distance(before) <= 1:
            return None
        for keys in _differing_parts(model, other):
            arrays = {key: np.asarray(other.roles[key].numpy(), dtype) for key in keys}
            after = run_shadow_pass(patched.with_weights(arrays), recorded)
            if _worst_distance(after) <= 1:
                return _mixture_finding(keys, other, before, after, label)
    except AprfmtError:
        return None
    finally:
        patched.weights.close()
    return None


def _differing_parts(model: Model, other: Model) -> Iterator[tuple[str, ...]]:
    """Yield the role keys of each part that differs: parts outside layers, then single layers.

    A part with all differing weights is not yielded: then the run would be of the other model.
    """
    apart = [
        key
        for key, view in model.roles.items()
        if key in other.roles
        and other.roles[key].shape == view.shape
        and not np.array_equal(view.numpy(), other.roles[key].numpy())
    ]
    groups: dict[str, list[str]] = {}
    for key in apart:
        layer, role = split_key(key)
        groups.setdefault(role.rpartition(".")[0] if layer is None else f"L{layer}", []).append(key)
    outside = [keys for name, keys in groups.items() if split_key(keys[0])[0] is None]
    layers = [keys for keys in groups.values() if split_key(keys[0])[0] is not None]
    for keys in [*outside[::-1], *layers[:_MOST_LAYERS]]:
        if len(keys) < len(apart):
            yield tuple(keys)


def _worst_distance(found: ShadowPass) -> float:
    """Return the largest distance of a point from the trace, in units of the point's tolerance.

    0.0 if no point was compared.
    """
    return max(
        (
            view.residual / max(view.tolerance, view.whole_tolerance)
            for view in found.views.values()
            if view.residual is not None
        ),
        default=0.0,
    )


def _mixture_finding(
    keys: Sequence[str], other: Model, before: ShadowPass, after: ShadowPass, label: str
) -> Finding:
    """Return the finding that the run's weights `keys` are those of `other`.

    `before` and `after` are the shadow passes without and with these, `label` is the run's letter,
    "A" or "B".
    """
    views: Mapping[str, float] = {
        key: view.residual for key, view in before.views.items() if view.residual is not None
    }
    first = max(views, key=lambda key: views[key])
    left = after.views[first].residual
    says = (
        f"{short_keys(keys)} of this run {'is' if len(keys) == 1 else 'are'} of {other.path}, "
        "all else is not: a part that was not brought up to date"
    )
    return Finding(
        _CAUSE,
        says,
        "forward",
        CAUSES[_CAUSE].verdict,
        tuple(keys),
        True,
        first,
        views[first],
        left,
        first,
        side=label,
        proof=unfitted_proof(len(views)),
    )
