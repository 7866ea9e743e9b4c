"""Outputs of vLLM's and SGLang's modules under the names that a transformers module path has.

A *joined result* is what one module computes for several projections, as qkv_proj does; its *parts*
are the columns of each projection. An *item* is one of the tensors in the tuple that a module
returns.

Both engines keep the residual stream apart: a decoder layer and a norm that adds give (hidden,
residual). The stream after a layer is their sum. A norm that runs in place writes into both
afterwards, so that a hook which did not copy holds the next norm's result and the stream itself.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.dump_names import is_layer, tuple_member
from aprfmt.inference.engines.rank_joining import JoinedArray
from aprfmt.inference.engines.tiles import add_up

Numbers = NDArray[Any]
# Ends of names, as vLLM and SGLang call a module, and what transformers calls its result. Sources:
# vllm/model_executor/models/llama.py, sglang/srt/models/llama.py and their kin.
MODULES: tuple[tuple[str, str], ...] = (
    (r"(layers\.\d+\.self_attn)\.attn", r"\1.o_proj#in"),
    (r"(layers\.\d+\.mlp)\.act_fn", r"\1.down_proj#in"),  # SiluAndMul: the gated product
    (r"(layers\.\d+\.(?:mlp|block_sparse_moe))\.experts", r"\1"),
    (r"logits_processor|next_token_logits", "logits"),
)
# A module that joins several of transformers' -> these, in the order of its columns.
JOINED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_NORM = re.compile(r"(?:^|[._])(?:\w*norm\w*|ln\w*|rms\w*)$", re.IGNORECASE)
_ROWS_SEEN = 64  # rows of a layer, evenly spaced, that show whether a norm wrote into it
_STRAIGHT = 1e-3  # relative distance of ratios from a product of rows and columns


@dataclass(frozen=True)
class EngineNames:
    """Arrays by transformers' names, the rows of each, and remarks on how they were read."""

    arrays: Mapping[str, JoinedArray]
    rows: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]


def under_module_names(
    arrays: Mapping[str, JoinedArray], rows: Mapping[str, tuple[int, ...]]
) -> EngineNames:
    """Return vLLM's or SGLang's arrays under transformers' module paths.

    These engines return a layer's hidden values and its residual separately; here they are added
    up. `rows` are the positions of an array's rows, for arrays that lack some tokens.
    """
    made: dict[str, JoinedArray] = {}
    own: dict[str, tuple[int, ...]] = {}
    notes: list[str] = []
    overwritten = 0

    def put(name: str, array: JoinedArray, stored: str) -> None:
        """Put an array into `made` under transformers' name for it, unless that is taken.

        `stored` is the name under which the engine dumped the array, and by which its rows are
        known.
        """
        if name not in made:
            made[name] = replace(array, name=name)
            if stored in rows:
                own[name] = rows[stored]

    gated = has_engine_modules(arrays)
    for name, array in arrays.items():
        base, number = tuple_member(name) or (name, -1)
        residual = _residual_of(base, arrays) if number in (0, 1) else None
        if residual is None:
            called = base if _is_result(base, number, arrays) else name
            put(module_name(called, gated, arrays), array, name)
            continue
        # The residual is used together with its hidden values.
        if number == 1:
            continue
        # A norm that adds gives its result and the stream.
        if _NORM.search(base):
            put(base, array, name)
            stream = _stream_before(base)
            if stream:
                put(stream, residual, name)
            continue
        if is_normed(array, residual):
            overwritten += 1
            put(base, residual, name)
        else:
            put(base, add_residual(array, residual), name)
    if overwritten:
        notes.append(
            f"{overwritten} layers' hidden values are those of the next norm: a kernel wrote into "
            "the buffer after the hook; the residual, which then holds the whole stream, is taken"
        )
    return EngineNames(made, own, tuple(notes))


