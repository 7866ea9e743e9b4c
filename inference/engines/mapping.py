"""Mapping files: which dumped array holds which capture point, and in which layout.

A JSON file that `aprfmt trace --map` proposes and a person corrects. Given as a trace, it opens the
arrays it names, in its own folder:

    {"aprfmt_mapping": 1, "captures": "dumps", "ids": [5, 80], "dtype": "float32",
     "names": {"blk0.query": {"key": "L0.q", "layout": ["heads_first"], "rows": "last"},
               "something": null}}

`rows` are token positions, or `last`; `null` says that an array is no point.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from aprfmt.base.dump_names import MAPPING_FILE
from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.formats.bounded_json import dumps, load_file
from aprfmt.inference.capture import find_key, key_name, parse_key
from aprfmt.inference.engines.captures import MAX_JSON, Captures, is_folder_of_arrays
from aprfmt.inference.engines.dump_folders import is_dump
from aprfmt.inference.engines.dumps import open_dump
from aprfmt.inference.engines.layouts import STEPS, PointLayout, apply_layout
from aprfmt.inference.engines.modules import (
    ModuleReader,
    hidden_state_index,
    parse_module,
    points_named,
)
from aprfmt.inference.engines.node_names import node_adder, parse_node_name
from aprfmt.inference.engines.npz import arithmetic_of_arrays, is_embedding_scaled
from aprfmt.inference.engines.point_shapes import nearest_points_text, point_shapes
from aprfmt.inference.engines.record_collector import Collector, drop_batch_axis
from aprfmt.inference.points import POINTS
from aprfmt.inference.record import Record
from aprfmt.inference.trace import Trace, ValueStore
from aprfmt.measure.repeated_tokens import RepeatedTokens
from aprfmt.measure.tolerances import BASE
from aprfmt.measure.traces import compare_traces
from aprfmt.model import Model

Numbers = NDArray[Any]
MARK, SCHEMA = "aprfmt_mapping", 1
RowsHeld = Literal["all", "last"] | tuple[int, ...]


@dataclass(frozen=True)
class MappedArray:
    """One array's entry in a mapping file: its key, its layout, and how sure that is.

    `layout` are layout steps in order. `rows` says which tokens its rows are. `distance` and
    `why` say what `certainty` is based on.
    """

    key: str
    layout: tuple[str, ...] = ("unbatch", "reshape")
    rows: RowsHeld = "all"
    certainty: str = ""
    distance: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the array's entry in a mapping file, as an object for JSON."""
        rows = self.rows if isinstance(self.rows, str) else list(self.rows)
        return {
            "key": self.key,
            "layout": list(self.layout),
            "rows": rows,
            "certainty": self.certainty,
            "distance": self.distance,
            "why": self.why,
        }


@dataclass(frozen=True)
class NameMap:
    """A mapping file. `names` maps arrays to points, None: to none.

    `reasons` say of some why they are none; they are not written to the file.
    """

    names: Mapping[str, MappedArray | None]
    captures: str = ""
    ids: tuple[int, ...] | None = None
    dtype: str = "float32"
    reasons: Mapping[str, str] = field(default_factory=dict)

    def text(self, where: Path) -> str:
        """Return the mapping as the JSON text of its file; `where` is for messages."""
        rows = {name: None if row is None else row.to_json() for name, row in self.names.items()}
        body = {
            MARK: SCHEMA, "captures": self.captures,
            "ids": None if self.ids is None else list(self.ids), "dtype": self.dtype, "names": rows,
        }  # fmt: skip
        dumps(body, str(where))  # raises for what JSON cannot hold
        return json.dumps(body, indent=1, allow_nan=False) + "\n"


def read_mapping(path: Path) -> NameMap:
    """Return a mapping file's content; FormatError says which entry is wrong."""
    said = load_file(path, MAX_JSON)
    if not isinstance(said, dict) or said.get(MARK) != SCHEMA:
        raise FormatError(f"{path}: is no mapping file: expected {MARK} {SCHEMA} and names")
    rows, ids, dtype = said.get("names"), said.get("ids"), said.get("dtype", "float32")
    if not isinstance(rows, dict):
        raise FormatError(f"{path}: names: expected an object of array names")
    if ids is not None and not _are_whole_numbers(ids):
        raise FormatError(f"{path}: ids: expected a list of token ids, or null")
    if dtype not in BASE:
        raise FormatError(f"{path}: dtype {str(dtype)[:40]!r}; expected one of {', '.join(BASE)}")
    captures = said.get("captures", "")
    if not isinstance(captures, str):
        raise FormatError(f"{path}: captures: expected the name of a file or folder")
    names = {name: _parse_entry(row, f"{path}: {name[:200]!r}") for name, row in rows.items()}
    return NameMap(names, captures, None if ids is None else tuple(ids), dtype)


