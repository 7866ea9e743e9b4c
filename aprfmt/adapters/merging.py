"""A base model with an adapter merged, computed when bytes are read.

A *pair* is the factors A and B of one module with their scale.

The arithmetic: B @ A in float64, rounded to float32; times the scale in float32; added to the
weight in float32; rounded once to the weight's own dtype. With DoRA the sum's rows are divided by
their length (float64, rounded to float32) and multiplied by the magnitude before that rounding.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.adapters.pair_placement import LowRank, place_pairs, whole_tensors, with_base_names
from aprfmt.adapters.parameters import PEFT_ORDER, ExpertOrder
from aprfmt.adapters.vocabulary import resized_folder
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import Damage, LazyTensor, Note, Source, TensorInfo, Value
from aprfmt.codecs import decode, encode
from aprfmt.conversion import Options, convert_model
from aprfmt.errors import ConversionError, UnsupportedError
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.model import Model, open_model
from aprfmt.model.adapter_parts import (
    OF_DIFFUSION,
    adapter_parts,
    assumed_alpha_text,
    diffusion_components,
    peft_config,
)
from aprfmt.model.adapter_reading import Adapter, read_adapter
from aprfmt.model.resolve import architecture_names
from aprfmt.model.zero_pairs import find_zero_pairs
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import F32
    from aprfmt.conversion import ConversionReport
    from aprfmt.conversion.report import TensorOutcome

    F64 = np.ndarray[Any, np.dtype[np.float64]]

RECORD = "aprfmt.merged_adapters"  # JSON list of the SHA-256 of adapters that were merged
_FLOATS = ("F32", "F16", "BF16")
_ROWS = 1 << 20  # elements made at a time


class MergedTensor(LazyTensor):
    """A base weight with an adapter's pair added `times` times, computed when bytes are read.

    Its encoding is `encoding`, or the base's where that is "".
    """

    __slots__ = ("_times", "base", "info", "pair")

    info: TensorInfo

    def __init__(
        self, base: LazyTensor, pair: LowRank, *, times: int = 1, encoding: str = ""
    ) -> None:
        """Store base and pair; `encoding` is that of the result, "" for the base's."""
        stored, kind = base.info, encoding or base.info.encoding
        row = ENCODINGS[kind]
        self.base, self.pair, self._times = base, pair, times
        self.info = TensorInfo(
            stored.name,
            stored.shape,
            kind,
            stored.offset,
            row.nbytes(stored.shape),
            row.row_bytes(stored.shape),
        )

    @property
    def path(self) -> Path | None:
        """The file that holds the base's weight; None for bytes that are in no file."""
        return self.base.path

    @property
    def base_encoding(self) -> str:
        """The encoding of the weight in the base's file, also where it was decoded first."""
        base = self.base
        return base.packed_as if isinstance(base, DecodedTensor) else base.info.encoding

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the merged weight; its rows are merged at each call."""
        stop = self.info.nbytes if stop is None else min(stop, self.info.nbytes)
        row = self.info.row_bytes
        if not row or start >= stop:
            return memoryview(b"")
        first, last = start // row, -(-stop // row)
        step = max(1, _ROWS // self.info.shape[-1])
        made = [
            encode(self.info.encoding, self._merged_rows(at, min(at + step, last)))[""]
            for at in range(first, last, step)
        ]
        return memoryview(b"".join(made))[start - first * row : stop - first * row]

    def _merged_rows(self, start: int, stop: int) -> "F32":
        """Return rows [start, stop) of the merged weight as float32."""
        stored = self.base.info
        assert stored.row_bytes is not None
        held = self.base.raw(start * stored.row_bytes, stop * stored.row_bytes)
        found = decode(stored.encoding, held, (stop - start, stored.shape[-1]))
        with np.errstate(all="ignore"):
            for _ in range(self._times):
                found = merge_rows(found, self.pair, start, stop)
        return found

    def with_times(self, times: int) -> "MergedTensor":
        """Return the weight with the pair added `times` times, as float32."""
        return MergedTensor(self.base, self.pair, times=times, encoding="F32")

    def with_pair(self, pair: LowRank) -> "MergedTensor":
        """Return the weight with another pair added once, as float32."""
        return MergedTensor(self.base, pair, encoding="F32")

    def row_lengths(self, times: int) -> "F64":
        """Return the norms [out] of the rows after adding the pair `times` times, in float64.

        DoRA's magnitudes are left out.
        """
        plain = MergedTensor(
            self.base, replace(self.pair, magnitude=None), times=times, encoding="F32"
        )
        rows = math.prod(self.info.shape[:-1])
        found: F64 = np.linalg.norm(plain._merged_rows(0, rows).astype(np.float64), axis=1)
        return found

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of the base's whole weight, whatever range is given."""
        self.base.drop()


