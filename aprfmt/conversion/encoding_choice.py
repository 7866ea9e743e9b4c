"""Choose the encoding of every output: what the user asks for, and what the target can hold."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aprfmt.arch.layout_steps import Transposed
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.arch.spec import F32_ROLES
from aprfmt.base.encoding_names import find_name, nearest_names, unknown_name_message
from aprfmt.base.encodings import ENCODINGS, find_encoding
from aprfmt.base.protocols import Note, TensorInfo
from aprfmt.codecs import codec, encodable_names, encode
from aprfmt.conversion.dialects import (
    LatestGrid,
    dialect_writer,
    joined_outputs,
    make_dialect_weight,
)
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import PLAIN_FLOATS, Output, Plan, make_info
from aprfmt.conversion.packed_weights import (
    DTYPES,
    BnbWeight,
    LatestParts,
    PackedPart,
    PackedWeight,
    has_companions,
    weight_dtype,
)
from aprfmt.conversion.quantize_options import check_fit, matrix_text
from aprfmt.conversion.restoration_record import target_steps
from aprfmt.errors import ConversionError
from aprfmt.formats import FormatSpec
from aprfmt.model import Model
from aprfmt.model.lone_codes import refuse_lone_codes
from aprfmt.model.patterns import matching_indices
from aprfmt.model.resolve import spellings_by_role
from aprfmt.quantizing.mixture import SCHEMES, deciding_name, is_quantized

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


_COPY = "copy them as they are stored (to safetensors or APR, without an encoding)"


def choose_encodings(
    outputs: list[Output],
    model: Model,
    target: FormatSpec,
    options: Options,
    reasons: Mapping[str, str],
) -> list[Output]:
    """Return the outputs with the encodings they will have.

    That is the source's, unless the user or the target changes it. Order: --tensor, the mixture,
    --encoding, the record of an earlier widening, the target's rule for vectors, the source's own.
    `reasons` say why packed weights were not repacked. Raises ConversionError for encodings that do
    not exist, cannot be written, or that the target cannot hold, and where codes without their
    scale would be written as values.
    """
    # Check the names that the user gave, and find the tensors of each --tensor pattern.
    requested = [options.encoding, *(e for _, e in options.tensor_encodings)]
    for encoding in requested:
        if encoding is not None and encoding not in ENCODINGS:
            raise ConversionError(_no_encoding(encoding))
    every = spellings_by_role(model) if options.tensor_encodings else {}
    names = [(*output.spellings, *every.get(output.role, ())) for output in outputs]
    explicit: dict[int, str] = {}
    for pattern, encoding in options.tensor_encodings:
        for i in matching_indices(names, [pattern], str(model.path)):
            explicit[i] = encoding
    chosen: list[Output] = []
    refused: list[str] = []
    kept_whole: list[Output] = []  # of `refused`
    asked_for = False
    writer = dialect_writer(options)
    written = "" if writer is None else writer.encoding
    for i, output in enumerate(outputs):
        # What is asked for, else the source's encoding.
        encoding = explicit.get(i) or _wished_encoding(output, options)
        if encoding is None:
            encoding = output.source_encoding
            widened = target.vectors_f32 and not options.generic
            if widened and _ggml_expects_float32(output) and encoding in PLAIN_FLOATS:
                encoding = "F32"
            if widened and encoding == "I64" and output.role:
                encoding = "I32"  # llama.cpp takes no other index; run.py refuses larger numbers
        # Refuse what nothing here encodes, and collect what the target cannot hold.
        if encoding not in (output.source_encoding, written) and (
            not find_encoding(encoding).known
            or (encoding in requested and not codec(encoding).has_encoder)
        ):
            raise ConversionError(_not_written(output.info.name, encoding))
        if encoding == written:
            holds = target.holds(find_encoding("U8"))
        else:
            kept = encoding == output.source_encoding and stores_as_bytes(model, target, options)
            holds = _can_hold(encoding, target) or kept
        if not holds:
            asked_for = asked_for or encoding != output.source_encoding
            refused.append(f"{output.info.name} ({_refusal_text(encoding, output, reasons)})")
            kept_whole.append(output)
            continue
        if encoding == written:
            output = _as_out_in(output, model, target)
        chosen.append(replace(output, info=_reencoded_info(output.info, encoding, written)))
    changed = (one for one in chosen if one.info.encoding != one.source_encoding)
    asked = (tensor.info.name for one in changed for tensor in one.sources)
    refuse_lone_codes(model, ConversionError, asked, _COPY)
    if refused:
        check_fit([*chosen, *kept_whole], options, model.path)  # may be why they would stay
        raise ConversionError(
            f"{model.path}: {target.name} has no code for the encoding of {len(refused)} tensors: "
            f"{', '.join(refused[:3])}{' ...' if len(refused) > 3 else ''}; "
            + (
                "choose a type that it has (GGUF: Q4_K_M and its kind, safetensors: NF4, FP4 and "
                "dialects), or write APR, which holds them all"
                if asked_for
                else "decode or requantize them with --encoding (F32 keeps every value) or "
                "--tensor PATTERN=ENCODING"
            )
        )
    return chosen


def _reencoded_info(info: TensorInfo, encoding: str, written: str) -> TensorInfo:
    """Return an output's TensorInfo in another encoding.

    In `written`, the encoding of a dialect, its size is 0: the dialect's own tensors are counted.
    """
    if encoding == written:
        return TensorInfo(info.name, info.shape, encoding, 0, 0, None)
    return info if encoding == info.encoding else make_info(info.name, info.shape, encoding)


def _not_written(name: str, encoding: str) -> str:
    """Return the error's sentence for an encoding that cannot be written."""
    row = find_encoding(encoding)
    if row.known:
        near = ", ".join(nearest_names(encoding, encodable_names()))
        return f"{name}: {encoding} is read and copied, not written here; near names: {near}"
    removed = row.removed
    return (
        f"{name}: {encoding} is not written here: "
        f"{removed or 'a dialect is the type of a whole model'}; choose an encoding that is, Q8_0 "
        "or NF4 for example (aprfmt explain encoding)"
        + ("" if removed else ", or a dialect with --type (aprfmt quantize --help)")
    )


