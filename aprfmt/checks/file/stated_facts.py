"""Checks that what a file says about its tensors is true of them."""

import json
import math
from collections.abc import Mapping
from typing import Any

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.metadata_values import short_value
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, Level, NotRun, Result, list_names
from aprfmt.codecs import gptq
from aprfmt.codecs.dialect import OF_INPUTS
from aprfmt.codecs.dialects import dialects_of
from aprfmt.errors import AprfmtError
from aprfmt.model.packing import (
    changes_weights,
    conflicting_packings,
    packing_config,
    packing_conflicts,
    partial_input_scales,
)
from aprfmt.model.quantized_modules import stale_names, wrong_claims
from aprfmt.model.relations import opening_path
from aprfmt.model.remote_code import named_code
from aprfmt.model.renames import command_line
from aprfmt.model.stated_dtype import (
    DTYPES,
    OTHER_DTYPES,
    elements_by_encoding,
    main_float_encoding,
)
from aprfmt.model.unsupported_packing import sparsity_format
from aprfmt.quantizing.mixture import FALLBACK, SCHEMES
from aprfmt.tensors.companions import SECTIONS, quantization_section

_FILE_TYPE = "general.file_type"
_QUANTIZATION_VERSION = "general.quantization_version"
_GUESSED = 1024  # llama.cpp's flag for a type that its loader guessed

# llama_ftype values that neither conversion nor quantize writes -> the encoding most weights get
# (enum llama_ftype of llama.h and llama-quant.cpp: the K mixtures S and L, and the IQ mixtures).
_OTHER_TYPES: Mapping[int, str] = {
    11: "Q3_K", 13: "Q3_K", 21: "Q2_K", 22: "IQ3_S", 27: "IQ3_S", 29: "IQ2_S",
}  # fmt: skip
# Mixtures whose tensors are not of the encoding they are named for.
_MIXED: Mapping[str, tuple[str, ...]] = {"IQ2_S": ("IQ2_XS",), "IQ3_S": ("IQ3_XXS",)}
_IQ_FALLBACK = "IQ4_NL"  # of every IQ type whose blocks do not fit a row


def file_types() -> dict[int, str]:
    """Return {number of general.file_type: name of the encoding that it means}, by the tables."""
    found = {row.file_type: row.name for row in ENCODINGS.values() if row.file_type is not None}
    for scheme in SCHEMES.values():
        if scheme.file_type is not None:
            found.setdefault(scheme.file_type, scheme.base)
    return found | dict(_OTHER_TYPES)


def check_file_type(ctx: CheckContext) -> Result:
    """Return a Result that fails unless the tensors have the general.file_type of the file.

    A float type must be that of most weights, a mixture's encoding that of at least some. A
    quantized file without a quantization version is a warning. Raises NotRun where the file names
    no known type.
    """
    metadata = ctx.model.metadata
    if _FILE_TYPE not in metadata:
        raise NotRun(f"the file states no {_FILE_TYPE}")
    stated = metadata[_FILE_TYPE]
    if stated == _GUESSED:
        raise NotRun(f"{_FILE_TYPE} is {stated}, which claims no type")
    where = f"{ctx.where}: {_FILE_TYPE}"
    number = stated & ~_GUESSED if isinstance(stated, int) else stated
    claimed = file_types().get(number)
    counts = elements_by_encoding(ctx.model)
    if not counts:
        raise NotRun("the file holds no matrices")
    main, most = counts.most_common(1)[0]
    if claimed is None:
        text = f"{short_value(stated)}, which is no type; most weights are {main}"
        todo = "set it to what they are"
        return Result(text, [CheckFinding(where, text, "a type of llama.cpp", todo, "warning")])
    share = f"{most / counts.total():.1%} of the weights are {main}"
    # A mixture has its encoding in some tensors, a float type in most weights.
    findings = []
    quantized = not ENCODINGS[claimed].numpy
    if quantized and not counts.keys() & _with_fallbacks(claimed):
        findings.append(
            CheckFinding(
                where,
                f"{stated} ({claimed}), and no tensor is {claimed}; {share}",
                "a type that the tensors have",
                "set it to what they are",
            )
        )
    elif not quantized and main != claimed:
        findings.append(
            CheckFinding(
                where,
                f"{stated} ({claimed}), but {share}",
                f"most weights {claimed}",
                "set it to what they are",
            )
        )
    coded = [name for name in counts if not encoding_row(name).numpy]
    if coded and _QUANTIZATION_VERSION not in metadata:
        text = f"no {_QUANTIZATION_VERSION} with {coded[0]} tensors"
        findings.append(CheckFinding(ctx.where, text, "2, as docs/gguf.md asks", level="warning"))
    return Result(f"{stated} ({claimed}); {share}", findings)