def _residual_of(base: str, arrays: Mapping[str, JoinedArray]) -> JoinedArray | None:
    """Return the residual stream that a layer or norm returned as item 1 of its tuple.

    None for other modules, whose second item is no part of the residual stream, and where its shape
    is not that of item 0, the hidden values.
    """
    hidden, residual = arrays.get(f"{base}.0"), arrays.get(f"{base}.1")
    if hidden is None or residual is None or hidden.shape != residual.shape:
        return None
    return residual if _adds_residual(base) else None


def _adds_residual(module: str) -> bool:
    """Return whether a module is a layer or a norm, which give a residual next to a result."""
    return is_layer(module) or _NORM.search(module) is not None


def module_of_size(name: str) -> str:
    """Return the name of the module whose result has the width of this array.

    For item 0 of a module's tuple, and for a residual as its item 1, that is the module. Any
    other name is returned unchanged.
    """
    base, number = tuple_member(name) or (name, -1)
    return base if number == 0 or (number == 1 and _adds_residual(base)) else name


def _is_result(base: str, number: int, arrays: Mapping[str, JoinedArray]) -> bool:
    """Return whether item `number` of module `base`'s tuple is its result.

    The result is item 0 of a layer or an attention; their other items are weights or caches. Items
    of other modules' tuples may be anything, so that it is False for them.
    """
    kind = is_layer(base) or base.endswith(("attn", "attention"))
    return number == 0 and kind and base not in arrays


def split_joined(
    arrays: Mapping[str, JoinedArray],
    rows: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Sequence[tuple[int, int]]],
) -> tuple[dict[str, JoinedArray], dict[str, tuple[int, ...]]]:
    """Return (arrays with joined results cut into their parts, {name: rows} of these).

    `rows` are the positions of an array's rows, `parts` the (elements, elements of a head) of each
    part of a joined array. An array whose width is not the sum of its parts is returned whole.
    """
    made: dict[str, JoinedArray] = {}
    own: dict[str, tuple[int, ...]] = {}
    last_read = _LastRead()
    for name, array in arrays.items():
        above, _, last = name.rpartition(".")
        widths = [width for width, _ in parts.get(name, ())]
        names = JOINED.get(last, ())
        if len(widths) != len(names) or sum(widths) != array.shape[-1]:
            names, widths = (last,), [array.shape[-1] if array.shape else 0]
        # Cut the columns one part after the other.
        for number, (part, width) in enumerate(zip(names, widths, strict=True)):
            whole = f"{above}.{part}" if above else part
            shape = (*array.shape[:-1], width) if array.shape else array.shape
            if len(names) == 1:
                made[whole] = replace(array, name=whole)
            else:
                if array.tiles is None:
                    read, tiles = last_read.part(array, widths, number), None
                else:
                    tiles = array.tiles.columns(sum(widths[:number]), width)
                    read = tiles.reader(shape)
                made[whole] = JoinedArray(whole, shape, array.dtype, read, array.how, tiles=tiles)
            if name in rows:
                own[whole] = rows[name]
    return made, own