def _are_whole_numbers(value: Any) -> bool:
    """Return whether a value is a list of non-negative integers."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)


def _parse_entry(row: Any, where: str) -> MappedArray | None:
    """Return an entry of a mapping (None: no point); FormatError says what is wrong with it."""
    if row is None:
        return None
    row = {"key": row} if isinstance(row, str) else row
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise FormatError(f"{where}: expected null, a key like L0.q, or an object with a key")
    try:
        parse_key(row["key"])
    except UsageError as error:
        raise FormatError(f"{where}: {error}") from None
    layout = row.get("layout", ["unbatch", "reshape"])
    rows: Any = row.get("rows", "all")
    if not isinstance(layout, list) or not all(step in STEPS for step in layout):
        raise FormatError(f"{where}: layout: expected a list of {', '.join(STEPS)}")
    if rows not in ("all", "last") and not _are_whole_numbers(rows):
        raise FormatError(f"{where}: rows: expected all, last, or a list of token positions")
    said = {name: row[name] for name in ("certainty", "why") if isinstance(row.get(name), str)}
    return MappedArray(
        row["key"], tuple(layout), rows if rows in ("all", "last") else tuple(rows), **said
    )


def is_mapped(path: Path) -> bool:
    """Return whether a path is a mapping file, a folder with one, or a folder of arrays."""
    if path.is_dir():
        return (path / MAPPING_FILE).is_file() or is_folder_of_arrays(path) or is_dump(path)
    if not path.is_file() or path.suffix != ".json":
        return False
    with open(path, "rb") as file:
        return f'"{MARK}"'.encode() in file.read(4096)


@contextmanager
def load_mapped(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> Iterator[Trace]:
    """Yield the trace of a mapping file, or of a folder of arrays.

    Without a mapping, names are read as transformers' module paths and as our own keys. `ids` are
    the tokens if the dump does not say, `model` gives sizes.
    """
    mapping_file = path / MAPPING_FILE if path.is_dir() else path
    mapping = read_mapping(mapping_file) if mapping_file.is_file() else None
    place = path if path.is_dir() else path.parent / _captures_path(mapping, path)
    with (
        open_dump(place, ids, model) as captures,
        mapped_trace(captures, mapping, ids, model) as trace,
    ):
        yield trace


@contextmanager
def load_arrays(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> Iterator[Trace]:
    """Yield the trace of one file of arrays, read by their names.

    `ids` are the tokens if the file does not say, `model` gives sizes.
    """
    with open_dump(path, ids, model) as captures, mapped_trace(captures, None, ids, model) as trace:
        yield trace


def _captures_path(mapping: NameMap | None, path: Path) -> str:
    """Return the path of the arrays that a mapping names, relative to its file at `path`.

    FormatError if it names none, or one outside the file's folder.
    """
    name = "" if mapping is None else mapping.captures
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise FormatError(
            f"{path}: captures is {name[:200]!r}; expected a file or folder next to the "
            "mapping file"
        )
    return name


@contextmanager
def mapped_trace(
    captures: Captures, mapping: NameMap | None, ids: Sequence[int] | None, model: Model | None
) -> Iterator[Trace]:
    """Yield dumped arrays as a trace of capture points, by `mapping` or, if that is None, by names.

    `ids` are the tokens if neither the arrays nor the mapping state them.
    """
    own = captures.ids
    said = None if mapping is None or mapping.ids is None else list(mapping.ids)
    known = own or said
    tokens = known or (None if ids is None else [int(i) for i in ids])
    dtype = arithmetic_dtype(captures) if mapping is None else mapping.dtype
    store = _DumpValues()
    collector = Collector(store, model, tokens=None if tokens is None else len(tokens), dtype=dtype)
    # Values stay in the dump: it may be larger than the room for temporary files.
    if mapping is None:
        add, names = _add_by_name(captures, collector, model, tokens), captures.names
    else:
        add, names = _add_by_mapping(captures, collector, mapping, tokens), list(mapping.names)
    for name in names:
        store.name = collector.giver = name
        add(name, collector)
    store.read_again = lambda name, key, held: add(name, collector.for_reading_again(key, held))
    collector.note_unlike_seconds(add)
    if mapping is not None:
        collector.unknown |= {
            name: "not in the mapping" for name in captures.names if name not in mapping.names
        }
    if not collector.records:
        _say_nearest_points(captures, collector, None if tokens is None else len(tokens))
    collector.unknown |= dict.fromkeys(captures.others, "a file that holds no array")
    valueless = set(filter(points_named, captures.values))
    collector.unknown |= {**dict.fromkeys(valueless, "is no array"), **captures.left}
    collector.lost |= captures.lost | valueless
    run: dict[str, Value] = {
        "format": "captures", "path": str(captures.path), "ids": tokens,
        "ids_given": known is None and tokens is not None,
        "backend": {"backend": "captures"},
    }  # fmt: skip
    if captures.facts:
        run["dump"] = captures.facts
    if captures.repeats:
        pairs = _compare_repeats(captures, mapping, ids, model)
        run["dump"] = {**captures.facts, "repeats": [asdict(one) for one in pairs if one.compared]}
        for one in pairs:
            if not one.compared:
                why = f"no value of them can be compared: {one.requests}"
                collector.unknown["rows of the same tokens"] = why
                collector.lost.add("rows of the same tokens")
    try:
        unread = partial(_unread_values, captures, collector.unknown)
        yield collector.trace(run, fetch_unread=unread)
    finally:
        collector.close()


def _unread_values(captures: Captures, unknown: Collection[str], name: str) -> Numbers | None:
    """Return the values of an array of the dump that is no capture point.

    `unknown` are the names of such arrays. None for any other name, and for an array that the dump
    lacks or that cannot be read.
    """
    if name not in unknown or name not in captures.shapes or name in captures.left:
        return None
    try:
        return captures.read(name)
    except (AprfmtError, ValueError):
        return None


def _compare_repeats(
    captures: Captures, mapping: NameMap | None, ids: Sequence[int] | None, model: Model | None
) -> list[RepeatedTokens]:
    """Return one RepeatedTokens for each pair of a dump's requests that have the same tokens.

    It says at which points their values differ. The arguments are those of `mapped_trace`.
    """
    experts = model is not None and bool(model.hyper.get("n_experts"))
    found = []
    for one in captures.repeats:
        with (
            mapped_trace(one.own, mapping, ids, model) as own,
            mapped_trace(one.other, mapping, ids, model) as other,
        ):
            apart = compare_traces(other, own, moe=experts)
            beyond = tuple(point.key for point in apart.points if point.beyond)
            by_key = {point.key: point.rel_l2 for point in apart.points}
            first = next(iter((*beyond, *apart.unequal)), "")
            tokens = len(one.own.ids or ())
            found.append(
                RepeatedTokens(
                    one.requests,
                    tokens,
                    apart.compared,
                    apart.unequal,
                    beyond,
                    float(by_key.get(first) or 0.0),
                )
            )
    return found


def _say_nearest_points(captures: Captures, collector: Collector, tokens: int | None) -> None:
    """Add to the reasons in `collector.unknown` each array's shape and the nearest points.

    These are the points whose shape in a pass of `tokens` tokens comes nearest.
    """
    shapes = {}
    if collector.hp is not None and tokens is not None:
        shapes = point_shapes(collector.hp, collector.known, tokens)
    for name, why in collector.unknown.items():
        if name in captures.shapes:
            said = nearest_points_text(captures.shapes[name], shapes, tokens)
            collector.unknown[name] = f"{why}; {said}"


class _DumpValues:
    """Values of a trace that are read from the dump again when they are asked for.

    `name` is the array whose values are being recorded. `read_again(array, key, store)` puts the
    values of that key into the store.
    """

    def __init__(self) -> None:
        """Start without records."""
        self.name = ""
        self.read_again: Callable[[str, str, ValueStore], None] = lambda name, key, held: None
        self._names: dict[str, str] = {}

    def keep(self, record: Record, values: Numbers) -> None:
        """Note which of the dump's arrays has the values of a record, to read them again later."""
        self._names[record.key] = self.name

    def fetch(self, key: str) -> Numbers | None:
        """Return the values of a record's key, read from the dump anew; None if not recorded."""
        if key not in self._names:
            return None
        held = _LastValues()
        self.read_again(self._names[key], key, held)
        return held.values