class DecodedTensor(LazyTensor):
    """A packed weight as float32 values, decoded when they are read."""

    __slots__ = ("_held", "_view", "info", "packed_as")

    info: TensorInfo

    def __init__(self, view: View) -> None:
        """Describe the packed weight `view` as F32; it is decoded when it is read."""
        row = ENCODINGS["F32"]
        self._view, self.packed_as = view, view.encoding
        self._held: F32 | None = None
        self.info = TensorInfo(
            view.name,
            view.shape,
            "F32",
            view.stored[0].info.offset,
            row.nbytes(view.shape),
            row.row_bytes(view.shape),
        )

    @property
    def path(self) -> Path | None:
        """The file that holds the codes; None for bytes that are in no file."""
        return self._view.stored[0].path

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the decoded weight."""
        if self._held is None:
            self._held = np.ascontiguousarray(self._view.numpy(), np.float32)
        return memoryview(self._held.view(np.uint8).reshape(-1).data)[start:stop]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release all decoded values and the pages of the codes.

        `start` and `stop` are not used.
        """
        self._held = None
        self._view.drop()


def merge_rows(weight: "F32", pair: LowRank, start: int, stop: int) -> "F32":
    """Return rows [start, stop) of a merged weight (float32), rounded once.

    `weight` are those rows of the base (float32), `pair` is the change.
    """
    delta = pair.product_rows(start, stop).astype(np.float32) * np.float32(pair.scale)
    found: F32 = weight + delta
    if pair.magnitude is not None:
        length = np.sqrt(np.square(found.astype(np.float64)).sum(axis=1))
        factor = pair.magnitude[start:stop].astype(np.float32) / length.astype(np.float32)
        found *= factor[:, None]
    return found


