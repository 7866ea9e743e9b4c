"""Fill in the options of a quantizing conversion: mixture, importance matrix, and their record.

Quantized bytes depend on the scheme, the arithmetic, the version of the encoders and the importance
matrix; all four are written into the output's metadata, so that the same bytes can be produced
again.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import Note, TypedValue, Value
from aprfmt.conversion.options import Options
from aprfmt.conversion.packed_weights import has_companions
from aprfmt.errors import ArchError, ConversionError, UsageError
from aprfmt.formats import FormatSpec
from aprfmt.model import Model
from aprfmt.model.patterns import spelling_predicates
from aprfmt.quantizing.mixture import (
    FORMAT_VERSION,
    QUANTIZER_VERSION,
    Mixture,
    base_name,
    deciding_name,
    fits_groups,
    fitting_schemes,
    is_linear,
    is_quantized,
    scheme_of,
)

if TYPE_CHECKING:
    from aprfmt.conversion.outputs import Output
    from aprfmt.quantizing.imatrix import ImportanceMatrix

RECORD = "aprfmt.quantize."
NEAREST = "to the nearest value, without calibration"  # of layouts whose libraries calibrate
IMATRIX_RECORD = "quantize.imatrix."  # llama.cpp's own keys


def with_mixture(model: Model, target: FormatSpec, options: Options) -> Options:
    """Return the options with what follows from the scheme in `options.quantize`.

    Set are the functions that choose encodings and importances, the encoder's options, and the
    metadata that records them. Without a scheme the options are returned unchanged. Raises
    UsageError for an unknown scheme, or for flags that need a scheme.
    """
    # Refuse options that contradict each other.
    if options.quantize is None:
        if options.pure or options.imatrix is not None:
            raise UsageError("--pure and --imatrix need a quantization: name one with --type")
        return options
    if options.encoding is not None or options.choose is not None:
        raise UsageError("a quantization and an encoding for every weight exclude each other")
    # Read the importance matrix, and make the mixture.
    matrix = None
    if options.imatrix is not None:
        from aprfmt.quantizing.imatrix import read_imatrix

        matrix = read_imatrix(options.imatrix)
    mixture = model_mixture(model, options, matrix is not None)
    scheme = scheme_of(mixture.scheme)
    if matrix is not None and (ENCODINGS[scheme.base].flat or not is_quantized(scheme.base)):
        raise UsageError(
            f"{mixture.scheme} uses no importance matrix: leave --imatrix out, or choose Q4_K_M"
        )
    if options.pure and not scheme.mixes:
        raise UsageError(
            f"--pure: {mixture.scheme} is no mixture, its weights have one type anyway; leave "
            "--pure out"
        )
    # Both become functions that are called for every tensor.
    return replace(
        options,
        choose=mixture.choose,
        importance=None if matrix is None else matrix.of,
        packing=scheme.options,
        extra_metadata={
            **_quantization_record(mixture.scheme, options, matrix),
            **(_file_type_keys(scheme.file_type) if target.vectors_f32 else {}),
            **options.extra_metadata,
        },
    )


def model_mixture(model: Model, options: Options, imatrix: bool) -> Mixture:
    """Return the mixture of encodings for a model's tensors, by the scheme in `options.quantize`.

    `imatrix` says whether there is an importance matrix. For an unknown architecture the numbers of
    layers, heads and experts come from names and the GGUF's metadata.
    """
    assert options.quantize is not None
    # From the architecture's tables.
    try:
        hyper, names = model.hyper, list(model.roles)
        heads, groups = hyper["n_heads"], hyper["n_kv_heads"]
        n_layers, n_experts = hyper["n_layers"], hyper["n_experts"]
        arch = model.spec.called.get("gguf", (model.spec.name,))[0]
    except ArchError:
        # Without them: layers from the names, heads and experts from the GGUF's keys.
        names = list(model)
        arch = str(model.metadata.get("general.architecture", ""))
        layers = [layer for _, _, layer in map(base_name, names) if layer is not None]
        n_layers = max(layers, default=-1) + 1
        heads, groups, n_experts = (
            model.metadata.get(f"{arch}.{key}", 0)
            for key in ("attention.head_count", "attention.head_count_kv", "expert_count")
        )
    return Mixture(
        options.quantize,
        names,
        n_layers=n_layers,
        n_gqa=_first_number(heads) // max(_first_number(groups), 1),
        n_experts=_first_number(n_experts),
        pure=options.pure,
        imatrix=imatrix,
        arch=arch,
    )


def matrix_text(options: Options) -> str:
    """Return the importance matrix in words: the text it was measured on, else its file.

    The file of a matrix that `quantize --calibrate` made is gone after the run; its text is not.
    """
    said = options.extra_metadata.get(IMATRIX_RECORD + "dataset")
    dataset = said.value if isinstance(said, TypedValue) else said
    return f"importance matrix of {dataset}" if dataset else str(options.imatrix)


def _first_number(value: Value) -> int:
    """Return an integer, or the first of a list with one per layer; 0 for anything else."""
    if isinstance(value, int):
        return value
    try:
        return int(value[0])
    except (TypeError, ValueError, LookupError):
        return 0


def _quantization_record(
    scheme: str, options: Options, matrix: "ImportanceMatrix | None"
) -> Mapping[str, Value | TypedValue]:
    """Return the metadata keys that record scheme, arithmetic, version and importance matrix."""
    found: dict[str, Value | TypedValue] = {
        RECORD + "type": scheme,
        RECORD + "fma": options.fma,
        RECORD + "version": QUANTIZER_VERSION,
    }
    if scheme_of(scheme).dialect:
        found[RECORD + "rounding"] = NEAREST
    if matrix is not None:
        found[RECORD + "imatrix"] = matrix.sha256
        for key, value, kind in matrix.records():
            found[key] = TypedValue(value, kind)
    return found


def _file_type_keys(file_type: int | None) -> Mapping[str, Value | TypedValue]:
    """Return the GGUF keys of quantization version and file type."""
    claims: dict[str, Value | TypedValue] = {
        "general.quantization_version": TypedValue(FORMAT_VERSION, "uint32")
    }
    if file_type is not None:
        claims["general.file_type"] = TypedValue(file_type, "uint32")
    return claims


def check_fit(outputs: "Sequence[Output]", options: Options, path: Path) -> list[Note]:
    """Return [a warning] on matrices that the scheme's groups do not fit, or [] if they all do.

    Such matrices are not packed. Raises ConversionError where that is most of them: what is asked
    for would not be made. Those that the user gives another encoding are not counted.
    """
    if options.quantize is None or not scheme_of(options.quantize).dialect:
        return []
    scheme = scheme_of(options.quantize)
    if scheme.arch:
        return []  # of one architecture, for its stacks of experts
    # The matrices that the scheme would pack.
    patterns = [pattern for pattern, _ in options.tensor_encodings]
    every = [name for output in outputs for name in output.spellings]
    named = spelling_predicates(patterns, every, str(path)) if patterns else ()
    matrices = []
    for output in outputs:
        name = output.role or deciding_name(output.spellings)
        base, suffix, _ = base_name(name)
        given = any(match(each) for match in named for each in output.spellings)
        if is_linear(name, base, suffix, output.info.shape) and not given:
            matrices.append(output)
    odd = [output for output in matrices if not fits_groups(scheme, output.info.shape)]
    if not odd:
        return []
    # What does not fit, and which other scheme would.
    rows, columns = scheme.multiples
    first = odd[0].info
    other = fitting_schemes(scheme, [output.info.shape for output in matrices])
    todo = f"{other[0]} fits all" if other else "no group size of this layout fits all"
    text = (
        f"{options.quantize} packs {len(matrices) - len(odd)} of {len(matrices)} matrices: "
        f"{len(odd)} are not whole numbers of its groups (multiples of {columns} columns"
        f"{f' and {rows} rows' if rows > 1 else ''}), {first.name} {list(first.shape)} for example"
    )
    if 2 * len(odd) > len(matrices):
        raise ConversionError(
            f"{path}: {text}; {todo}; name those that shall stay with --tensor PATTERN=BF16"
        )
    return [Note("warning", str(path), f"{text}; they stay as they are; {todo}", "partly_packed")]


def check_requantization(
    outputs: "Sequence[Output]",
    options: Options,
    path: Path,
    copied: Container[str] = (),
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Raise ConversionError if quantized tensors would be quantized again without permission.

    `copied` are the names whose codes are used as they are; `reasons` is {name: why its codes are
    not}.
    """
    if options.allow_requantize:
        return
    # Blocks that a layout step would cut, even without another encoding.
    cut = [
        output
        for output in outputs
        if output.runs is None
        and output.encoding == output.source_encoding
        and is_quantized(output.encoding)
        and not has_companions(output.encoding)
    ]
    if cut:
        raise ConversionError(
            f"{path}: {len(cut)} tensors are stored otherwise there, so that their blocks would be "
            f"cut, decoded and quantized again: {_shown_outputs(cut)}; decode them with "
            f"--encoding BF16 or "
            "--tensor PATTERN=F32, or accept it with --allow-requantize"
        )
    # Quantized tensors that the scheme would quantize once more.
    if options.quantize is None:
        return
    again = [
        output
        for output in outputs
        if output.encoding != output.source_encoding
        and is_quantized(output.encoding)
        and is_quantized(output.source_encoding)
        and output.info.name not in copied
    ]
    if again:
        why = {name: f"; {text}" for name, text in (reasons or {}).items() if text}
        raise ConversionError(
            f"{path}: {len(again)} tensors are quantized already: "
            f"{_shown_outputs(again, why)}; a second "
            "quantization adds its own error to the first: start from the float model, or accept "
            "it with --allow-requantize"
        )


def _shown_outputs(outputs: "Sequence[Output]", why: Mapping[str, str] | None = None) -> str:
    """Return the first three outputs with their encodings, as text for a sentence.

    `why` is {name: text added after the encoding}.
    """
    said = why or {}
    shown = (f"{o.info.name} ({o.source_encoding}{said.get(o.info.name, '')})" for o in outputs[:3])
    return ", ".join(shown) + (" ..." if len(outputs) > 3 else "")
