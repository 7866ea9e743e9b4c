"""Whether a change can act on a point at all: told without a pass, from what it replaces."""

from aprfmt.causes.forward.mismatch import Change, Layers, Mismatch
from aprfmt.errors import AprfmtError
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel

ROUTED = ("experts", "expert_w", "router_margin")


def acts(case: Mismatch, change: Change, layers: Layers) -> bool:
    """Say whether a change replaces something that the operations before the point use.

    Changes of hyperparameters and of the block may act on anything.
    """
    before = case.patched
    try:
        after = change.make(before, layers)
    except (AprfmtError, ValueError, KeyError):
        return False
    if after.hp is not before.hp or after.spec is not before.spec:
        return True
    ops = {call.op for call in case.view.calls if call.op not in MOVES}
    if any(
        len(after.overrides[op]) > len(before.overrides.get(op, ()))
        for op in ops & {*after.overrides}
    ):
        return True
    if after.positions != before.positions:
        return bool(ops & {"rope", "embed"})
    if after.taps != before.taps and ("add_weighted" in ops or case.view.point in ROUTED):
        return True
    return _reads(case, after)


def _reads(case: Mismatch, after: PatchedModel) -> bool:
    """Say whether an operation before the point reads a weight that was replaced."""
    replaced = after.replaced[len(case.patched.replaced) :]
    read = {each.key.partition("[")[0] for call in case.view.calls for each in call.weights}
    vectors = [each.shape for call in case.view.calls for each in call.vectors]
    return any(key in read or after.weights[key].shape[-1:] in vectors for key in replaced)
