"""A model's weights as handles: encoded until used, decoded a panel or a tensor at a time.

A *panel* is some rows of a weight that are decoded together. A *stack* is the weight of all experts
of a layer, [n_experts, out, in].

`Weights` gives a `Weight` per role key. Weights placed by a backend (decoded, in its dtype, on its
device) are held while they fit one byte budget; the others are decoded at each use. If the stored
bytes exceed the budget, `with weights.layer(i)` reads layer i + 1 ahead and releases the pages of
layer i afterwards; the vocabulary is read in pieces, each released after use.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import role_key, split_key
from aprfmt.base.budget import end_where_time_is_over
from aprfmt.errors import ArchError, TensorNotFoundError
from aprfmt.inference.rows import ArrayRows, ChangedRows, RowSource, StoredRows, as_floats
from aprfmt.model import Model
from aprfmt.model.patterns import similar_names

if TYPE_CHECKING:
    from aprfmt.codecs.bnb4 import CodedParts
    from aprfmt.inference.backends.base import Backend

Array = NDArray[Any]
_NOTHING = nullcontext()
KEPT_ROWS = 1 << 20  # bytes of looked up rows that a weight may keep
# Default share of the free memory (at the start) that decoded weights may take.
FREE_SHARE = 0.6
# Large and in no layer: where weights stream, these are read piece by piece.
TABLES = frozenset({"token_embd.weight", "output.weight", "position_embd.weight"})


class Holder:
    """Tensors that backends have placed, first come first served, under one budget in bytes.

    A tensor is found by its key and its owner, the backend that placed it.
    """

    def __init__(self, budget: int) -> None:
        """Start with nothing placed; `budget` is in bytes."""
        self.budget = budget
        self.used = 0
        self._held: dict[tuple[str, Hashable], Any] = {}

    def has_room(self, size: int) -> bool:
        """Return whether `size` bytes more fit the budget."""
        return self.used + size <= self.budget

    def hold(self, key: str, owner: Hashable, placed: Any, size: int) -> None:
        """Hold a tensor of `size` bytes that its owner has placed; each owner has its own copy."""
        self._held[key, owner] = placed
        self.used += size

    def find(self, key: str, owner: Hashable) -> Any | None:
        """Return the placed tensor, or None if this owner has not placed it."""
        return self._held.get((key, owner))

    def replace(self, key: str, owner: Hashable, placed: Any) -> None:
        """Put `placed`, another copy of a tensor's numbers, in place of what this owner placed."""
        self._held[key, owner] = placed

    def is_placed_by(self, key: str, owner: Hashable) -> bool:
        """Return whether this owner has placed this tensor."""
        return (key, owner) in self._held

    def placed_tensors(self) -> list[Any]:
        """Return everything that is placed, whoever owns it."""
        return list(self._held.values())

    def is_placed(self, key: str) -> bool:
        """Return whether any backend has placed a tensor."""
        return any(held == key for held, _ in self._held)


