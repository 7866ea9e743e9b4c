"""Checks of the stored values, by what one pass over all of them found."""

from collections import Counter
from collections.abc import Iterator

from aprfmt.arch.binding import bind_names
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.protocols import LazyTensor
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file.rounded_scales import rounded_scales_text
from aprfmt.checks.file.zero_pages import find_zero_pages
from aprfmt.checks.records import CheckFinding, NotRun, Result
from aprfmt.errors import AprfmtError, UnsupportedError
from aprfmt.model.packing_sizes import lost_settings_text
from aprfmt.model.promised_parts import missing_parts
from aprfmt.model.zero_pairs import ZERO_TODO, find_zero_pairs
from aprfmt.tensors.companions import quantization_section
from aprfmt.tensors.stats import tensor_stats
from aprfmt.tensors.view import View


def check_values(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each tensor with NaN or infinities, or without its scale.

    A computed buffer, such as a mask, may hold infinities: that is a warning, and so are factors A
    and B of an adapter that change nothing, and whole pages of zeros within a weight. Raises
    NotRun where a tensor cannot be decoded, or there are none.
    """
    buffers = _buffer_names(ctx)
    findings, counted, unread = [], 0, []
    for name, row in ctx.census.items():
        if row.unread:
            unread.append((name, row.unread))
            continue
        counted += 1
        if row.odd:
            findings.append(
                CheckFinding(name, row.odd, "0 or 1 in a BOOL tensor", "get the file again")
            )
        if row.stats is None or row.scale:
            continue  # a bad scale is named once, by block_scales
        nan, inf = row.stats.nan, row.stats.inf
        if nan or (inf and name not in buffers):
            findings.append(
                CheckFinding(
                    name,
                    f"{nan} NaN and {inf} infinite of {row.stats.count} {row.info.encoding} values",
                    "finite weights",
                    "get the file again, or convert again from the source",
                )
            )
        elif inf:
            text = f"{inf} infinite values in a computed buffer"
            findings.append(CheckFinding(name, text, "finite values", level="warning"))
    findings += _codes_without_scale(ctx)
    findings += find_zero_pages(ctx)
    zeros = find_zero_pairs(ctx.model)
    if zeros.text:
        findings.append(CheckFinding(ctx.where, zeros.text, zeros.expected, ZERO_TODO, "warning"))
    if unread:
        name, why = unread[0]
        raise NotRun(
            f"{counted} of {len(ctx.census)} tensors could be decoded; {name}: {why}", findings
        )
    if not counted:
        raise NotRun("the file holds no tensors")
    return Result(f"{counted} tensors", findings)


def _codes_without_scale(ctx: CheckContext) -> Iterator[CheckFinding]:
    """Yield a failure for each matrix of 8-bit codes whose scale is missing."""
    for name, code in ctx.model.lone_codes.items():
        if name not in ctx.reported_parts:
            yield CheckFinding(
                name,
                code.text,
                "a scale for them, or values of a weight's size",
                "convert again from the source, with its scales",
            )


def _buffer_names(ctx: CheckContext) -> frozenset[str]:
    """Return the stored names of computed buffers, such as masks.

    It is empty for an unknown architecture.
    """
    try:
        style = ctx.model.style
        return frozenset(bind_names(ctx.spec, style, tuple(ctx.model)).buffers if style else ())
    except AprfmtError:
        return frozenset()


def check_block_scales(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each tensor with a scale that no quantizer writes.

    A sum of codes stored in a block that is not the sum of its codes fails too. Raises NotRun where
    no tensor has blocks with scales.
    """
    seen, findings = 0, []
    for name, row in ctx.census.items():
        if row.stats is None or not _has_scales(row.info.encoding):
            continue
        seen += 1
        if row.scale:
            findings.append(
                CheckFinding(
                    name,
                    f"{row.scale} ({row.info.encoding})",
                    "finite scales that fit their block",
                    "get the file again, or quantize again",
                )
            )
    # bitsandbytes stores absmax in a separate tensor, which cannot be negative.
    for name, tensor in ctx.model.items():
        for suffix, part in tensor.parts.items():
            if not suffix.endswith("absmax"):
                continue
            seen += 1
            stats = ctx.census[part.info.name].stats
            if stats is not None and stats.min is not None and stats.min < 0:
                findings.append(
                    CheckFinding(
                        part.info.name,
                        f"a negative absmax ({stats.min:g}) for {name}",
                        "magnitudes",
                        "quantize again",
                    )
                )
    if not seen:
        raise NotRun("no tensor is stored in blocks with scales")
    return Result(f"{seen} tensors", findings)


def _has_scales(encoding: str) -> bool:
    """Return whether an encoding stores blocks with scales, as ggml's quantized types do."""
    row = encoding_row(encoding)
    return row.known and not row.numpy and not row.safetensors


def check_packed(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each packed weight without finite decoded values.

    Scales and indices that the configuration promises and weights do not have are failures too.
    Raises NotRun where no weight is stored as several tensors, or one's format is not supported.
    """
    findings: list[CheckFinding] = []
    seen = 0
    for name, tensor in ctx.model.items():
        if not tensor.parts:
            continue
        seen += 1
        try:
            lazy = tensor.stored[0]
            stats = tensor_stats(lazy)
        except UnsupportedError as error:
            raise NotRun(f"{name}: {error}", findings) from error
        except AprfmtError as error:
            todo = ctx.sizes_command or "quantize again"
            fits = lost_settings_text(ctx.fitting_changes)
            expected = f"parts that fit each other{f': {fits}' * bool(fits)}"
            findings.append(CheckFinding(name, str(error), expected, todo))
            continue
        finally:
            tensor.drop()
        findings += _group_findings(ctx, tensor)
        findings += _scale_findings(lazy, name)
        # A part that is itself not finite is reported by the checks of values and scales.
        parts = [ctx.census[part.info.name] for part in tensor.parts.values()]
        known = any(row.scale or (row.stats and row.stats.nan + row.stats.inf) for row in parts)
        if (stats.nan or stats.inf) and not known:
            findings.append(
                CheckFinding(
                    name,
                    f"{stats.nan} NaN and {stats.inf} infinite values once decoded",
                    "finite weights",
                    "quantize again",
                )
            )
    if not seen:
        raise NotRun("no weight is stored as several tensors")
    findings += [
        CheckFinding(
            ctx.where, one.says, "the parts that the configuration promises", "quantize again"
        )
        for one in missing_parts(ctx.model)
    ]
    return Result(f"{seen} weights", findings)


def _scale_findings(tensor: LazyTensor, name: str) -> list[CheckFinding]:
    """Return [warning] if a packed weight's codes were not made with its scales, else [].

    `name` is the weight's name for the finding.
    """
    laid = None if tensor.packed is None else tensor.packed().laid_out()
    says = "" if laid is None else rounded_scales_text(laid)
    todo = "take the scales that were not rounded, or quantize again"
    expected = "the scales that the codes were made with"
    return [CheckFinding(name, says, expected, todo, "warning")] if says else []


def _group_findings(ctx: CheckContext, tensor: View) -> list[CheckFinding]:
    """Return [finding] if a GPTQ weight's `g_idx` gives scales unequal numbers of inputs.

    Else []. A group is the inputs of one scale; the last one may have fewer. ExLlama takes an index
    of zeros as none and other kernels read it, so that without `desc_act` it is a warning. `tensor`
    is the weight.
    """
    index, scales = tensor.parts.get(".g_idx"), tensor.parts.get(".scales")
    if (
        index is None
        or scales is None
        or len(scales.info.shape) != 2
        or index.info.encoding != "I32"
    ):
        return []
    groups = scales.info.shape[0]
    raw = memoryview(bytes(index.raw())).cast("i")
    counts = Counter(raw)
    size = -(-len(raw) // groups)
    full = sum(count == size for count in counts.values())
    if groups < 2 or (len(counts) == groups and full >= groups - 1):
        return []
    section = quantization_section(ctx.model.config or {}) or {}
    empty = set(counts) == {0} and not section.get("desc_act")
    group, most = counts.most_common(1)[0]
    return [
        CheckFinding(
            index.info.name,
            f"names {len(counts)} of {groups} groups, group {group} for {most} inputs",
            f"{size} inputs for each group",
            "quantize again, or take the file from its source again",
            "warning" if empty else "fail",
        )
    ]