def _refusal_text(encoding: str, output: Output, reasons: Mapping[str, str]) -> str:
    """Return the encoding, followed by the reason if a repack to it was not possible."""
    why = next((reasons[s.info.name] for s in output.sources if s.info.name in reasons), "")
    return f"{encoding}; {why}" if why else encoding


def _no_encoding(name: str) -> str:
    """Return the error's sentence for a name that is not an encoding of tensors."""
    mixture = find_name(name, SCHEMES)
    if mixture is not None:
        return (
            f"{name}: is a mixture of several encodings; choose one of them here "
            f"({SCHEMES[mixture].base}), or the mixture with quantize --type {mixture}"
        )
    return f"{name}: {unknown_name_message(name, encodable_names())}"


def _lookup_name(output: Output) -> str:
    """Return the name by which a mixture or an importance matrix knows an output.

    That is its role, else the one of its names by which its encoding is chosen.
    """
    return output.role or deciding_name(output.spellings)


def column_importances(output: Output, options: Options) -> Any:
    """Return the importance of an output's columns, float32; None if it has none or needs none."""
    if options.importance is None or not is_quantized(output.encoding):
        return None
    return options.importance(_lookup_name(output))


def _wished_encoding(output: Output, options: Options) -> str | None:
    """Return the encoding that a mixture or --encoding asks for an output; None to keep its own.

    --encoding does not change integers, booleans and complex numbers, and vectors only to a plain
    float.
    """
    if options.choose is not None:
        return options.choose(_lookup_name(output), output.info.shape, output.source_encoding)
    encoding = options.encoding
    if encoding is None or (
        ENCODINGS.get(output.source_encoding) or find_encoding("F32")
    ).numpy in (
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
    ):
        return None
    return encoding if encoding in PLAIN_FLOATS or not _ggml_expects_float32(output) else None


def stores_as_bytes(model: Model, target: FormatSpec, options: Options) -> bool:
    """Return whether a target stores encodings that it has no code for, as plain bytes."""
    return target.keeps and (options.generic or model.format == target.name)


