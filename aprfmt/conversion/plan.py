"""Make the list of a conversion's outputs: which stored bytes go where, and what is re-encoded.

A *group* is roles that a format stores together, as one tensor or several. A *run* is consecutive
bytes of the source. A *move* is consecutive elements that are copied from a source tensor into an
output.

If source and target share a naming style, stored tensors pass through under their own names.
Otherwise every role is taken through the source's layout steps and back through the target's; if
these only move rows, the plan is a list of byte runs and nothing is decoded.
"""

import shlex
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.binding import BoundGroup, packed_binding
from aprfmt.arch.draft_head import stored_groups
from aprfmt.arch.element_moves import (
    chain_steps,
    compose_moves,
    identity_moves,
    to_logical,
    to_stored,
)
from aprfmt.arch.hyperparameters import expected_losses
from aprfmt.arch.spec import HyperParams, Move, split_key
from aprfmt.base.columns import Columns
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import LazyTensor, Note, TensorInfo, Value
from aprfmt.conversion.accounting import edited_keys, omissions_by_flag
from aprfmt.conversion.dialects import choose_kept_codes
from aprfmt.conversion.encoding_choice import check_importance, choose_encodings, split_into_parts
from aprfmt.conversion.missing_roles import (
    check_complete,
    check_stored_shapes,
    missing_output_roles,
)
from aprfmt.conversion.options import Drops, Options
from aprfmt.conversion.outputs import PLAIN_FLOATS as PLAIN_FLOATS
from aprfmt.conversion.outputs import Output as Output
from aprfmt.conversion.outputs import Plan as Plan
from aprfmt.conversion.outputs import make_info
from aprfmt.conversion.passthrough import (
    packed_names,
    passthrough_outputs,
    reshaped_output,
    stored_output,
    transposed_output,
)
from aprfmt.conversion.quantize_options import check_fit, check_requantization
from aprfmt.conversion.repacking import (
    Repacking,
    Substitute,
    check_exact,
    find_repacks,
    with_scale_tensors,
)
from aprfmt.conversion.sidecar_files import sidecar_names
from aprfmt.errors import ArchError, ConversionError
from aprfmt.formats import FormatSpec
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.model import Model
from aprfmt.model.packing import unclaimed_part_text
from aprfmt.model.patterns import spelling_predicates
from aprfmt.model.resolve import spellings_by_name
from aprfmt.model.towers import tower_root
from aprfmt.tensors.restoration import Restoration, restore_bits
from aprfmt.tensors.runs import ByteRun, element_runs
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.model.relations import Relation


def build_plan(model: Model, target: FormatSpec, options: Options) -> Plan:
    """Return the plan of a conversion; ConversionError for anything the target cannot hold."""
    # Names stay where nothing is to be renamed or laid out anew.
    passthrough = options.arch == "none" or model.style in (None, target.style)
    if model.format == target.name:
        passthrough = True
    related = _relations(model, options)
    turned: set[str] = set()
    kernels: Mapping[str, tuple[int, ...]] = {}
    if passthrough:
        passthrough = not any(relation.kind == "container" for relation in related)
        turned, kernels = _transposed_names(model, related), _kernel_shapes(model, related)
        passthrough = passthrough and not ((turned or kernels) and _wants_encoding(options))
    # Check that the source is complete, and find weights to repack.
    plan = Plan([], model.style if passthrough else target.style, [], Restoration())
    plan.notes += [relation.as_note(model.path) for relation in related]
    drops = _drop_predicates(model, options)
    copied = passthrough and not _wants_encoding(options)
    check_complete(model, options, drops, known=model.format != target.name, copied=copied)
    if options.plain_copy:
        check_stored_shapes(model)
    repacking = find_repacks(model, target, options, copied=passthrough)
    # Make the outputs, in the source's encodings.
    if passthrough:
        names = packed_names(model, target)
        plan.outputs = [
            transposed_output(tensor)
            if name in turned
            else reshaped_output(tensor, kernels[name])
            if name in kernels
            else stored_output(tensor, names.get(name, name))
            for name, tensor in model.source.tensors.items()
        ]
        if _wants_encoding(options) or target.vectors_f32:
            plan.outputs = passthrough_outputs(model, target, options, repacking)
    else:
        plan.outputs = _map_roles(model, target, drops, plan, repacking)
    # Record what is left out.
    alone = options.arch == "none" and model.format != target.name
    plan.left_out = omissions_by_flag(model, drops, files_too=alone, removed=options.remove)
    plan.edited = edited_keys(model, options)
    plan.files_dropped = _dropped_files(model, drops)
    plan.outputs, plan.dropped = _split_dropped(plan.outputs, drops)
    plan.absent = missing_output_roles(model, plan, options, drops)
    # Choose encodings, and refuse losses that were not asked for.
    plan.outputs = choose_encodings(plan.outputs, model, target, options, repacking.reasons)
    check_exact(plan.outputs, repacking, options, model.path)
    plan.outputs = list(with_scale_tensors(plan.outputs, drops))
    check_requantization(
        plan.outputs, options, model.path, *choose_kept_codes(plan.outputs, model, options)
    )
    plan.notes += check_fit(plan.outputs, options, model.path)
    check_importance(plan, options)
    # Split packed weights into the tensors that store them.
    plan.outputs = split_into_parts(plan.outputs, model, target, options)
    _check_names(plan.outputs, target)
    return plan