class MergedSource:
    """A Source with some tensors replaced; everything else is the wrapped file's."""

    def __init__(
        self,
        source: Source,
        tensors: Mapping[str, LazyTensor],
        record: str,
        gone: Collection[str] = (),
    ) -> None:
        """Replace `tensors`; `record` is the JSON of merged adapters for the metadata, or "".

        `gone` are the stored tensors of packed weights that are replaced as a whole.
        """
        self._source = source
        left = {name: one for name, one in source.tensors.items() if name not in gone}
        self.tensors: Mapping[str, LazyTensor] = {**left, **tensors}
        self.metadata: Mapping[str, Value] = (
            {**source.metadata, RECORD: record} if record else source.metadata
        )
        self.types: Mapping[str, str] = (
            {**source.types, RECORD: "string"} if record and source.types else source.types
        )
        self.format, self.path, self.files = source.format, source.path, source.files
        self.version, self.notes = source.version, source.notes

    @property
    def wrapped_source(self) -> Source:
        """The Source whose tensors are replaced."""
        return self._source

    @property
    def damage(self) -> "tuple[Damage, ...]":
        """The damage of the wrapped file."""
        return tuple(self._source.damage)

    def close(self) -> None:
        """Close the wrapped file."""
        self._source.close()

    def __enter__(self) -> "MergedSource":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def merge_adapter(
    base: Model,
    adapter: Path,
    *,
    again: bool = False,
    decoded: bool = False,
    order: ExpertOrder = PEFT_ORDER,
    encoding: str = "",
) -> tuple[Model, Model, Adapter]:
    """Return (base with the adapter merged, the adapter's open file, the adapter).

    Closing the first closes the base. `order` is how the pairs for stacked experts order their
    ranks, `encoding` that of the merged weights, "" for the base's. Raises ConversionError for an
    adapter of another base, for packed weights, and for an adapter that the base's metadata record
    as merged. `again` allows the last two, for a comparison; `decoded` allows packed weights alone,
    as those of a base that is to be decoded first. Raises UnsupportedError for an adapter
    of a diffusion pipeline.
    """
    opened, found = read_adapter(adapter, compare=again)
    try:
        # With `again` it is read, as two of these can be compared; no base here takes it.
        if not architecture_names(base) and diffusion_components(opened, adapter_parts(opened)):
            raise UnsupportedError(f"{opened.path}: it is not merged here: {OF_DIFFUSION}")
        found, relation = with_base_names(found, base)
        digest = _adapter_sha256(opened)
        before = recorded_digests(base)
        if digest in before and not again:
            raise ConversionError(
                f"{base.path}: its metadata say that {adapter} is merged into it; merge it into "
                "the base it was made for"
            )
        whole = whole_tensors(found, base, untie=again)
        grown = resized_folder(found, whole, base)
        tensors = dict(
            _merged_tensors(base, found, whole, order, again, again or decoded, encoding)
        )
        record = json.dumps([*before, digest])
        gone = {
            part.info.name
            for name, one in tensors.items()
            if isinstance(one, MergedTensor) and isinstance(one.base, DecodedTensor)
            for part in base[name].parts.values()
        }
        source = MergedSource(base.source, tensors, record if not again else "", gone)
        folder, note = (base.folder, None) if grown is None else grown
        if note is not None:
            source.notes = (*source.notes, note)
        if relation is not None:
            source.notes = (*source.notes, relation.as_note(found.path))
            found = replace(found, relation=relation)
        model = Model(source, folder, base.forced, base.allow_missing)
        return model, opened, found
    except BaseException:
        opened.close()
        raise


