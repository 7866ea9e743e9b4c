"""`aprfmt trace MODEL --map DIR`: arrays that another engine dumped become a trace."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aprfmt.base.protocols import Value
from aprfmt.base.sequences import join_first
from aprfmt.base.text_escape import shorten
from aprfmt.cli import render, run_options
from aprfmt.errors import FormatError, UsageError

if TYPE_CHECKING:
    from aprfmt.inference.engines.captures import Captures
    from aprfmt.inference.engines.mapping import NameMap
    from aprfmt.inference.running import Run
    from aprfmt.inference.trace import Trace
    from aprfmt.model import Model
    from aprfmt.model.verdict import Pronounced

_SHOWN = 3


@dataclass(frozen=True)
class DumpedArrays:
    """The options --map (a folder of dumped arrays) and --mapping (a file of their points)."""

    arrays: Path | None
    mapping: Path | None


class MappedDump(NamedTuple):
    """A model and the trace of arrays that another engine dumped of it.

    `found` is the mapping as JSON: its file and a row per array. `new` is (path, text) of a
    proposed mapping that is still to be written, None where there is none to write.
    """

    model: "Model"
    trace: "Trace"
    found: dict[str, object]
    new: tuple[Path, str] | None


def map_arrays(
    text: str,
    dumped: DumpedArrays,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
    save: Path | None,
    force: bool,
    stack: ExitStack,
) -> MappedDump:
    """Return the model, and the trace of the dumped arrays with its mapping.

    Without a mapping file one is proposed; `save` is the trace that it will stand next to. `stack`
    closes what is opened. Raises UsageError where --ids disagrees with the ids of the dump,
    FormatError where no array is a point: only then the mapping is written here (over an older one
    with `force`), to be corrected. `text` names the model and its run.
    """
    from aprfmt.inference.engines.dumps import open_dump
    from aprfmt.inference.engines.mapping import mapped_trace, read_mapping
    from aprfmt.inference.engines.modules import tower_sentence

    assert dumped.arrays is not None
    run = stack.enter_context(run_options.open_session(text, where))
    # The token ids come from the dump, from the mapping, or from the options.
    given = None if dumped.mapping is None else read_mapping(dumped.mapping)
    wanted = run_options.token_ids(run.model, tokens)[0] if tokens.given else None
    captures = stack.enter_context(open_dump(dumped.arrays, wanted, run.model))
    ids = captures.ids or (list(given.ids or ()) if given is not None else None)
    if ids and tokens.given and ids != wanted:
        raise UsageError(f"{dumped.arrays}: its token ids are known; leave {tokens.given[0]} out")
    alone = "" if ids or given is not None else tower_sentence(captures.names)
    if alone:
        raise FormatError(f"{dumped.arrays}: holds {alone}")
    ids = ids or run_options.token_ids(run.model, tokens)[0]
    run_options.check_ids(run.model, ids)
    # Without a mapping, one is proposed by comparing with a run of the model.
    written = None
    if given is None:
        given = _propose_mapping(captures, run, ids)
        if save is not None:
            written = save.with_name(f"{save.name.removesuffix('.safetensors')}.map.json")
            given = _placed_mapping(given, captures, written)
    if not any(row is not None for row in given.names.values()):
        if written is not None:
            write_mapping(written, given.text(written), force)
        near = _nearest_points(captures, run, len(ids))
        raise _no_point_error(dumped.arrays, near, run.model, written, given.reasons)
    trace = stack.enter_context(mapped_trace(captures, given, ids, run.model))
    rows = [
        {
            "name": name,
            "shape": list(captures.shapes[name]),
            **(row.to_json() if row is not None else _unmapped_row(given, name)),
        }
        for name, row in given.names.items()
    ]
    file, new = None if written is None else str(written), None
    if written is not None:
        new = written, given.text(written)
    return MappedDump(run.model, trace, {"file": file, "names": rows}, new)


def mapping_verdict(
    found: Mapping[str, Value], trace: "Trace", exact: bool = False
) -> "Pronounced":
    """Return the verdict on a mapping of dumped arrays: how many are points, which are unread.

    It is bad if ranks that should hold equal arrays do not, or if requests with the same tokens
    have other values: beyond tolerance, or with `exact` at all. It is open if an array that is a
    point was not read. `found` is the JSON of the mapping, `trace` the trace made by it.
    """
    from aprfmt.measure.repeated_tokens import repeated_tokens
    from aprfmt.measure.trace_view import unequal_rank_sentences, unread_arrays
    from aprfmt.model.verdict import Compared, VerdictWords, pronounce

    rows = found["names"]
    counts = {"arrays": (sum(row["key"] is not None for row in rows), len(rows))}
    words = VerdictWords("mapped", "not mapped", "mapped in part")
    differs = bool(unequal_rank_sentences(trace))
    differs |= any(one.differs(exact) for one in repeated_tokens(trace))
    return pronounce(words, Compared(differs, counts, unread_arrays(trace)))


def _unmapped_row(given: "NameMap", name: str) -> dict[str, str | None]:
    """Return {"key": None} of an array that is no point, with "why" where the reason is known.

    `given` is the mapping. `name` is the array.
    """
    why = given.reasons.get(name)
    return {"key": None} if why is None else {"key": None, "why": why}


def _nearest_points(captures: "Captures", run: "Run", tokens: int) -> dict[str, str]:
    """Return {array: its shape in words, and the points of the model that come nearest to it}.

    `tokens` is the length of the pass.
    """
    from aprfmt.inference.engines.point_shapes import nearest_points_text, point_shapes

    points = point_shapes(run.model.hyper, run.points, tokens)
    return {
        name: nearest_points_text(shape, points, tokens) for name, shape in captures.shapes.items()
    }


def _no_point_error(
    arrays: Path,
    near: Mapping[str, str],
    model: "Model",
    written: Path | None,
    reasons: Mapping[str, str],
) -> FormatError:
    """Return the error for arrays of which none is a point; an empty trace would say nothing.

    `near` has each array's shape in words, with the points that come nearest to it. `written` is
    the mapping file that was written, `reasons` say why arrays are no points.
    """
    named = [
        f"{shorten(name, 60)} {said}" + (f" ({reasons[name]})" if name in reasons else "")
        for name, said in sorted(near.items(), key=lambda row: row[0] not in reasons)
    ]
    shown = join_first(named, _SHOWN)
    there = f"name them in {written}" if written else "save a mapping with -o and correct it"
    return FormatError(
        f"{arrays}: none of its {len(named)} arrays is a point of {model.path}: {shown}; expected "
        "outputs of its layers, or logits [tokens, vocabulary], of these token ids; "
        f"{there}, then --mapping it"
    )


def _propose_mapping(captures: "Captures", run: "Run", ids: list[int]) -> "NameMap":
    """Return the mapping proposed by comparing the arrays with the points of a run on `ids`."""
    from aprfmt.inference.engines.mapping import arithmetic_dtype
    from aprfmt.inference.engines.mapping_proposal import propose_mapping
    from aprfmt.inference.trace import KeptValues

    kept = KeptValues()
    request = replace(run.request, ids=tuple(ids), wanted=tuple(run.points), logits_rows="all")
    with run.trace(request, place=kept) as trace:
        own = {key: trace.recorded_values(key) for key in trace.records}
        aliases = dict(trace.aliases)
    return propose_mapping(
        captures,
        {k: v for k, v in own.items() if v is not None},
        ids,
        arithmetic_dtype(captures),
        aliases,
    )


def _placed_mapping(given: "NameMap", captures: "Captures", path: Path) -> "NameMap":
    """Return a mapping that is to stand in the file `path`, with the relative path of the arrays.

    That path is "" unless the arrays are in the mapping's folder or below. `given` is the mapping.
    """
    try:
        place = captures.path.resolve().relative_to(path.parent.resolve())
        return replace(given, captures=place.as_posix())
    except ValueError:
        return replace(given, captures="")


def write_mapping(path: Path, text: str, force: bool) -> None:
    """Write the text of a mapping file; OutputError where it exists and `force` is not set."""
    from aprfmt.formats.atomic import FileSet

    with FileSet(force=force) as published:
        published.create(path).write(text.encode())


def show_mapping(found: Mapping[str, Value]) -> None:
    """Print a table of arrays: the point each was mapped to, its layout, how certain that is.

    `found` is the JSON of the mapping.
    """
    rows = []
    for row in found["names"]:
        distance = row.get("distance")
        rows.append(
            (
                render.escape(row["name"]),
                str(row["shape"]),
                row["key"] or "-",
                " ".join(row.get("layout", ()))
                + (f" rows {row['rows']}" if row.get("rows", "all") != "all" else ""),
                row.get("certainty") or "",
                "-" if distance is None else f"{distance:.3g}",
                render.escape(row.get("why") or ""),
            )
        )
    render.table(
        rows, ("array", "shape", "point", "layout", "certainty", "distance", "why"), "lllllrl"
    )
    if found["file"]:
        render.line(f"mapping: {render.escape(found['file'])} (correct it, then --mapping it)")