def _relations(model: Model, options: Options) -> "tuple[Relation, ...]":
    """Return how the source differs from its architecture's usual layout; () for a plain copy."""
    if options.arch == "none" or not options.complete:
        return ()
    try:
        found = model.resolution.relations
    except ArchError:
        found = ()
    return found if model.modules is None else (*found, model.modules)


def _transposed_names(model: Model, related: "Sequence[Relation]") -> set[str]:
    """Return the names of weights that are written with their last two axes exchanged.

    They are those stored the other way round than their architecture's. Raises ConversionError
    where names or modules do not fit the architecture.
    """
    for relation in related:
        if relation.kind in ("names", "modules"):
            raise ConversionError(f"{model.path}: {relation.text}")
    return {name for relation in related if relation.kind == "axes" for name in relation.where}


def _kernel_shapes(model: Model, related: "Sequence[Relation]") -> dict[str, tuple[int, ...]]:
    """Return {stored name: shape that readers look for} of kernels that have another shape."""
    names = {name for relation in related if relation.kind == "kernels" for name in relation.where}
    views = model.resolution.roles.values() if names else ()
    return {name: view.shape for view in views for name in view.names if name in names}


def _drop_predicates(model: Model, options: Options) -> Drops:
    """Return a predicate for each --drop pattern: whether it leaves out a name.

    A pattern may also name a missing tensor. Raises UsageError for one that matches nothing.
    """
    if not options.drop:
        return ()
    every = dict.fromkeys((*model.source.tensors, *sidecar_names(model)))
    for names in spellings_by_name(model).values():
        every.update(dict.fromkeys(names))
    try:
        every.update(dict.fromkeys(model.resolution.missing))
        for style in model.spec.bindings:
            every.update(dict.fromkeys(row.name(style) for row in model.spec.derived))
    except ArchError:
        pass  # an unknown architecture requires no roles
    return spelling_predicates(options.drop, tuple(every), str(model.path))


def _dropped_files(model: Model, drops: Drops) -> tuple[str, ...]:
    """Return the companion files that --drop names; ConversionError for config.json."""
    found = tuple(name for name in sidecar_names(model) if any(match(name) for match in drops))
    if "config.json" in found:
        raise ConversionError(
            f"{model.path}: --drop names config.json, by which a copy is read; name other files, "
            "or copy the tensors alone with --arch none"
        )
    return found


def _wants_encoding(options: Options) -> bool:
    """Return whether the options may give any tensor another encoding."""
    return bool(options.encoding or options.tensor_encodings or options.choose)