class Weight:
    """A handle to a role's tensor, or to one expert of a stack; decoded only when used."""

    def __init__(
        self,
        key: str,
        rows: RowSource,
        holder: Holder,
        part: tuple[int, int] | None = None,
        piecewise: bool = False,
    ) -> None:
        """Take a role key and the source of its numbers; nothing is read.

        `part` is (index, count) for one expert of a stack. `piecewise`: mapped pages are released
        after each read of rows.
        """
        self.key = key
        self._rows = rows
        self._holder = holder
        self.part = part  # (which, of how many) where this is one expert of a stack
        self.piecewise = piecewise  # mapped pages are let go of after every piece that is read
        self.notes: dict[Hashable, Any] = {}  # what each owner found out about it
        self._looked_up: tuple[bytes, Array] | None = None  # ids, and their rows
        self.encoding = rows.encoding
        self.shape = rows.shape if part is None else rows.shape[1:]
        self._size = math.prod(self.shape)

    @property
    def n_columns(self) -> int:
        """Length of the last axis."""
        return self.shape[-1]

    @cached_property
    def n_rows(self) -> int:
        """Product of the lengths of all axes but the last."""
        return math.prod(self.shape[:-1])

    def expert(self, index: int) -> "Weight":
        """Return the weight of one expert of a stack [n_experts, out, in] (or [n_experts, out]).

        Raises ArchError if this is not a stack or has no such expert.
        """
        if self.part is not None or len(self.shape) < 2 or not 0 <= index < self.shape[0]:
            raise ArchError(
                f"{self.key}: shape {list(self.shape)} has no expert {index}; expected "
                "[n_experts, ...]"
            )
        return Weight(f"{self.key}[{index}]", self._rows, self._holder, (index, self.shape[0]))

    def numpy(self) -> Array:
        """Return the tensor decoded, in its shape; plain floats may be a view of the file."""
        if self.part is None:
            return self._rows.numpy()
        if len(self.shape) == 1 or not self._rows.by_rows:
            values: Array = self._rows.numpy()[self.part[0]]
            return values.copy() if values.flags.writeable else values  # not all experts with it
        return self.rows(0, self.n_rows).reshape(self.shape)

    def rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) of the weight seen as [n_rows, n_columns], decoded now."""
        first = 0 if self.part is None else self.part[0] * self.n_rows
        found = self._rows.decode_rows(first + start, first + stop)
        if self.piecewise:
            self._rows.drop()
        return found

    def rows_of(self, ids: NDArray[np.int64]) -> Array:
        """Return the rows of these ids [len(ids), n_columns], decoded now.

        A few are kept until others are asked for: a search makes many passes over one text.
        """
        key = ids.tobytes()
        if self._looked_up is not None and self._looked_up[0] == key:
            return self._looked_up[1].copy()
        found: Array = np.concatenate([self.rows(int(i), int(i) + 1) for i in ids])
        self._looked_up = (key, found.copy()) if found.nbytes <= KEPT_ROWS else None
        return found

    def placed_on(self, backend: "Backend", *, always: bool = False) -> Any | None:
        """Return the whole tensor as placed by the backend; None if the budget is spent.

        With `always` it is then placed for this use only, and so is a tensor whose rows cannot be
        decoded one by one. It is uploaded as stored where the backend can, else decoded. Raises
        TimeOver where the time of a budget in force is over.
        """
        placed = self._holder.find(self.key, backend)
        if placed is not None:
            return placed
        size = self._size * backend.itemsize
        held = self._holder.has_room(size)
        if not held and not always and self._rows.by_rows:
            return None
        end_where_time_is_over()
        placed, is_view = backend.place(self), False
        if placed is None:
            values = self.numpy()
            placed = backend.array(as_floats(values))
            is_view = placed is values and not values.flags.writeable  # of the mapped file
        if not is_view:
            self._rows.drop()
        if held:
            self._holder.hold(self.key, backend, placed, size)
        return placed

    def fits_budget(self, backend: "Backend") -> bool:
        """Return whether the budget has room for the whole tensor in the backend's dtype."""
        return self._holder.used + self._size * backend.itemsize <= self._holder.budget

    def placed_for_lookup(self, backend: "Backend") -> Any | None:
        """Return the whole tensor if it is placed already, or if rows cannot be decoded alone.

        None otherwise: decoding a few rows is much faster than decoding a big vocabulary.
        """
        if self._rows.by_rows and not self._holder.is_placed_by(self.key, backend):
            return None
        return self.placed_on(backend)

    def array(self, backend: "Backend") -> Any:
        """Return the whole tensor placed by the backend, over budget too; for vectors."""
        return self.placed_on(backend, always=True)

    def encoded_on(self, owner: Hashable) -> Any | None:
        """Return what an earlier call of `place_encoded` placed for this owner, or None."""
        return self._holder.find(f"{self.key}@{self.encoding}", owner)

    def place_encoded(self, owner: Hashable, size: int, place: Callable[[], Any]) -> Any | None:
        """Return what `place` makes of the stored bytes, kept under the budget; None if it is full.

        `size` is the bytes it takes. Later calls of this owner return the same object.
        """
        key = f"{self.key}@{self.encoding}"
        if not self._holder.is_placed_by(key, owner):
            if not self._holder.has_room(size):
                return None
            self._holder.hold(key, owner, place(), size)
        return self._holder.find(key, owner)

    def replace_placed(self, backend: "Backend", placed: Any) -> None:
        """Replace the placed tensor by a copy, after several tensors were joined into one."""
        self._holder.replace(self.key, backend, placed)

    def stored_bytes(self) -> bytes | memoryview | None:
        """Return the stored bytes of all rows in order; None if there are no such bytes."""
        first = 0 if self.part is None else self.part[0] * self.n_rows
        return self._rows.encoded(first, first + self.n_rows)

    def bnb4_parts(self) -> "CodedParts | None":
        """Return the checked parts of a whole bitsandbytes 4-bit weight; None for any other."""
        return self._rows.coded() if self.part is None else None

    def release_pages(self) -> None:
        """Release the mapped pages of the stored bytes."""
        self._rows.drop()