class _LastValues:
    """A store that holds only the values that were put last, without copying them."""

    values: Numbers | None = None

    def keep(self, record: Record, values: Numbers) -> None:
        """Keep the values of a record, in place of those kept before."""
        self.values = values

    def fetch(self, key: str) -> Numbers | None:
        """Return the values that were kept last, whatever the key."""
        return self.values


def arithmetic_dtype(captures: Captures) -> str:
    """Return the dtype in which the run computed, as the arrays' dtypes and values show it."""
    return arithmetic_of_arrays(
        {name: captures.dtypes[name] for name in captures.names}, captures.read
    )


def _add_by_name(
    captures: Captures, collector: Collector, model: Model | None, tokens: list[int] | None
) -> Callable[[str, Collector], None]:
    """Return a function that adds an array to a collector by the point that its name says.

    Names are transformers' module paths, our own keys or llama.cpp's names of graph nodes.
    """
    modules = ModuleReader(
        collector,
        [
            name
            for name in captures.names
            if parse_module(name) is not None or hidden_state_index(name) is not None
        ],
        block=None if model is None else model.spec.block,
        architecture="" if model is None else model.spec.name,
        tokens=None if tokens is None else len(tokens),
        scaled_embedding=is_embedding_scaled(captures.names, captures.read, model, tokens),
    )

    add_node = node_adder(model, None if tokens is None else len(tokens))

    def add(name: str, into: Collector) -> None:
        """Add a dumped array to the collector `into` under the capture point of its name.

        Where it is no point, or does not fit it, why is put into `into.unknown`.
        """
        rows = captures.rows.get(name)
        key = find_key(name)
        if key is not None and into.record_key(key_name(*key)) is None:
            into.unknown[name] = "the model has no such point"
            return
        if 0 in captures.shapes[name]:
            into.unknown[name] = f"holds no value: its shape is {list(captures.shapes[name])}"
            into.lost |= {name} if points_named(name) else set()
            return
        if key is None and parse_node_name(name) is not None:
            add_node(name, captures.shapes[name], partial(captures.read, name), into)
            return
        if key is None:
            reader, tiles = modules.for_collector(into), captures.tiles(name)
            if tiles is None or not reader.add_unread(name, tiles, rows):
                reader.add(name, captures.read(name), rows)
            return
        try:
            values = drop_batch_axis(captures.read(name), name)
            into.refuse_unlike(key[0], values, rows)
            values = into.cut_to_vocabulary(name, key[0], values)
        except ValueError as error:
            into.unknown[name] = str(error)
            into.lost.add(name)
            return
        into.add(*key, values, rows=rows)

    return add


