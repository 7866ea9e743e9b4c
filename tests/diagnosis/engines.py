"""Wrong engines made by code: a model's own pass with one thing broken, saved as a trace."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.capture import SLOTS
from aprfmt.inference.forward import forward
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues, Record, Trace, Tracer
from aprfmt.inference.trace_file import save_trace
from aprfmt.model import open_model
from tests.models import IDS, VOCAB, save_tiny

Array = Any
NUMPY: type[NumpyBackend] = type(BACKENDS["numpy"]("cpu", "float32"))  # type: ignore[assignment]
FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-diagnose-")
# Longer than a tile of 32 keys.
LONG: tuple[int, ...] = tuple((37 * i + 11 * (i // 5) + 3) % VOCAB for i in range(44))
COARSE = frozenset(
    {name for parts in SLOTS.values() for name in parts} | {"embd", "final_norm", "logits"}
)


@cache
def tiny_folder(arch: str, dtype: str = "float32", **options: Any) -> Path:
    """Return a tiny model's folder, made once."""
    name = "-".join([arch, dtype, *(f"{k}={v}" for k, v in options.items())])
    folder = Path(FOLDER.name) / name
    save_tiny(arch, folder, dtype, **options)
    return folder


def place(name: str) -> Path:
    """Return a path in this run's temporary folder."""
    return Path(FOLDER.name) / name


# --- backends that compute something else ----------------------------------------------------


def broken(op: str, change: Callable[..., Any]) -> NumpyBackend:
    """Return a backend whose operation is `change(beneath, *args, **kwargs)`."""

    class Broken(NUMPY):  # type: ignore[misc, valid-type]
        """In steps what is fused, so that nothing passes by the broken operation."""

        attention = NumpyBackend.attention
        gated = NumpyBackend.gated
        projections = NumpyBackend.projections

    def method(self: NumpyBackend, *args: Any, **kwargs: Any) -> Any:
        return change(lambda *a, **k: getattr(NUMPY, op)(self, *a, **k), *args, **kwargs)

    setattr(Broken, op, method)
    return Broken("cpu", "float32")


class Here:
    """Where a pass is: the last point that it came by ("" before the first), and its layer."""

    def __init__(self) -> None:
        self.point, self.layer = "", 0

    def passed(self, point: str, layer: int, x: Array) -> Array:
        """Remember a point; return its value as it is."""
        if layer >= 0:
            self.layer = layer + (point == "out")
        self.point = point
        return x


def broken_here(**changes: Callable[..., Any]) -> Mapping[str, Any]:
    """Return arguments of `trace`: operations are `change(here, beneath, *args, **kwargs)`.

    `here` says between which points of the pass the operation runs. Raises AttributeError for the
    name of no operation, whose change nothing would call.
    """
    for op in changes:
        getattr(NumpyBackend, op)
    here = Here()

    def backend() -> NumpyBackend:
        here.__init__()  # type: ignore[misc]

        class Broken(NUMPY):  # type: ignore[misc, valid-type]
            """In steps what is fused, so that nothing passes by a broken operation."""

            attention = NumpyBackend.attention
            gated = NumpyBackend.gated
            projections = NumpyBackend.projections
            ropes = NumpyBackend.ropes
            add_linear = NumpyBackend.add_linear

        for op, change in changes.items():
            setattr(Broken, op, _method(here, op, change))
        return Broken("cpu", "float32")

    return {"backend": backend, "alter": lambda: here.passed}


def _method(here: Here, op: str, change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: NumpyBackend, *args: Any, **kwargs: Any) -> Any:
        return change(here, lambda *a, **k: getattr(NUMPY, op)(self, *a, **k), *args, **kwargs)

    return method


