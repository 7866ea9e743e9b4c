"""One recorded capture point: its place, the run's dtype and device, its statistics; its JSON."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aprfmt.base.deferred import DeferredField
from aprfmt.base.protocols import Value
from aprfmt.errors import FormatError, UsageError
from aprfmt.inference.capture import SLOTS, key_name, parse_key
from aprfmt.tensors.stats import Stats

Form = Literal["fused", "stepped"]
# Keys of joined slots (`L3.qkv`), which foreign files may hold instead of their parts.
_JOINED = re.compile(
    rf"L(\d{{1,9}})\.({'|'.join(slot for slot, points in SLOTS.items() if len(points) > 1)})"
)


@dataclass(frozen=True)
class Record:
    """One point of one pass.

    `shape` is that of the recorded values (`scores`: [heads, tokens, keys]), `positions` the token
    positions of their rows, None if not known (APRT). `dtype` is the arithmetic's. `form` says
    whether the layer's attention and biased products ran fused or step by step; None for
    whole-model points. `sha256` is over the decoded values as digest.py defines it. `stats` are of
    all recorded values; deferred ones are computed when they are first read.
    """

    point: str
    layer: int
    shape: tuple[int, ...]
    positions: tuple[int, ...] | None
    dtype: str
    form: Form | None
    device: str
    stats: DeferredField[Stats | None] = DeferredField()
    sha256: str | None = None

    @property
    def key(self) -> str:
        """The record's key, `L3.attn_out`, or the name of a whole-model point."""
        return key_name(self.point, self.layer)

    def with_stats(self, stats: Stats) -> "Record":
        """Return the same record with statistics (faster than dataclasses.replace)."""
        return Record(
            self.point,
            self.layer,
            self.shape,
            self.positions,
            self.dtype,
            self.form,
            self.device,
            stats,
            self.sha256,
        )

    @property
    def count(self) -> int:
        """The number of recorded values."""
        return math.prod(self.shape)


def record_to_json(record: Record) -> dict[str, Value]:
    """Return a record as plain data, for a trace's header and for `--json`."""
    return {
        "key": record.key,
        "point": record.point,
        "layer": None if record.layer < 0 else record.layer,
        "shape": list(record.shape),
        "count": record.count,
        "positions": None if record.positions is None else list(record.positions),
        "dtype": record.dtype,
        "form": record.form,
        "device": record.device,
        "stats": None if record.stats is None else record.stats.to_json(),
        "sha256": record.sha256,
    }


def record_from_json(row: Any, where: str) -> Record:
    """Return the record of a `record_to_json` row; FormatError names the field that is wrong.

    `where` begins the messages.
    """
    if not isinstance(row, dict):
        raise FormatError(f"{where}: is not an object")

    def read_field(name: str, *kinds: type) -> Any:
        """Return the value of the row's field `name`; FormatError if it is none of `kinds`."""
        value = row.get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise FormatError(f"{where}: {name} is {value!r}")
        return value

    def read_sizes(name: str) -> tuple[int, ...]:
        """Return the row's field `name` as sizes; FormatError if it is no list of integers >= 0."""
        values = read_field(name, list)
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise FormatError(f"{where}: {name} is {values!r}; expected numbers not negative")
        return tuple(values)

    # The key names the point and the layer; it may be of a joined slot.
    joined = _JOINED.fullmatch(read_field("key", str))
    try:
        point, layer = (joined[2], int(joined[1])) if joined else parse_key(read_field("key", str))
    except UsageError as error:
        raise FormatError(f"{where}: {error}") from None
    form = read_field("form", str, type(None))
    if form not in ("fused", "stepped", None):
        raise FormatError(f"{where}: form is {form!r}; expected fused, stepped or null")
    positions = None if row.get("positions") is None else read_sizes("positions")
    stats = read_field("stats", dict, type(None))
    return Record(
        point,
        layer,
        read_sizes("shape"),
        positions,
        read_field("dtype", str),
        form,
        read_field("device", str),
        None if stats is None else _stats_from_json(stats, where),
        read_field("sha256", str, type(None)),
    )


def _stats_from_json(row: Mapping[str, Any], where: str) -> Stats:
    """Return the statistics in a row; FormatError for a field that is not a number.

    `where` begins the messages.
    """
    names = list(Stats.__dataclass_fields__)
    values = {name: row.get(name) for name in names}
    for name, value in values.items():
        whole = name in ("count", "nan", "inf", "zeros")
        kinds = (int,) if whole else (int, float, type(None))
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise FormatError(f"{where}: statistic {name} is {value!r}")
    result: Any = values
    return Stats(**result)
