"""Outputs that pass through under their own names, packed weights with them.

A *part* is one of the tensors that a packed weight is stored as; the *main part* has its codes.
"""

from dataclasses import replace
from functools import partial

from aprfmt.arch.layout_steps import Transposed
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import LazyTensor, TensorInfo
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Output, make_info
from aprfmt.conversion.packed_weights import has_companions
from aprfmt.conversion.repacking import Repacking
from aprfmt.errors import ConversionError
from aprfmt.formats import FormatSpec
from aprfmt.model import Model
from aprfmt.model.convolution_kernels import kernel_steps, undo_steps
from aprfmt.model.patterns import matching_indices
from aprfmt.model.resolve import spellings_by_name
from aprfmt.quantizing.mixture import deciding_name
from aprfmt.tensors.runs import ByteRun
from aprfmt.tensors.view import decode_tensor


def stored_output(tensor: LazyTensor, name: str = "") -> Output:
    """Return the output of one stored tensor under its own name, or under `name`."""
    info = tensor.info
    name = name or info.name
    out = TensorInfo(name, info.shape, info.encoding, 0, info.nbytes, info.row_bytes)
    runs = None if tensor.parts else [ByteRun(tensor, 0, info.nbytes)]
    return Output(
        out,
        info.encoding,
        runs,
        partial(decode_tensor, tensor),
        (name, info.name),
        sources=(tensor,),
        decodes=tensor.packed,
    )


def transposed_output(tensor: LazyTensor) -> Output:
    """Return the output of one stored tensor with its last two axes exchanged.

    The encoding is that of the source.
    """
    info = tensor.info
    shape = (*info.shape[:-2], info.shape[-1], info.shape[-2])
    return Output(
        make_info(info.name, shape, info.encoding),
        info.encoding,
        None,
        lambda: decode_tensor(tensor).swapaxes(-1, -2),
        (info.name,),
        steps=(str(Transposed()),),
        sources=(tensor,),
    )


def reshaped_output(tensor: LazyTensor, shape: tuple[int, ...]) -> Output:
    """Return the output of one stored kernel in the shape that readers look for.

    The encoding is that of the source. Raises ConversionError where no step leads to `shape`.
    """
    info = tensor.info
    steps = kernel_steps(info.shape, shape)
    if not steps:
        raise ConversionError(f"{info.name}: no step from {list(info.shape)} to {list(shape)}")
    in_place = all(step.moves([info.shape], {}) for step in steps)
    runs = [ByteRun(tensor, 0, info.nbytes)] if in_place else None
    return Output(
        make_info(info.name, shape, info.encoding),
        info.encoding,
        runs,
        lambda: undo_steps(steps, decode_tensor(tensor)),
        (info.name,),
        steps=tuple(map(str, steps)),
        sources=(tensor,),
    )


def passthrough_outputs(
    model: Model, target: FormatSpec, options: Options, repacking: Repacking
) -> list[Output]:
    """Return the outputs of all tensors under their own names, for the format `target`.

    A packed weight stays as its stored parts if it is not re-encoded and `target` can store them.
    Otherwise it is one output, which `repacking` makes from all its parts.
    """
    roles = model.roles_of
    wanted = _reencoded_names(model, options)
    names = packed_names(model, target)
    outputs: list[Output] = []
    shared: set[str] = set()  # parts that several weights have, and that are written once
    for name, tensor in model.items():
        held = all(target.holds(find_encoding(p.info.encoding)) for p in tensor.parts.values())
        if tensor.parts and name not in wanted and (held or target.carries):
            stored = [
                (part, part.info.name)
                for part in tensor.parts.values()
                if part.info.name not in shared
            ]
            shared.update(own for _, own in stored)
            outputs += [stored_output(part, names.get(own, own)) for part, own in stored]
            continue
        output = stored_output(repacking.replacement(tensor.stored[0]))
        keys = roles.get(name, ())
        role = keys[0] if len(keys) == 1 else ""
        outputs.append(replace(output, spellings=(name, *keys), role=role))
    return outputs


def packed_names(model: Model, target: FormatSpec) -> dict[str, str]:
    """Return {main part's name: its new name} for the packed weights that have companions.

    The new name is the weight's. If the format has no code for a packed encoding it is
    `WEIGHT@NF4`, so that a foreign reader does not find the weight, rather than misread its bytes.
    """
    found = {}
    for name, tensor in model.items():
        if tensor.parts and has_companions(tensor.encoding):
            main = tensor.parts[""].info.name
            found[main] = f"{name}@{tensor.encoding}" if target.carries else name
    return found


def _reencoded_names(model: Model, options: Options) -> set[str]:
    """Return the names of the tensors that the options may give another encoding."""
    if options.encoding:
        return set(model)
    names = list(model)
    if options.choose:
        roles = model.roles_of
        lookups = [deciding_name((*roles.get(name, ()), name)) for name in names]
        chosen = [
            options.choose(name, tensor.shape, tensor.encoding)
            for name, tensor in zip(lookups, model.values(), strict=True)
        ]
        return {
            name
            for name, encoding in zip(names, chosen, strict=True)
            if encoding not in (None, model[name].encoding)
        }
    patterns = [pattern for pattern, _ in options.tensor_encodings]
    if not patterns:
        return set()
    every = list(spellings_by_name(model).values())
    return {names[i] for i in matching_indices(every, patterns, str(model.path))}
