"""Fill in a plan's restoration record: which roles were widened, and bits that narrowing loses."""

from collections.abc import Sequence

import numpy as np

from aprfmt.arch.draft_head import stored_groups
from aprfmt.arch.element_moves import to_logical, to_stored
from aprfmt.arch.spec import LayoutStep
from aprfmt.base.encodings import find_encoding
from aprfmt.codecs import encode
from aprfmt.conversion.outputs import PLAIN_FLOATS, Plan
from aprfmt.formats import FormatSpec
from aprfmt.model import Model
from aprfmt.tensors.view import View


def record_restoration(model: Model, target: FormatSpec, plan: Plan) -> None:
    """Record in the plan how to restore each role that the target stores with changed values.

    Those are roles stored in a wider float type, or shifted by a layout step. Only float types are
    recorded: quantized sources keep their encoding, or the user asked for a lossy conversion.
    """
    if not target.vectors_f32:
        _record_stored(model, plan)
        return
    for output in plan.outputs:
        if output.copies or not output.role or output.info.encoding != "F32":
            continue
        tensor = model.roles.get(output.role)
        if tensor is None or output.source_encoding not in ("F16", "BF16", "F32"):
            continue
        group = target_steps(model, target, [output.role])
        if output.source_encoding == "F32" and not group:
            continue
        _record_role(plan, output.role, output.source_encoding, tensor, group, model)


def _record_stored(model: Model, plan: Plan) -> None:
    """Record in the plan the source's bits for roles whose layout steps change them.

    Those are roles for which undoing the steps and applying them again does not give the bits that
    the source stores.
    """
    for output in plan.outputs:
        tensor = model.roles.get(output.role) if output.role else None
        if tensor is None or tensor.moves is not None or tensor.encoding != "F32":
            continue
        stored = [
            np.frombuffer(part.raw(), "<f4").reshape(part.info.shape) for part in tensor.stored
        ]
        if len(stored) != 1:
            continue
        logical = to_logical(tensor.layout, stored, model.hyper)
        arrays = to_stored(tensor.layout, logical, model.hyper)
        again = np.ascontiguousarray(arrays[0], "<f4")
        plan.restoration.record_stored(output.role, stored[0].view("<u4"), again.view("<u4"))


def target_steps(model: Model, target: FormatSpec, roles: Sequence[str]) -> tuple[LayoutStep, ...]:
    """Return the layout steps from a target's stored tensor to the roles it holds; () for none."""
    for group in stored_groups(model.spec, target.style, roles, model.hyper):
        return group.binding.steps
    return ()


def _record_role(
    plan: Plan, role: str, encoding: str, tensor: View, steps: tuple[LayoutStep, ...], model: Model
) -> None:
    """Record in the plan how to restore one role that the target stores as float32.

    Recorded are its `encoding` in the source, and the bits that widening and narrowing again
    changes. `steps` are the layout steps between the target's stored tensor and the role.
    """
    assert encoding in PLAIN_FLOATS
    logical = np.asarray(tensor.numpy(), np.float32)
    size = find_encoding(encoding).type_size
    # Not encode(logical) where there are bytes: rounding would make signalling NaNs quiet.
    held = tensor.restored or tensor.data is not None
    bits = np.frombuffer(tensor.raw() if held else encode(encoding, logical)[""], f"<u{size}")
    arrays = to_logical(steps, to_stored(steps, [logical], model.hyper), model.hyper)
    narrowed = np.frombuffer(encode(encoding, np.asarray(arrays[0], np.float32))[""], f"<u{size}")
    plan.restoration.record(role, encoding, bits, narrowed)