def _add_by_mapping(
    captures: Captures, collector: Collector, mapping: NameMap, tokens: list[int] | None
) -> Callable[[str, Collector], None]:
    """Return a function that adds an array to a collector as the mapping says.

    It raises FormatError if the name or shape does not fit.
    """
    shapes = {}
    if tokens is not None and collector.hp is not None:
        shapes = point_shapes(collector.hp, collector.known, len(tokens))

    def add(name: str, into: Collector) -> None:
        """Add a dumped array to the collector `into` as the mapping says, in the point's layout.

        An array without a point is put into `into.unknown`. Raises FormatError if it is missing
        or its shape does not fit.
        """
        row, where = mapping.names[name], f"{captures.path}: {name[:200]!r}"
        if name not in captures.shapes:
            why = captures.left.get(name, "there is no such array")
            raise FormatError(f"{where}: the mapping names it: {why}")
        if row is None:
            into.unknown[name] = mapping.reasons.get(name, "no point, says the mapping")
            return
        point, layer = parse_key(row.key)
        values = captures.read(name)
        if row.key in shapes:
            values = apply_layout(
                values, row.layout, PointLayout(shapes[row.key], len(tokens or ())), where
            )
        rows = captures.rows.get(name) if isinstance(row.rows, str) else row.rows
        if row.rows == "last" and tokens is not None:
            rows = (len(tokens) - 1,)
        axis = 1 if POINTS[point].rows == "scores" else 0
        if rows is not None and (values.ndim <= axis or values.shape[axis] != len(rows)):
            raise FormatError(
                f"{where}: shape {list(values.shape)}; the mapping says {len(rows)} rows"
            )
        into.add(point, layer, values, rows=rows)

    return add