def _map_roles(
    model: Model, target: FormatSpec, drops: Drops, plan: Plan, repacking: Repacking
) -> list[Output]:
    """Return the outputs of every role, named in the target's style.

    Raises ArchError for a hyperparameter that the target cannot express and must not lose; others
    are noted in the plan.
    """
    resolution = model.resolution
    _check_unbound(model, target, drops, plan)
    for loss in expected_losses(resolution.spec, resolution.hyper, target.style):
        if loss.refused:
            value = resolution.hyper[loss.name]
            raise ArchError(
                f"{model.path}: {loss.name} is {value}, which no {target.name} file of "
                f"{resolution.spec.name} says: {loss.consequence}"
            )
        plan.notes.append(Note("warning", loss.name, loss.consequence, "not_expressible"))
    outputs: list[Output] = []
    roles = _roles_to_write(model, target, drops, plan)
    for group in stored_groups(resolution.spec, target.style, roles, resolution.hyper):
        outputs += _group_outputs(model, group, repacking)
    for row in resolution.spec.derived:
        values = row.make(resolution.hyper) if row.name(target.style) else None
        if values is not None:
            outputs.append(_derived_output(row.name(target.style), values))
    return outputs


def _roles_to_write(model: Model, target: FormatSpec, drops: Drops, plan: Plan) -> list[str]:
    """Return the keys of the roles to write.

    A role without a name in the target is left out if --drop names it, which is noted in the plan.
    """
    resolution = model.resolution
    bindings = resolution.spec.bindings.get(target.style, ())
    named = {role for binding in bindings for role in binding.roles}
    kept = []
    for key, view in resolution.roles.items():
        layer, role = split_key(key)
        beyond = layer is not None and layer >= int(resolution.hyper["n_layers"])
        homeless = role not in named or beyond
        if homeless and any(match(name) for match in drops for name in (key, *view.names)):
            plan.notes.append(_dropped_note(view.names[0]))
        else:
            kept.append(key)
    return kept


def _dropped_note(name: str) -> Note:
    """Return the note that a tensor is left out by --drop."""
    return Note("warning", name, "left out, as --drop asks", "dropped")


def _derived_output(name: str, values: Sequence[float]) -> Output:
    """Return the output of a hyperparameter that the target stores as a 1-D F32 tensor."""
    info = make_info(name, (len(values),), "F32")
    tensor = MemoryTensor(info, struct.pack(f"<{len(values)}f", *values))
    return stored_output(tensor, name)


def _check_unbound(model: Model, target: FormatSpec, drops: Drops, plan: Plan) -> None:
    """Raise ConversionError for tensors without a role that --drop does not name.

    Those that it names are noted in the plan.
    """
    derived = {row.name(model.style or "") for row in model.spec.derived}
    left = [name for name in model.resolution.unbound if name not in derived]
    towers = [name for name in model.resolution.towers if not any(m(name) for m in drops)]
    if towers:
        roots = dict.fromkeys(tower_root(name) for name in towers)
        options = " ".join(f"--drop {shlex.quote(root)}" for root in roots)
        raise ConversionError(
            f"{model.path}: {len(towers)} tensors belong to a tower next to the language model "
            f"({towers[0]}, ...), and a {target.name} of {model.spec.name} has no name for them; "
            f"write the language model with {options}, and the tower into a separate file"
        )
    for name in left:
        if any(match(name) for match in drops):
            plan.notes.append(_dropped_note(name))
            continue
        raise ConversionError(
            f"{model.path}: tensor {name!r} has no place in architecture {model.spec.name!r}, and "
            f"{target.name} would have no name for it{unclaimed_part_text(model.config, name)}; "
            f"leave it "
            f"out with --drop {name!r}"
        )