class _LastRead:
    """The values of the joined result that was read last, held until all its parts were taken."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._array: JoinedArray | None = None
        self._parts: list[Numbers] = []

    def part(self, array: JoinedArray, widths: Sequence[int], number: int) -> Callable[[], Numbers]:
        """Return a function that reads part `number` of an array whose parts have these widths."""

        def read() -> Numbers:
            """Return part `number` of the array's values.

            All parts are kept until the last is read.
            """
            if self._array is not array:
                self._array, self._parts = None, []  # one array is in memory, not two
                self._array, self._parts = array, _read_parts(array, widths)
            values = self._parts[number]
            if number == len(widths) - 1:
                self._array, self._parts = None, []
            return values

        return read


def _read_parts(array: JoinedArray, widths: Sequence[int]) -> list[Numbers]:
    """Return the parts of a joined result, which have these widths."""
    found = array.read_parts() if array.read_parts is not None else []
    if [part.shape[-1] for part in found] == list(widths):
        return found
    return np.split(array.read(), np.cumsum(widths[:-1]), axis=-1)


def has_engine_modules(names: Iterable[str]) -> bool:
    """Return whether names are of vLLM's or SGLang's modules, whose act_fn also multiplies."""
    return any(name.endswith((".gate_up_proj", ".self_attn.attn")) for name in names)


def module_name(name: str, gated: bool, arrays: Mapping[str, JoinedArray]) -> str:
    """Return a vLLM or SGLang name as transformers has it; unchanged if MODULES has no row for it.

    `gated`: act_fn gives a gated product. A new name that is in `arrays` already is not used.
    """
    for old, new in MODULES:
        if old.endswith("act_fn") and not gated:
            continue
        found = re.sub(
            rf"(^|\.)(?:{old})$",
            lambda m, new=new: (
                m[1]
                + m.expand(  # type: ignore[misc]
                    re.sub(r"\\1", r"\\2", new)
                )
            ),
            name,
        )
        if found != name and found not in arrays:
            return found
    return name


def _stream_before(norm: str) -> str:
    """Return the name of the residual stream before a norm's module; "" for other modules."""
    found = re.fullmatch(r"(.*layers\.)(\d+)\.(input_layernorm|post_attention_layernorm)", norm)
    if found is None:
        return ""
    if found[3] == "input_layernorm":
        return f"{found[1]}{found[2]}#in"
    return f"{norm}#in"


def add_residual(hidden: JoinedArray, residual: JoinedArray) -> JoinedArray:
    """Return the residual stream after a layer: hidden plus residual."""

    def read() -> Numbers:
        """Return hidden plus residual in float32, or in float64 if the hidden values are."""
        x, y = hidden.read(), residual.read()
        return x.astype(np.float64 if x.dtype == np.float64 else np.float32) + y

    if hidden.tiles is None or residual.tiles is None:
        return JoinedArray(hidden.name, hidden.shape, hidden.dtype, read, hidden.how)
    tiles = add_up([hidden.tiles, residual.tiles])
    reader = tiles.reader(hidden.shape)
    return JoinedArray(hidden.name, hidden.shape, hidden.dtype, reader, hidden.how, tiles=tiles)


def _rows_seen(array: JoinedArray) -> Numbers:
    """Return at most _ROWS_SEEN rows [rows, width] of an array, evenly spaced."""
    if array.tiles is not None:
        return array.tiles.some_rows(-(-array.tiles.rows // _ROWS_SEEN) or 1)
    values = array.read().reshape(-1, array.shape[-1])
    return values[:: -(-len(values) // _ROWS_SEEN) or 1]


def is_normed(hidden: JoinedArray, residual: JoinedArray) -> bool:
    """Return whether `hidden` is `residual` after a norm: a factor a row times one a column.

    False too where that cannot be seen: fewer than two rows or columns, values that are not finite,
    or a row of zeros in `residual`.
    """
    x, y = (np.asarray(_rows_seen(one), np.float64) for one in (hidden, residual))
    if min(x.shape) < 2 or not np.isfinite(x).all() or not np.isfinite(y).all():
        return False
    # Normalise the residual, and fit the weight of each column.
    scale = np.sqrt(np.mean(y * y, axis=1, keepdims=True))
    if not np.all(scale):
        return False
    normed = y / scale
    weight = np.sum(x * normed, axis=0) / np.maximum(np.sum(normed * normed, axis=0), 1e-30)
    bound = 2.0**-6 if hidden.dtype in ("bfloat16", "float16") else _STRAIGHT
    size, off = _norm(x), _norm(x - normed * weight)
    return size > 0 and off <= bound * size


def _norm(values: Numbers) -> float:
    """Return the Euclidean norm of float64 values, without waking the threads of a BLAS."""
    return math.sqrt(float(np.sum(values * values)))