def _with_fallbacks(claimed: str) -> set[str]:
    """Return the encoding `claimed` and those that its mixture has for other tensors.

    Among them are the ones for rows whose length is no multiple of the encoding's block.
    """
    found = {claimed, *_MIXED.get(claimed, ())}
    if claimed.startswith("IQ"):
        found.add(_IQ_FALLBACK)
    while claimed in FALLBACK:
        claimed = FALLBACK[claimed]
        found.add(claimed)
    return found


def check_code(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each missing Python module that a configuration names.

    For an architecture known here it is a warning: transformers has code for most of them. For
    others only that code can load the model, and it is a failure. Raises NotRun where nothing names
    code in the folder.
    """
    folder = ctx.model.folder
    named = named_code(folder)
    if folder is None or not named:
        raise NotRun("no configuration names code of this folder")
    lost = {name: whose for name, whose in named.items() if not (folder.path / name).is_file()}
    try:
        known = bool(ctx.spec)
    except NotRun:
        known = False
    findings = [
        CheckFinding(
            name,
            f"named by {whose}, and not there",
            "the module in the folder: loading with trust_remote_code fails without it",
            "get the file, or take the key out (aprfmt set --remove)",
            "warning" if known else "fail",
        )
        for name, whose in lost.items()
    ]
    return Result(f"{len(named) - len(lost)} of {len(named)} modules", findings)


def check_quantization(ctx: CheckContext) -> Result:
    """Return a Result that fails unless config.json's quantization is how weights are packed.

    Modules that its lists name and that do not exist are findings too. Raises NotRun where neither
    config.json nor the tensors say anything of packed weights.
    """
    config = packing_config(ctx.model)
    if config is None:
        raise NotRun("there is no config.json")
    section: Any = quantization_section(config)
    # A ggml type with a scale next to it (NVFP4) is said by the tensor's own type.
    held = [t.encoding for t in ctx.model.values() if t.parts]
    packed = {name for name in held if encoding_row(name).ggml is None}
    loose = [name for name in ctx.model if name.endswith(_PACKED) and not ctx.model[name].parts]
    key = next((key for key in SECTIONS if config.get(key) is section), SECTIONS[0])
    where = f"config.json: {key}"
    if section is None:
        if packed or loose:
            what = ", ".join(sorted(packed)) or loose[0]
            found = f"nothing, but weights are packed ({what})"
            todo = "loaders would read them as they stand"
            finding = CheckFinding(where, found, "how the weights are quantized", todo)
            return Result("", [finding])
        raise NotRun("neither configuration nor tensors speak of packed weights")
    sparse = sparsity_format(section)
    if sparse and not any(name.endswith(_SPARSE) for name in ctx.model):
        found = f"sparsity_config says {sparse!r}; no tensor is a part of such a weight"
        todo = "take it away, or get the weights it means"
        return Result(
            "", [CheckFinding(where, found, f"tensors named *{' or *'.join(_SPARSE)}", todo)]
        )
    claimed = _claimed_encodings(section)
    if not claimed:
        method = section.get("quant_method", "unnamed")
        raise NotRun(f"quantization {method!r} is not one this package knows by its tensors")
    unread = ctx.model.unread
    if not claimed & packed and unread is not None and unread.lacks:
        raise NotRun(f"{unread.claim}; see the check completeness")
    if not claimed & packed and ctx.model.lost_parts:
        raise NotRun("every packed weight lacks a part; see the check layout")
    if not claimed & packed:
        there = ", ".join(sorted(packed)) or "no packed weight"
        found = f"says {', '.join(sorted(claimed))}; the file holds {there}"
        todo = "take it away, or get the weights it means"
        finding = CheckFinding(where, found, f"{' or '.join(sorted(claimed))} weights", todo)
        return Result("", [finding])
    count = sum(name in packed for name in held)
    astray = ctx.model.modules
    findings = (
        []
        if astray is None
        else [
            CheckFinding(
                where,
                astray.says + astray.examples_text,
                "names of modules that are there",
                astray.remedy,
            )
        ]
    )
    wrong = wrong_claims(ctx.model)
    if wrong is not None:
        expected = "packed what it says is packed, plain what it leaves as it is"
        findings.append(CheckFinding(where, wrong.says, expected, wrong.remedy or _REQUANTIZE))
    else:
        findings += [
            CheckFinding(
                where,
                f"lists {name}",
                "names of modules that are there",
                f"did it mean {nearest}?" if nearest else "take it away",
                "warning",
            )
            for name, nearest in stale_names(ctx.model)
        ]
    findings += _contradicted_zeros(ctx, key, section)
    partial = partial_input_scales(ctx.model)
    if partial is not None:
        todo = "calibrate again with texts that reach those layers, or leave them unquantized"
        findings.append(CheckFinding(where, partial.text, "one for every weight", todo, "warning"))
    conflict = conflicting_packings(ctx.model)
    if conflict is not None:
        todo = "set the file to what config.json says, by which the weights are read here"
        files = packing_conflicts(ctx.model)
        weighs = any(changes_weights(ctx.model, one.key) for one in files)
        level: Level = "warning" if files and not weighs else "fail"
        findings.append(CheckFinding(where, conflict.text, "one packing in both", todo, level))
    return Result(f"{', '.join(sorted(claimed & packed))}, {count} weights", findings)


def _contradicted_zeros(
    ctx: CheckContext, key: str, section: Mapping[str, Any]
) -> list[CheckFinding]:
    """Return [finding] where symmetric GPTQ weights have zero points of the format not stated.

    By the stated `checkpoint_format` every code is then read one step off. `key` is where
    config.json has the quantization section. The finding has the command that sets the format where
    all symmetric weights contradict it. [] where none does.
    """
    asked: dict[str | None, list[str]] = {}
    for name, view in ctx.model.items():
        try:
            packed = [stored.packed() for stored in view.stored if stored.packed is not None]
            for one in packed:
                if one.dialect.name == gptq.NAME and one.config.get("sym") is True:
                    form = gptq.contradicted_format(one.parts, one.config)
                    asked.setdefault(form, []).append(name)
        except AprfmtError:
            continue  # the check of packed weights says it
    wrong = {form: names for form, names in asked.items() if form is not None}
    if not wrong:
        return []
    (form, names), *_ = wrong.items()
    stated = section.get("checkpoint_format", "gptq")
    stored = "the zero points less one" if stated == "gptq" else "the zero points themselves"
    many = sum(map(len, asked.values()))
    found = (
        f"says sym and checkpoint_format {stated!r}, which stores {stored}; by that every zero "
        f"point of {len(names)} of {many} weights is one off the middle of the codes, as in "
        f"{names[0]}: the bytes are of {form!r}"
    )
    todo = "quantize again: its weights are of both formats"
    if len(names) == many and section.get("quant_method") == gptq.NAME:
        word = f"config.json:{key}.checkpoint_format={json.dumps(form)}"
        todo = command_line("set", opening_path(ctx.model.path), word, "--in-place")
    expected = "zero points in the middle of the codes of a symmetric weight"
    return [CheckFinding(f"config.json: {key}", found, expected, todo)]


_REQUANTIZE = "correct its lists of modules"
# What only packed weights have, as bitsandbytes, GPTQ and AWQ name it.
_PACKED = (".qweight", ".weight_packed", ".absmax", ".SCB")
# What only weights without their zeros have, as compressed-tensors names it.
_SPARSE = (".bitmask", ".compressed")


def _claimed_encodings(section: Mapping[str, Any]) -> set[str]:
    """Return the names of the encodings that a quantization section means; empty if unknown."""
    if section.get("load_in_4bit") or section.get("_load_in_4bit"):
        kind = section.get("bnb_4bit_quant_type", "fp4")  # bitsandbytes' default
        return {str(kind).upper()}
    try:
        return {dialect.name.upper() for dialect in dialects_of(section)}
    except AprfmtError:
        return set()


def check_activation_scales(ctx: CheckContext) -> Result:
    """Return a Result with a warning where only some packed weights have an activation scale.

    Weights of the same encoding are compared. Raises NotRun where no weight is packed.
    """
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name, view in ctx.model.items():
        if view.stored[0].packed is not None:
            scaled = any(OF_INPUTS.search(suffix) for suffix in view.parts)
            found.setdefault(view.encoding, ([], []))[0 if scaled else 1].append(name)
    if not found:
        raise NotRun("no weight is packed by a dialect")
    findings = [
        CheckFinding(
            lacking[0],
            f"{len(lacking)} of {len(lacking) + len(having)} {encoding} weights have no scale of "
            f"activations: {list_names(lacking)}",
            "one for each, as for the others, or none",
            "engines take 1.0, or 0, where there is none: quantize those layers again, or name "
            "them in the claim as ones whose activations are not quantized",
            "warning",
        )
        for encoding, (having, lacking) in found.items()
        if having and lacking
    ]
    return Result(f"{sum(len(having) for having, _ in found.values())} scales", findings)


def check_dtype(ctx: CheckContext) -> Result:
    """Return a Result with a warning unless most float weights have config.json's dtype.

    Raises NotRun where it names none, or there are no float matrices.
    """
    config = ctx.model.config
    if config is None or ctx.model.folder is None:
        raise NotRun("there is no config.json next to the weights")
    stated = config.get("dtype", config.get("torch_dtype"))
    claimed = DTYPES.get(stated) if isinstance(stated, str) else None
    if claimed is None and (stated is None or (isinstance(stated, str) and stated in OTHER_DTYPES)):
        raise NotRun(f"config.json names no float dtype ({stated!r})")
    if claimed is None:
        finding = CheckFinding(
            "config.json: dtype",
            str(short_value(stated)),
            "a dtype of torch",
            "loaders refuse it",
            "warning",
        )
        return Result(str(short_value(stated)), [finding])
    main = main_float_encoding(ctx.model)
    if not main:
        raise NotRun("the file holds no plain float matrices")
    findings = []
    if main != claimed:
        findings.append(
            CheckFinding(
                "config.json: dtype",
                f"{stated}; most float weights are {main}",
                claimed,
                "loaders widen or narrow the weights to what it says",
                "warning",
            )
        )
    return Result(f"{stated}", findings)


def check_counts(ctx: CheckContext) -> Result:
    """Return a Result with a warning for each count or shape in the metadata that is wrong.

    It is compared with that of the tensors. Raises NotRun where the metadata has none.
    """
    metadata = ctx.model.metadata
    held = {name: tensor.shape for name, tensor in ctx.model.items()}
    findings, seen = [], 0
    stated = metadata.get("param_count")
    if stated:  # importers that stream leave 0
        seen += 1
        total = sum(math.prod(tensor.info.shape) for tensor in ctx.model.source.tensors.values())
        if stated != total:
            findings.append(
                CheckFinding(
                    f"{ctx.where}: param_count", f"{stated}", f"{total} elements", level="warning"
                )
            )
    table = metadata.get("tensor_shapes")
    if isinstance(table, Mapping):
        seen += 1
        for name, shape in table.items():
            found = held.get(name)
            if found is None or list(found) != shape:
                is_there = "no such tensor" if found is None else f"{list(found)}"
                findings.append(
                    CheckFinding(
                        f"{ctx.where}: tensor_shapes {name!r}",
                        f"{shape}",
                        is_there,
                        "the copy is not authoritative, but listing tools show it",
                        "warning",
                    )
                )
    if not seen:
        raise NotRun("the file states no counts")
    return Result(f"{seen} statements", findings)