def _group_outputs(model: Model, group: BoundGroup, repacking: Repacking) -> list[Output]:
    """Return the target's stored tensors for one group of roles that are stored together.

    Bytes are copied where the layout steps allow it, else the values are computed.
    """
    logical = [model.roles[key] for key in group.roles]
    shapes: list[list[tuple[int, ...]]] = [[tensor.shape for tensor in logical]]
    for step in reversed(group.binding.steps):
        shapes.append(step.stored_shapes(shapes[-1], model.hyper, len(group.stored)))
    shapes.reverse()
    combined, moves = _element_moves(model, group, logical, shapes)
    combined = [repacking.replacement(tensor) for tensor in combined]
    found = [
        _group_output(
            model, group, logical, i, shape, combined, None if moves is None else moves[i]
        )
        for i, shape in enumerate(shapes[0])
    ]
    out_in = replace(group, binding=packed_binding(group.binding))
    if out_in.binding.steps == group.binding.steps:
        return found
    packed = _group_outputs(model, out_in, repacking)
    return [replace(one, rows=other.runs) for one, other in zip(found, packed, strict=True)]


def _element_moves(
    model: Model,
    group: BoundGroup,
    logical: Sequence[View],
    shapes: Sequence[Sequence[tuple[int, ...]]],
) -> tuple[list[LazyTensor], Sequence[Sequence[Move]] | None]:
    """Return (the source's stored tensors, for each output the moves that copy elements into it).

    A move names its tensor by index. The result is ([], None) where values have to be decoded.
    `logical` are the tensors of the group's roles, `shapes` the outputs' before and after each
    layout step of the target's binding, the stored shapes first.
    """
    moves = chain_steps(group.binding.steps, shapes[:-1] or shapes, model.hyper, back=True)
    if moves is None:
        return [], None
    combined: list[LazyTensor] = []
    inner: list[Sequence[Move]] = []
    for tensor in logical:
        own = tensor.moves
        if own is None or tensor.restored:
            return [], None
        base = len(combined)
        combined += tensor.stored
        inner.append([Move(base + m.source, m.start, m.count) for m in own] if base else own)
    if inner == identity_moves(shapes[-1]):
        return combined, moves
    return combined, compose_moves(moves, inner) if group.binding.steps else inner


def _group_output(
    model: Model,
    group: BoundGroup,
    logical: Sequence[View],
    index: int,
    shape: tuple[int, ...],
    combined: Sequence[LazyTensor],
    moves: Sequence[Move] | None,
) -> Output:
    """Return the `index`-th stored tensor of a group: copied by `moves` where possible.

    Otherwise its values are computed. `logical` are the tensors of the group's roles, `shape` is
    that of the stored tensor, and `combined` are the source tensors that the moves refer to.
    """
    if moves is not None:
        which = moves.columns[0] if isinstance(moves, Columns) else [m.source for m in moves]
        sources = tuple(dict.fromkeys(combined[at] for at in dict.fromkeys(which)))
    else:
        sources = tuple(dict.fromkeys(s for t in logical for s in t.stored))
    encodings = list(dict.fromkeys(s.info.encoding for s in sources))
    runs = None
    if moves is not None and len(encodings) == 1 and not any(s.parts for s in sources):
        runs = element_runs(combined, moves)
        if runs is None and any(isinstance(s, Substitute) for s in sources):
            moves = None  # its blocks would be cut: it stays what it is stored as
            sources = tuple(dict.fromkeys(s for t in logical for s in t.stored))
            encodings = list(dict.fromkeys(s.info.encoding for s in sources))
    source_encoding = (
        encodings[0] if len(encodings) == 1 else ("F64" if "F64" in encodings else "F32")
    )
    patch = None
    if model.records is not None and len(group.roles) == 1:
        patch = model.records.stored.get(group.roles[0])
    one = logical[0] if len(logical) == 1 and len(group.stored) == 1 else None
    if one is not None and one.restored:
        source_encoding = one.restored
    name = group.stored[index]
    if find_encoding(source_encoding).known:
        info = make_info(name, shape, source_encoding)
    else:  # bytes without a layout can be copied; a wish or a refusal settles the others
        size = sum(run.nbytes for run in runs or ())
        info = TensorInfo(name, shape, source_encoding, 0, size, None)
    bits = None if one is None else one.restored_bits
    decodes = moved = None
    if one is not None and len(one.stored) == 1 and patch is None and not one.restored:
        steps = (*one.layout, *group.binding.steps)
        if all(step.permutes for step in steps):
            decodes = one.stored[0].packed
            moved = _move_elements(one, group, model.hyper) if steps else None
    if bits is not None and not group.binding.steps:
        # Restored bits are copied: encoding the widened values would make NaNs quiet.
        runs = [ByteRun(MemoryTensor(info, bits), 0, info.nbytes)]
    return Output(
        info, source_encoding, runs, _make_array(logical, group, model.hyper, index, patch),
        (name, *group.roles, *(s.info.name for s in sources)),
        steps=tuple(str(s) for t in logical for s in t.steps)
        + tuple(map(str, group.binding.steps)),
        sources=sources, role=group.roles[0] if one is not None else "", decodes=decodes,
        moved=moved,
    )  # fmt: skip