class Altered(Tracer):
    """A tracer that replaces the pass's values at some points."""

    def __init__(self, *args: Any, alter: Callable[[str, int, Array], Array], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._alter = alter

    def wants(self, point: str, layer: int) -> bool:
        return True

    def capture(self, point: str, layer: int, x: Array) -> Array:
        x = self._alter(point, layer, x)
        if (point, layer) in self._wanted:
            super().capture(point, layer, x)
        return x


class Stale(KVCache):
    """A cache that gives back other rows than those written."""

    rows: Callable[[int], Sequence[int]]
    layer = 0

    def extend(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        keys, values = super().extend(layer, k, v)
        if layer != self.layer:
            return keys, values
        chosen = list(self.rows(len(keys)))
        return keys[chosen], values[chosen]


# --- traces ------------------------------------------------------------------------------------


def trace(
    folder: Path,
    name: str,
    *,
    ids: Sequence[int] = IDS,
    points: frozenset[str] | None = None,
    hp: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
    block: Mapping[str, Any] | None = None,
    weights: Callable[[Any], Mapping[str, Array]] | None = None,
    backend: Callable[[], NumpyBackend] | None = None,
    alter: Callable[[], Callable[[str, int, Array], Array]] | None = None,
    positions: Sequence[int] | None = None,
    rows: Any = "all",
    cache: Callable[[NumpyBackend, int], KVCache] | None = None,
    rename: Callable[[dict[str, Array]], dict[str, Array]] | None = None,
    cached: int = 0,
) -> Path:
    """Run a model with one thing broken and save what it did at its points.

    `hp` are other hyperparameters, `block` other fields of the block, `weights` replaced weights;
    `backend` and `alter` make a backend and a change of points for every run; `rows` are the
    recorded positions; `rename` exchanges values between keys. `cached` tokens come before the
    recorded pass.
    """
    with open_model(folder) as model:
        arithmetic = NUMPY("cpu", "float32") if backend is None else backend()
        with Session.open(model, arithmetic) as session:
            values = hp(session.hp) if callable(hp) else hp
            numbers = session.hp.with_values(**(values or {}))  # type: ignore[attr-defined]
            held = session.weights
            if weights is not None:
                held = held.with_arrays(weights(session.weights))
            spec = replace(session.spec, block=replace(session.spec.block, **(block or {})))
            wrong = Session(spec, numbers, held, arithmetic)
            known = wrong.points
            wanted = [k for k, i in known.items() if points is None or i.point.name in points]
            kept = KeptValues()
            keep: dict[str, Any] = {"positions": rows, "keep": kept.keep, "cached": bool(cached)}
            tracer = (
                Tracer(arithmetic, known, wanted, **keep)
                if alter is None
                else Altered(arithmetic, known, wanted, alter=alter(), **keep)
            )
            kept_rows = None if cache is None else cache(arithmetic, int(numbers["n_layers"]))
            if cached:
                forward(arithmetic, wrong.spec, numbers, held, ids[:cached], cache=kept_rows)
            forward(
                arithmetic, wrong.spec, numbers, held, ids[cached:], cache=kept_rows,
                recorder=tracer, positions=positions, logits_rows="all",
            )  # fmt: skip
            made = tracer.trace(wrong.facts(ids) | {"model": str(folder)}, kept.fetch)
            return saved(made, name, rename)


def saved(
    made: Trace, name: str, rename: Callable[[dict[str, Array]], dict[str, Array]] | None = None
) -> Path:
    """Save a trace; `rename` exchanges values between keys."""
    path = place(f"{name}.safetensors")
    if rename is not None:
        values = {key: np.asarray(made.recorded_values(key)) for key in made.records}
        changed = rename(values)
        records: dict[str, Record] = {}
        for key, value in changed.items():
            old = made.records[key]
            records[key] = Record(
                old.point,
                old.layer,
                value.shape,
                old.positions,
                old.dtype,
                old.form,
                old.device,
                None,
                None,
            )
        made = Trace(made.run, records, made.aliases, lambda key: changed.get(key))
    save_trace(path, made, force=True)
    return path


def stats_only(folder: Path, name: str) -> Path:
    """Save a trace that holds statistics and no values."""
    with open_model(folder) as model, Session.open(model, NUMPY("cpu", "float32")) as session:
        made = session.trace(IDS, tuple(session.points))
    return saved(made, name)