def _can_hold(name: str, target: FormatSpec) -> bool:
    """Return whether a target can hold an encoding: by a code, as bytes, or as several tensors."""
    if target.holds(find_encoding(name)) or target.carries:
        return True
    return has_companions(name) and target.holds(find_encoding("U8"))


def check_importance(plan: Plan, options: Options) -> None:
    """Add a note on the tensors that the importance matrix lacks, if there are any.

    Raises ConversionError for an importance matrix with another number of columns.
    """
    if options.importance is None:
        return
    without = []
    for output in plan.outputs:
        if output.copies or not is_quantized(output.encoding):
            continue
        found, shape = column_importances(output, options), output.info.shape
        if found is None:
            without.append(output.info.name)
            continue
        columns = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        if found.size not in (columns, shape[-1]):
            raise ConversionError(
                f"{output.info.name}: the importance matrix has {found.size} columns, the tensor "
                f"{columns}; was it made for another model?"
            )
    if without:
        shown = ", ".join(without[:3]) + (" ..." if len(without) > 3 else "")
        text = f"says nothing about {len(without)} tensors, which are quantized without: {shown}"
        plan.notes.append(Note("warning", matrix_text(options), text, "imatrix_gaps"))


def split_into_parts(
    outputs: list[Output], model: Model, target: FormatSpec, options: Options
) -> list[Output]:
    """Return the outputs with every weight that has companions replaced by its stored tensors."""
    latest, sources, writer = LatestParts(), LatestGrid(), dialect_writer(options)
    joined = joined_outputs(outputs) if writer is not None and writer.shares else {}
    found: list[Output] = []
    for output in outputs:
        packed: PackedWeight
        if writer is not None and output.info.encoding == writer.encoding:
            dtype = weight_dtype(output.source_encoding, model.config, output.info.name)
            packed = make_dialect_weight(
                output, writer, options, DTYPES[dtype], sources, joined.get(output.info.name, ())
            )
        elif output.copies or not has_companions(output.info.encoding):
            found.append(output)
            continue
        else:
            packed = _bnb_weight(output, model, target, options, latest)
        main = f"{packed.name}@{packed.encoding}" if target.carries else packed.name
        for suffix, info in packed.infos(main).items():
            made = replace(output, info=info, runs=None, part=PackedPart(packed, suffix))
            found.append(replace(made, spellings=(info.name,), role="") if suffix else made)
    return found


def _bnb_weight(
    output: Output, model: Model, target: FormatSpec, options: Options, latest: LatestParts
) -> BnbWeight:
    """Return a weight to be stored in bitsandbytes' tensors, which record the weight's dtype."""
    dtype = weight_dtype(output.source_encoding, model.config, output.info.name)
    output, name = _as_out_in(output, model, target), output.info.encoding
    wishes = {**options.packing, "dtype": dtype}

    def pack(values: "Array") -> Mapping[str, bytes]:
        """Return {suffix of a stored tensor: bytes} of values in bitsandbytes' 4-bit encoding."""
        return encode(name, values, fma=options.fma, options=wishes)

    return BnbWeight(output.info.name, name, output.info.shape, output.make, pack, latest)


def _as_out_in(output: Output, model: Model, target: FormatSpec) -> Output:
    """Return a weight as [out, in], the order of packed weights, where the target transposes it.

    Other weights are returned unchanged. See binding.bind_packed.
    """
    roles = [key for key in output.spellings if key in model.roles]
    if not any(isinstance(step, Transposed) for step in target_steps(model, target, roles)):
        return output
    *stack, rows, columns = output.info.shape
    make, info = output.make, replace(output.info, shape=(*stack, columns, rows))
    return replace(output, info=info, make=lambda: make().swapaxes(-1, -2).copy(), runs=output.rows)


def _ggml_expects_float32(output: Output) -> bool:
    """Return whether ggml's readers expect a tensor as F32: 1-D, norms, routers, positions."""
    name = split_key(output.role)[1]
    return len(output.info.shape) <= 1 or name.rpartition(".")[0].endswith(F32_ROLES)