def _make_array(
    logical: Sequence[View], group: BoundGroup, hp: HyperParams, index: int, patch: Value | None
) -> "Callable[[], Array]":
    """Return a function that computes the `index`-th stored array of a group of roles.

    `patch` is the record of the bits that an earlier file had, or None.
    """

    def make() -> "Array":
        """Return the stored array number `index` of the group, made from its logical tensors.

        Where an earlier file's bits (`patch`) mean the same values, it has these bits.
        """
        arrays = to_stored(group.binding.steps, [tensor.numpy() for tensor in logical], hp)
        if patch is None or arrays[index].dtype.name != "float32":
            return arrays[index]
        return _restore_bits(arrays[index], patch, logical, group, hp)

    return make


def _move_elements(logical: View, group: BoundGroup, hp: HyperParams) -> "Callable[[Array], Array]":
    """Return a function that gives a source's stored array in the target's order of elements."""
    return lambda stored: to_stored(group.binding.steps, [logical.undo_layout([stored])], hp)[0]


def _restore_bits(
    made: "Array", patch: Value | None, logical: Sequence[View], group: BoundGroup, hp: HyperParams
) -> "Array":
    """Return the array `made`, with the exact bits of an earlier file if its values are the same.

    `patch` is the record of those bits. Where the tensor was edited since, `made` is returned.
    """
    bits = restore_bits(np.ascontiguousarray(made).view("<u4"), patch, logical[0].name)
    candidate = bits.view("<f4")
    arrays = to_logical(group.binding.steps, [candidate], hp)
    same = np.array_equal(
        np.ascontiguousarray(arrays[0]).view(np.uint32),
        np.ascontiguousarray(logical[0].numpy()).view(np.uint32),
    )
    return candidate if same else made


def _split_dropped(outputs: list[Output], drops: Drops) -> tuple[list[Output], tuple[str, ...]]:
    """Return (outputs that stay, names of those that --drop leaves out)."""
    kept: list[Output] = []
    dropped: list[Output] = []
    for output in outputs:
        out = any(match(name) for match in drops for name in output.spellings)
        (dropped if out else kept).append(output)
    return kept, tuple(output.info.name for output in dropped)


def _check_names(outputs: Sequence[Output], target: FormatSpec) -> None:
    """Raise ConversionError for names that occur twice or that the target does not allow.

    A tensor with more dimensions than the target allows raises it too.
    """
    seen: set[str] = set()
    for output in outputs:
        name = output.info.name
        if name in seen:
            raise ConversionError(f"{name}: two tensors of the output would have this name")
        seen.add(name)
        limit = target.max_name_bytes
        size = len(name.encode("utf-8", "surrogatepass"))
        if limit is not None and size > limit:
            raise ConversionError(f"{name}: {size} bytes; {target.name} allows {limit} in a name")
        if target.max_dims is not None and len(output.info.shape) > target.max_dims:
            raise ConversionError(
                f"{name}: {len(output.info.shape)} dimensions; {target.name} allows "
                f"{target.max_dims}"
            )
