"""Opens whatever an engine dumped as one sequence's arrays, for all commands."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.base.dump_names import place_in_dump
from aprfmt.base.garbage_collector import pause_collector
from aprfmt.base.memory import keep_freed
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.inference.capture import key_name, point_instances
from aprfmt.inference.engines.captures import IDS, Captures, RepeatedRows, open_captures
from aprfmt.inference.engines.dump_folders import BATCH, Dump, Pass, is_dump, read_dump
from aprfmt.inference.engines.engine_modules import (
    JOINED,
    has_engine_modules,
    module_name,
    module_of_size,
    split_joined,
    under_module_names,
)
from aprfmt.inference.engines.modules import ModuleMap, hidden_state_points
from aprfmt.inference.engines.parts import one_rank_text
from aprfmt.inference.engines.plain_names import plain_names
from aprfmt.inference.engines.point_shapes import point_shapes
from aprfmt.inference.engines.rank_joining import JoinedArray, PointWidths, lone_shares
from aprfmt.inference.engines.sequences import AlignedArrays, align, list_sequences
from aprfmt.model import Model

WidthsOf = Callable[[Sequence[str]], PointWidths]
_TOKENS = 8191  # a length that is no size of a model, to tell the axis of tokens
_LISTED = 256  # sequences of a dump whose ids a trace of one of them has
_BATCHES = ("starts", "mask", "lengths", "counts", "requests")


@contextmanager
def open_dump(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> Iterator[Captures]:
    """Yield dumped arrays as the Captures of one sequence: ranks joined, rows by token.

    `ids` name the sequence where there are several, `model` gives the sizes of whole arrays. Raises
    FormatError for what is damaged, a rank that is missing, or an unclear sequence.
    """
    widths_of = _widths_by_name(model)
    keep_freed()  # one array after another takes the place of the last
    with ExitStack() as stack:
        if is_dump(path):
            with pause_collector():
                dump = read_dump(path, stack, widths_of)
            yield _captures_of_sequence(path, dump, ids, widths_of)
            return
        captures = _under_plain_names(stack.enter_context(open_captures(path)))
        batch = _batch_as_pass(captures)
        if batch is None:
            named = _under_transformers_names(captures, widths_of)
            yield _without_shares(named, widths_of)
            return
        dump = Dump((batch,), {}, {}, (), captures.others)
        yield _captures_of_sequence(path, dump, ids, widths_of)


def dump_sequences(path: Path) -> list[tuple[int, ...]]:
    """Return the token ids of each sequence that a dump at `path` contains.

    [] for a file or folder of one sequence alone. Raises FormatError for damaged files.
    """
    with ExitStack() as stack:
        if is_dump(path):
            with pause_collector():
                return list_sequences(read_dump(path, stack, _widths_by_name(None)))
        captures = stack.enter_context(open_captures(path))
        batch = _batch_as_pass(captures)
        if batch is None:
            return []
        return list_sequences(Dump((batch,), {}, {}, (), captures.others))


def _without_shares(captures: Captures, widths_of: WidthsOf) -> Captures:
    """Return captures of one file or folder without arrays that hold only one rank's columns.

    These are named in `left` and `lost`. Kept are arrays whose name is no point's, and logits of
    fewer tokens than the vocabulary, which may be meant.
    """
    widths = widths_of(list(captures.shapes))
    known = captures.ids if captures.listed is not None or IDS in captures.shapes else None
    found = {
        name: _lone_share_text(row)
        for name, row in lone_shares(
            captures.shapes, widths, None if known is None else len(known)
        ).items()
        if row[1] != widths.vocabulary
    }
    if not found:
        return captures
    rest = {name: shape for name, shape in captures.shapes.items() if name not in found}
    left, lost = {**captures.left, **found}, captures.lost.union(found)
    return replace(captures, shapes=rest, left=left, lost=lost)


def _lone_share_text(row: tuple[int, int, int]) -> str:
    """Return a sentence saying that an array has only one rank's columns.

    `row` is (columns of the array, columns of all ranks, number of ranks).
    """
    own, whole, ranks = row
    return f"{own} of {whole} columns{one_rank_text(ranks)}"


def _refuse_lone_rank(path: Path, found: AlignedArrays, widths: PointWidths) -> None:
    """Raise FormatError if arrays have one rank's columns and other ranks' files are missing.

    `widths` are the columns of whole arrays, by the names that the engine gave them.
    """
    shapes = {
        name: (one.shape[0], int(np.prod(one.shape[1:], dtype=np.int64)))
        for name, one in found.arrays.items()
        if len(one.shape) > 1
    }
    shares = lone_shares(shapes, widths, None)
    if not shares:
        return
    name, (own, whole, ranks) = next(iter(shares.items()))
    raise FormatError(
        f"{path}: {len(shares)} arrays are one rank's share, such as {shorten(name, 80)}: {own} of "
        f"{whole} columns, as one rank of {ranks} has them; the other ranks' files are missing: "
        "give the folder that has all ranks"
    )


def _batch_as_pass(captures: Captures) -> Pass | None:
    """Return captures as one pass of a batch; None unless they show several sequences.

    Several sequences show by arrays that describe a batch, by ids of two rows, or by positions
    that begin anew.
    """
    # Arrays that describe the batch, by the last part of their name.
    kinds = {
        name: BATCH[last] for name in captures.shapes if (last := name.rpartition(".")[2]) in BATCH
    }
    several = any(kind in _BATCHES for kind in kinds.values()) or any(
        kind == "ids" and len(captures.shapes[name]) == 2 and captures.shapes[name][0] > 1
        for name, kind in kinds.items()
    )
    if "ids" not in kinds.values():
        return None
    # Positions that begin anew show several sequences.
    if not several:
        several = any(
            kind == "positions" and bool(np.any(np.diff(captures.read(name).reshape(-1)) != 1))
            for name, kind in kinds.items()
        )
    if not several:
        return None

    # Several sequences: treat the arrays as one pass of a dump.
    made = Pass(
        -1,
        0,
        {name: _captured_array(captures, name) for name in captures.shapes if name not in kinds},
    )
    for name, kind in kinds.items():
        made.batch.setdefault(kind, _captured_array(captures, name))
    made.texts = {name: value for name, value in captures.values.items() if isinstance(value, list)}
    return made


def _captured_array(captures: Captures, name: str) -> JoinedArray:
    """Return a captured array by its name, unread."""
    return JoinedArray(
        name,
        captures.shapes[name],
        captures.dtypes[name],
        lambda: captures.read(name),
        tiles=captures.tiles(name),
    )


def _under_plain_names(captures: Captures) -> Captures:
    """Return captures whose arrays of modules and capture points have plain names.

    Removed are what hooks and scripts add to them (see `plain_names`).
    """
    own = plain_names(captures.shapes)
    if all(name == short for short, name in own.items()):
        return captures
    return replace(
        captures,
        shapes={short: captures.shapes[name] for short, name in own.items()},
        dtypes={short: captures.dtypes[name] for short, name in own.items()},
        read=lambda short: captures.read(own[short]),
        tiles=lambda short: captures.tiles(own[short]),
        rows={short: captures.rows[name] for short, name in own.items() if name in captures.rows},
    )


def _under_transformers_names(captures: Captures, widths_of: WidthsOf) -> Captures:
    """Return captures of one sequence under transformers' names, joined ones such as qkv cut.

    They are unchanged if no name is of vLLM's or SGLang's modules, or of a joined module whose
    parts' sizes are known.
    """
    engine = has_engine_modules(captures.shapes)
    if not engine and not any(name.rpartition(".")[2] in JOINED for name in captures.shapes):
        return captures

    arrays: Mapping[str, JoinedArray] = {
        name: _captured_array(captures, name) for name in captures.shapes
    }
    rows: Mapping[str, tuple[int, ...]] = captures.rows
    if engine:
        named = under_module_names(arrays, rows)
        arrays, rows = named.arrays, named.rows
    joined = [name for name in arrays if name.rpartition(".")[2] in JOINED]
    parts = widths_of(joined).parts if joined else {}
    if not engine and not parts:
        return captures
    made, rows = split_joined(arrays, rows, parts)
    return replace(
        captures,
        shapes={name: one.shape for name, one in made.items()},
        dtypes={name: one.dtype for name, one in made.items()},
        read=lambda name: made[name].read(),
        tiles=lambda name: made[name].tiles,
        rows=rows,
    )


def _captures_of_sequence(
    path: Path, dump: Dump, ids: Sequence[int] | None, widths_of: WidthsOf
) -> Captures:
    """Return one sequence of a dump as captures, its arrays under transformers' names.

    Requests with the same tokens come with it as `repeats`. `ids` are the sequence's token ids,
    None if the dump has only one. Raises FormatError, which names `path`, if the sequence is
    unclear.
    """
    try:
        found = align(dump, ids)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    captures = _captures_of_rows(path, dump, found, widths_of)
    repeats = [
        RepeatedRows(
            one.requests,
            _captures_of_rows(path, dump, one.own, widths_of),
            _captures_of_rows(path, dump, one.other, widths_of),
        )
        for one in found.repeats
    ]
    return replace(captures, repeats=tuple(repeats))


def _captures_of_rows(
    path: Path, dump: Dump, found: AlignedArrays, widths_of: WidthsOf
) -> Captures:
    """Return a dump's aligned arrays as captures under transformers' names.

    They carry what could not be read of the dump, with the reason, and facts on the dump.
    """
    left = dict(found.left)
    for one_pass in dump.passes:
        left |= one_pass.left
    widths = widths_of([*found.arrays, *left])
    _refuse_lone_rank(path, found, widths)
    named = under_module_names(found.arrays, found.rows)
    arrays, rows = split_joined(named.arrays, named.rows, widths_of(list(named.arrays)).parts)
    lost = {name for name in left if name in widths.points}
    left |= {**dump.broken, **dump.of_ranks}
    for step, one in dump.unequal:
        place = place_in_dump(step)
        left[f"{one.name} ({place})" if place else one.name] = one.says
    return Captures(
        path,
        {name: one.shape for name, one in arrays.items()},
        {name: one.dtype for name, one in arrays.items()},
        lambda name: arrays[name].read(),
        dump.others,
        found.ids,
        {},
        rows,
        left,
        facts=_dump_facts(dump, found, named.notes),
        lost=frozenset(lost.union(found.again, dump.broken)),
        tiles=lambda name: arrays[name].tiles,
    )


def _dump_facts(dump: Dump, found: AlignedArrays, notes: Sequence[str]) -> Mapping[str, Any]:
    """Return {name: value} of what a trace says of a dump, ready for JSON.

    That is: ranks, how their arrays were joined, the pass of each token, and remarks. `masked`
    are the ids before the first token that an attention mask hides, `behind` those after the last
    one. `others` are the ids of the other sequences, of at most _LISTED of them.
    """
    return {
        "ranks": dict(dump.axes),
        "layouts": dict(dump.layouts),
        "unequal": [
            {
                "name": one.name,
                "pass": step,
                "axis": one.axis,
                "ranks": list(one.ranks),
                "apart": one.apart,
                "says": one.says,
            }
            for step, one in dump.unequal
        ],
        "passes": len(dump.passes),
        "steps": list(found.steps),
        "positions": list(found.positions),
        "masked": list(found.masked),
        "behind": list(found.behind),
        "notes": [*found.notes, *notes],
        "sequences": len(found.sequences),
        "sequence": found.chosen,
        "others": [
            None if one is None else list(one)
            for at, one in enumerate(found.sequences[: _LISTED + 1])
            if at != found.chosen
        ],
    }


def _widths_by_name(model: Model | None) -> WidthsOf:
    """Return a function that takes array names and returns the sizes of the whole arrays.

    The sizes are those that the model gives them. Without a model they are not known.
    """
    if model is None:
        return lambda names: PointWidths()
    # Elements of a token at each point, by the model's sizes.
    known = point_instances(model.spec.block, model.hyper, model.roles)
    shapes = point_shapes(model.hyper, known, _TOKENS)
    widths = {
        key: int(np.prod(shape[1:], dtype=np.int64))
        for key, shape in shapes.items()
        if shape and shape[0] == _TOKENS
    }

    def of_names(names: Sequence[str]) -> PointWidths:
        """Return what the model says of dumped arrays, by their names.

        That is each whole array's width, the widths of q, k and v in a joined result such as qkv,
        and the capture point.
        """
        # Read names as transformers' modules or as our own keys.
        gated = has_engine_modules(names)
        base = {name: module_name(module_of_size(name), gated, {}) for name in names}
        modules = ModuleMap(base.values(), model.spec.block.placement)
        states = hidden_state_points(base, int(model.hyper["n_layers"]))
        whole: dict[str, int] = {}
        parts: dict[str, tuple[tuple[int, int], ...]] = {}
        points: dict[str, str] = {}
        for name, module in base.items():
            read = [(key_name(one.point.name, one.layer), one) for one in modules.read(module)]
            if name in states:
                module = key_name(*states[name])
            if module in known:
                key = known[module].alias_of or module if module in known else module
                if key in widths:
                    whole[name], points[name] = widths[key], key.rpartition(".")[2]
                continue
            read = [(key, one) for key, one in read if key in widths]
            if not read:
                continue
            points[name] = read[0][1].point.name
            # A joined result has several points; its width is their sum.
            joined = [key for key, one in read if one.name.part in ("qkv", "halves")]
            if joined:
                parts[name] = tuple(
                    (widths[key], shapes[key][-1] if len(shapes[key]) > 2 else 1) for key in joined
                )
                whole[name] = sum(width for width, _ in parts[name])
            else:
                whole[name] = widths[read[0][0]]
                if points[name] in ("k", "v") and len(shapes[read[0][0]]) > 2:
                    parts[name] = ((whole[name], shapes[read[0][0]][-1]),)
        vocabulary = int(model.hyper["vocab_size"])
        return PointWidths(whole, parts, points, frozenset(widths.values()), vocabulary)

    return of_names