def _merged_tensors(
    base: Model,
    adapter: Adapter,
    replacements: Mapping[str, View],
    order: ExpertOrder,
    untie: bool,
    decoded: bool,
    encoding: str,
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield (name, tensor) of the merge's tensors that are not the base's.

    `replacements` are the adapter's whole tensors by name, `order` is how pairs for stacked experts
    order their ranks, `untie` whether a tied head may be changed. With `decoded` packed weights are
    decoded first; they raise ConversionError without it. `encoding` is that of the merged weights,
    "" for the base's.
    """
    own = {name: RenamedTensor(view.stored[0], name) for name, view in replacements.items()}
    yield from own.items()
    for name, pair in place_pairs(adapter, base, order, untie=untie).items():
        stored = own.get(name, base[name].stored[0])
        if stored.parts or stored.info.encoding not in _FLOATS:
            if decoded and name not in own:
                yield name, MergedTensor(DecodedTensor(base[name]), pair)
                continue
            raise ConversionError(
                f"{name}: is {stored.info.encoding}; an adapter is merged into floats: decode the "
                "base first (convert --encoding F32), or merge it into the float base"
            )
        yield name, MergedTensor(stored, pair, encoding=encoding)


def has_packed_weight(base: Model, keys: Iterable[str]) -> bool:
    """Return whether the base stores one of the weights that an adapter changes packed.

    Such a base has to be decoded before a merge. `keys` are the keys of the changed weights.
    """
    views = (base.find(key) for key in keys)
    return any(
        stored.parts or stored.info.encoding not in _FLOATS
        for view in views
        if view is not None
        for stored in view.stored
    )


class RenamedTensor(LazyTensor):
    """A stored tensor under another name."""

    __slots__ = ("_stored", "info")

    info: TensorInfo

    def __init__(self, stored: LazyTensor, name: str) -> None:
        """Describe `stored` under `name`."""
        old = stored.info
        self._stored = stored
        self.info = TensorInfo(name, old.shape, old.encoding, old.offset, old.nbytes, old.row_bytes)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return stored bytes [start, stop)."""
        return self._stored.raw(start, stop)

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages."""
        self._stored.drop(start, stop)


def recorded_digests(base: Model) -> list[str]:
    """Return the SHA-256 of each adapter that a model's metadata record as merged; [] if none."""
    text = base.metadata.get(RECORD)
    try:
        found: Any = json.loads(text) if isinstance(text, str) else []
    except ValueError:
        found = []
    return [str(each) for each in found] if isinstance(found, list) else []


def _adapter_sha256(opened: Model) -> str:
    """Return the SHA-256 in hex of an adapter's tensors: names, encodings, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(opened):
        stored = opened[name].stored[0]
        total.update(f"{name} {stored.info.encoding} {stored.info.shape}\n".encode())
        total.update(stored.raw())
    return total.hexdigest()


ARITHMETIC = "B @ A in float64, rounded to float32; times the scale and added in float32"


def convert_merged(
    src: "Path | str", dst: "Path | str", adapter: Path, *, to: str | None = None, **wishes: Any
) -> "ConversionReport":
    """Convert the base `src` with an adapter merged into it to `dst`; return the report.

    `to` names the format of `dst`, None for that of its extension; the others are options of
    `aprfmt.convert`. The output records the adapter's digest, so that it is not merged twice.
    Raises what `convert` and `merge_adapter` do.
    """
    options = Options(**wishes)
    with open_model(src, arch=options.arch, allow_missing=options.allow_missing) as base:
        # What is stored otherwise is rounded from the sum, not from the base's type.
        asked = "F32" if options.encoding or options.quantize else ""
        model, opened, found = merge_adapter(base, adapter, encoding=asked)
        with opened:
            merged = [one for one in model.source.tensors.values() if isinstance(one, MergedTensor)]
            count = sum(one.pair.has_change for one in merged)
            zeros = find_zero_pairs(opened).text
            assumed = assumed_alpha_text(peft_config(opened), adapter_parts(opened), opened)
            extra = {**options.extra_metadata, RECORD: model.metadata[RECORD]}
            made = convert_model(model, Path(dst), to, replace(options, extra_metadata=extra))
            losses = () if options.dry_run else tuple(merge_losses(model, Path(dst)))
        of = f" of {len(merged)}" if count < len(merged) else ""
        said = f"merged into {count}{of} weights: {ARITHMETIC}, rounded once to each weight's dtype"
        note = Note("note", str(found.path), said, "")
        doubts = (
            Note("warning", str(found.path), zeros, "zero_pairs"),
            Note("warning", str(found.path), assumed, "assumed_alpha"),
        )
        shown = (doubt for doubt in doubts if doubt.text)
        notes = (*made.notes, note, *shown, *stray_notes(found), *loss_notes(losses, found.path))
        return replace(made, notes=notes, tensors=tuple(_with_losses(made.tensors, losses)))


@dataclass(frozen=True)
class MergeLoss:
    """How much of an adapter's change was lost to rounding when one merged weight was stored.

    `count` is the number of values that the adapter changes, `still` those of them that are stored
    as in the base, `changed` all stored values that are not the exact sum. `lost` and `size` are
    norms: of what was lost, and of the change.
    """

    key: str
    names: tuple[str, ...]  # in the output
    encoding: str
    count: int
    changed: int
    still: int
    lost: float
    size: float


def merge_losses(model: Model, out: Path) -> "Iterator[MergeLoss]":
    """Yield a MergeLoss for each weight of a written merge that lost something to its encoding.

    `model` is the merge as computed, `out` the path to which it was written.
    """
    merged = {name for name, one in model.source.tensors.items() if isinstance(one, MergedTensor)}
    keys = dict.fromkeys(
        key for name in sorted(merged) for key in model.roles_of.get(name, (name,))
    )
    with open_model(out) as written:
        for key in keys:
            mine, theirs = model.find(key), written.find(key)
            if mine is None or theirs is None or theirs.encoding in ("F32", "F64"):
                continue
            plain, full = (merged_values(mine, times) for times in (0, 1))
            held = theirs.numpy().astype(np.float32).astype(np.float64)
            apart = full != plain
            changed = int((held != full).sum())
            if changed and apart.any():
                yield MergeLoss(
                    key,
                    theirs.names,
                    theirs.encoding,
                    int(apart.sum()),
                    changed,
                    int((apart & (held == plain)).sum()),
                    float(np.linalg.norm(held - full)),
                    float(np.linalg.norm(full - plain)),
                )
            theirs.drop()


def merged_values(merged: View, times: int) -> "F64":
    """Return a weight of a merge with the change added `times` times, unrounded (float64)."""
    stored = [
        one.with_times(times) if isinstance(one, MergedTensor) else one for one in merged.stored
    ]
    view = View(*stored, role=merged.role, group=merged.group, hp=merged.sizes)
    return view.numpy().astype(np.float64)


def scaled_otherwise(merged: View) -> "Iterator[tuple[str, F64]]":
    """Yield (mistake in words, the weight it makes) of usual mistakes with DoRA's magnitudes.

    The weights are float64, before they are rounded to a stored type. Nothing is yielded for a
    weight without magnitudes.
    """
    pairs = [one.pair for one in merged.stored if isinstance(one, MergedTensor)]
    if len(pairs) < len(merged.stored) or any(one.magnitude is None for one in pairs):
        return

    def lengths(one: MergedTensor, times: int) -> "F64":
        """Return the norm of each row of a weight with its adapter pair added `times` times (0, 1).

        A norm of 0 is returned as 1, because rows are divided by the result.
        """
        found = one.row_lengths(times)
        return np.where(found > 0, found, 1.0)

    made: tuple[tuple[str, Callable[[MergedTensor, F64], LowRank]], ...] = (
        (
            "DoRA's magnitudes are ignored: B @ A alone was added",
            lambda one, m: replace(one.pair, magnitude=None),
        ),
        (
            "B @ A is ignored: the base's rows alone have DoRA's magnitudes",
            lambda one, m: replace(one.pair, scale=0.0),
        ),
        (
            "rows are multiplied by DoRA's magnitudes, and not divided by their lengths",
            lambda one, m: replace(one.pair, magnitude=m * lengths(one, 1)),
        ),
        (
            "rows are divided by the lengths of the base's, not by their own",
            lambda one, m: replace(one.pair, magnitude=m * lengths(one, 1) / lengths(one, 0)),
        ),
    )
    for says, change in made:
        stored = [
            one.with_pair(change(one, one.pair.magnitude))
            for one in merged.stored
            if isinstance(one, MergedTensor) and one.pair.magnitude is not None
        ]
        view = View(*stored, role=merged.role, group=merged.group, hp=merged.sizes)
        yield says, view.numpy().astype(np.float64)
    yield from _scaled_by_columns(merged)


# What DoRA's magnitudes may do with the axes of a square weight, in words, and the weight that they
# make of the sum [out, in] and the magnitudes [n].
OTHER_AXES: "tuple[tuple[str, Callable[[F64, F64], F64]], ...]" = (
    (
        "DoRA's magnitudes scale columns, which are divided by their lengths, not rows",
        lambda total, m: total / _lengths(total, 0) * m[None, :],
    ),
    (
        "DoRA's magnitudes scale rows, and columns are divided by their lengths",
        lambda total, m: total / _lengths(total, 0) * m[:, None],
    ),
    (
        "DoRA's magnitudes scale columns, and rows are divided by their lengths",
        lambda total, m: total / _lengths(total, 1) * m[None, :],
    ),
)


def _lengths(values: "F64", axis: int) -> "F64":
    """Return the norms of a matrix' columns (axis 0) or rows (1), with that axis kept at size 1.

    A norm of 0 is returned as 1, to be divided by.
    """
    found = np.linalg.norm(values, axis=axis, keepdims=True)
    return np.where(found > 0, found, 1.0)


def _scaled_by_columns(merged: View) -> "Iterator[tuple[str, F64]]":
    """Yield (mistake in words, the weight it makes) of DoRA's magnitudes along the other axis.

    The weights are float64, before they are rounded to a stored type. Nothing is yielded unless the
    weight is one square tensor: the magnitudes are as many as it has rows.
    """
    one = merged.stored[0]
    if len(merged.stored) > 1 or not isinstance(one, MergedTensor) or one.pair.magnitude is None:
        return
    rows, columns = one.pair.shape[0], one.pair.shape[-1]
    if len(one.pair.shape) != 2 or rows != columns:
        return
    total = one.with_pair(replace(one.pair, magnitude=None))._merged_rows(0, rows)
    for says, change in OTHER_AXES:
        values = change(total.astype(np.float64), one.pair.magnitude).astype(np.float32)
        stored = MemoryTensor(one.with_times(1).info, values.tobytes())
        view = View(stored, role=merged.role, group=merged.group, hp=merged.sizes)
        yield says, view.numpy().astype(np.float64)


def exchanged_factors(merged: View) -> "Iterator[tuple[str, F64]]":
    """Yield (mistake in words, the weight it makes) of a merge that took factor A for B.

    That is possible for square factors; nothing is yielded for others. The weight is float64,
    before it is rounded to a stored type.
    """
    ones = [one for one in merged.stored if isinstance(one, MergedTensor)]
    square = all(one.pair.a.shape == one.pair.b.shape == one.pair.shape for one in ones)
    if len(ones) < len(merged.stored) or not square or any(one.pair.a.ndim > 2 for one in ones):
        return
    stored = [one.with_pair(replace(one.pair, a=one.pair.b, b=one.pair.a)) for one in ones]
    view = View(*stored, role=merged.role, group=merged.group, hp=merged.sizes)
    says = "A is taken for B, and B for A: A @ B was added, not B @ A"
    yield says, view.numpy().astype(np.float64)


def loss_notes(losses: "Sequence[MergeLoss]", adapter: Path) -> tuple[Note, ...]:
    """Return one note on how much of the change the stored types lose; () without a loss.

    `losses` are those of the merged weights, `adapter` is the path that the note names.
    """
    if not losses:
        return ()
    kinds = ", ".join(sorted({each.encoding for each in losses}))
    share = math.hypot(*(each.lost for each in losses)) / math.hypot(*(one.size for one in losses))
    count, still = (sum(getattr(each, name) for each in losses) for name in ("count", "still"))
    worst = max(losses, key=lambda each: each.lost / each.size)
    stays = f", {still} of {count} changed values stay as they were" if still else ""
    said = (
        f"{kinds} takes {share:.2g} of the change in {len(losses)} "
        f"weight{'s' * (len(losses) > 1)}{stays} (most in "
        f"{worst.key}: {worst.lost / worst.size:.2g}); --encoding F32 holds all of it"
    )
    return (Note("warning", str(adapter), said, "merge_rounding"),)


def _with_losses(
    tensors: "Iterable[TensorOutcome]", losses: "Sequence[MergeLoss]"
) -> "Iterator[TensorOutcome]":
    """Yield a conversion's outcomes; merged weights that rounding changed have `how` "lossy"."""
    changed = {name: each.changed for each in losses for name in each.names}
    for tensor in tensors:
        if tensor.name in changed and tensor.how != "lossy":
            yield replace(tensor, how="lossy", changed=changed[tensor.name])
        else:
            yield tensor


def stray_notes(adapter: Adapter) -> tuple[Note, ...]:
    """Return (warning,) on the file's tensors that are no part of an adapter; () if none."""
    if not adapter.stray:
        return ()
    said = f"left out, for it is no part of an adapter: {', '.join(adapter.stray)}"
    return (Note("warning", str(adapter.path), said, "stray_tensor"),)