class Weights(Mapping[str, Weight]):
    """Handles of a model's weights by role key (`token_embd.weight`, `L3.attn_q.weight`)."""

    def __init__(self, rows: Mapping[str, RowSource], budget: int, subject: str) -> None:
        """Take the sources by role key, the budget in bytes, and a name for error messages."""
        self._rows = dict(rows)
        self.subject = subject
        self.holder = Holder(budget)
        self._handles: dict[str, Weight] = {}
        self._roles: dict[tuple[int | None, str], Weight | None] = {}  # cache of get_role
        self._ahead: Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __getitem__(self, key: str) -> Weight:
        """Return the handle of a role key; TensorNotFoundError names near roles."""
        if key not in self._handles:
            if key not in self._rows:
                raise TensorNotFoundError(
                    f"{self.subject}: no tensor for role {key!r}; near roles: "
                    f"{', '.join(similar_names(key, self._rows))}"
                )
            pieces = key in TABLES and self._streams
            self._handles[key] = Weight(key, self._rows[key], self.holder, piecewise=pieces)
        return self._handles[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        """Return whether there is a weight of a role key."""
        return key in self._rows  # the inherited method would build an error with near names

    def get(self, key: str, default: Any = None) -> Any:
        """Return the handle of a role key, or `default` where there is no such weight."""
        return self[key] if key in self._rows or key in self._handles else default

    def use_handle(self, key: str, weight: Weight) -> None:
        """Share another model's handle of a weight as `key`'s, so that it is placed only once."""
        self._handles[key] = weight

    def unused_keys(self) -> list[str]:
        """Return the keys of weights whose handles were never used."""
        return [key for key in self._rows if key not in self._handles]

    def with_arrays(self, arrays: Mapping[str, Array]) -> "Weights":
        """Return a copy of these weights in which `arrays`, by role key, replace stored ones.

        It shares no placed tensors with these weights. A hypothesis of a diagnosis replaces weights
        so.
        """
        rows = self._rows | {key: ArrayRows(values) for key, values in arrays.items()}
        return Weights(rows, self.holder.budget, self.subject)

    def with_change(self, change: Callable[[Array], Array]) -> "Weights":
        """Return these weights with `change` applied to all numbers when they are decoded.

        No placed tensors are shared.
        """
        rows = {key: ChangedRows(rows, change) for key, rows in self._rows.items()}
        return Weights(rows, self.holder.budget, self.subject)

    def role(self, layer: int | None, role: str) -> Weight:
        """Return the weight of a role in a layer; TensorNotFoundError if there is none."""
        found = self.get_role(layer, role)
        return self[role_key(layer, role)] if found is None else found  # raises, with near names

    def get_role(self, layer: int | None, role: str) -> Weight | None:
        """Return the weight of an optional role (a bias) in a layer, or None."""
        where = (layer, role)
        if where not in self._roles:
            key = role_key(layer, role)
            self._roles[where] = self[key] if key in self._rows else None
        return self._roles[where]

    def using_layer(self, index: int) -> AbstractContextManager[None]:
        """Return a context manager for the use of a layer.

        If the stored bytes alone exceed the budget, the next layer is read ahead, and this layer's
        mapped pages are released afterwards. Otherwise it does nothing.
        """
        return self._stream_layer(index) if self._streams else _NOTHING

    @contextmanager
    def _stream_layer(self, index: int) -> Iterator[None]:
        """Read the next layer ahead on entering, release this layer's pages on leaving."""
        self._read_ahead(index + 1)
        try:
            yield
        finally:
            for key in self._by_layer.get(index, ()):
                self._rows[key].drop()

    @cached_property
    def _streams(self) -> bool:
        """Whether weights stream: their stored bytes exceed the budget."""
        return sum(rows.nbytes for rows in self._rows.values()) > self.holder.budget

    @cached_property
    def _by_layer(self) -> Mapping[int, list[str]]:
        """{layer: role keys of its weights}."""
        layers: dict[int, list[str]] = {}
        for key in self._rows:
            layer, _ = split_key(key)
            if layer is not None:
                layers.setdefault(layer, []).append(key)
        return layers

    def _read_ahead(self, layer: int) -> None:
        """Read a layer's weights that are not placed in another thread; returns at once.

        Nothing happens while an earlier layer is still being read.
        """
        keys = self._by_layer.get(layer, ())
        waiting = [self._rows[key] for key in keys if not self.holder.is_placed(key)]
        if not waiting or (self._ahead is not None and not self._ahead.done()):
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "aprfmt-read-ahead")

        def touch() -> None:
            """Read the stored bytes of the layer's weights in `waiting` into memory."""
            for rows in waiting:
                rows.touch()

        self._ahead = self._pool.submit(touch)

    def close(self) -> None:
        """Stop the thread that reads ahead; call it before the model is closed."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def model_weights(model: Model, budget: int | None = None) -> Weights:
    """Return the handles of an open model's roles.

    `budget` in bytes; None: FREE_SHARE of the memory that is free now.
    """
    rows: dict[str, RowSource] = {key: StoredRows(tensor) for key, tensor in model.roles.items()}
    return Weights(rows, free_budget() if budget is None else budget, str(model.path))


def array_weights(arrays: Mapping[str, Array]) -> Weights:
    """Return handles of arrays in memory, by role key."""
    return Weights({key: ArrayRows(values) for key, values in arrays.items()}, 1 << 62, "arrays")


def free_budget() -> int:
    """Return FREE_SHARE of the available memory in bytes; 4 GiB if the system has no number."""
    free = free_memory()
    return 4 << 30 if free is None else int(free * FREE_SHARE)


def free_memory() -> int | None:
    """Return the available memory in bytes; None if the system does not say.

    The number is MemAvailable of Linux's /proc/meminfo.
    """
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
