"""Find packed weights of a source that become blocks of another encoding without being decoded.

A *part* is one of the tensors that a packed weight is stored as: codes, scales and so on.

A weight of a dialect, which has no single byte string, is replaced by a tensor of the target's
encoding whose bytes are made when they are read; then the plan moves it like any stored tensor.
"""

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.processors import cpu_count
from aprfmt.base.protocols import LazyTensor, TensorInfo
from aprfmt.codecs import decode
from aprfmt.codecs.parallel import run_tasks
from aprfmt.conversion.options import Drops, Options
from aprfmt.conversion.outputs import Output, make_info
from aprfmt.errors import AprfmtError, CodecError, ConversionError
from aprfmt.formats import FormatSpec
from aprfmt.formats.mapped_file import MemoryTensor, in_mapped_file
from aprfmt.model import Model
from aprfmt.model.patterns import matching_indices
from aprfmt.model.resolve import spellings_by_name
from aprfmt.quantizing.mixture import deciding_name
from aprfmt.tensors.runs import ByteRun
from aprfmt.tensors.view import View, decode_tensor

if TYPE_CHECKING:
    from aprfmt.codecs.repacks import GroupCounts, Repacked

# Numbers next to a weight's blocks: name after the weight's -> the parts that hold it, by dialect.
ACTIVATION_SCALES: Mapping[str, tuple[str, ...]] = {
    "input_scale": (".input_scale", "_input_scale", "input_scale")
}
_WHOLE = "scale"


class RepackedTensor(LazyTensor):
    """A weight in blocks of another encoding, made from the packed tensor `origin` when read.

    `judged` has the counts of groups that change. `companion_bytes` has the numbers to be stored in
    further tensors, {name: float32 bytes}. Its scales stay in memory from the first row that is
    read to the last.
    """

    __slots__ = ("_blocks", "_turn", "companion_bytes", "info", "judged", "origin")

    info: TensorInfo

    def __init__(self, origin: LazyTensor, made: "Repacked", threads: int) -> None:
        """Set the tensor's new shape and size and count what the repack `made` changes."""
        row, shape = ENCODINGS[made.row.target], made.shape
        self.info = TensorInfo(
            origin.info.name,
            shape,
            row.name,
            origin.info.offset,
            row.nbytes(shape),
            row.row_bytes(shape),
        )
        self.origin, self.judged = origin, made.judged(threads)
        self.companion_bytes = dict(_activation_scales(origin))
        if made.whole is not None:
            self.companion_bytes[_WHOLE] = made.whole.astype("<f4").tobytes()
        self._blocks: Repacked | None = None
        self._turn = threading.Lock()

    @property
    def makes(self) -> bool:
        """Whether its rows are made when they are read: always True."""
        return True

    @property
    def made_of(self) -> tuple[LazyTensor, ...]:
        """The stored tensors of the packed weight."""
        return tuple(self.origin.parts.values())

    def _repacked_weight(self) -> "Repacked":
        """Return the repacked weight, its scales read again if they were released."""
        from aprfmt.codecs.repacks import repack

        with self._turn:  # any thread may ask for rows
            if self._blocks is None:
                assert self.origin.packed is not None
                kind, into = self.origin.info.encoding, self.info.encoding
                made = repack(self.origin.packed(), kind, {into})
                assert not isinstance(made, str), made
                self._blocks = made
            return self._blocks

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the blocks, made now."""
        stop = self.info.nbytes if stop is None else min(stop, self.info.nbytes)
        row = self.info.row_bytes
        if row is None or start >= stop:
            return memoryview(b"")
        first, last = start // row, -(-stop // row)
        rows = self._repacked_weight().blocks(first, last).reshape(-1)
        return rows.data[start - first * row : stop - first * row].toreadonly()

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the memory pages of its parts, and after the last row also its scales."""
        if stop is None or stop >= self.info.nbytes:
            self._blocks = None
        self.origin.drop()


def _activation_scales(origin: LazyTensor) -> Iterator[tuple[str, bytes]]:
    """Yield (name, float32 bytes) of the activation scales stored with a packed weight.

    The names are the keys of ACTIVATION_SCALES.
    """
    for name in ACTIVATION_SCALES:
        for part in _activation_scale_tensors(origin, name):
            values = decode(part.info.encoding, part.raw(), part.info.shape)
            yield name, values.astype("<f4").tobytes()


def _activation_scale_tensors(origin: LazyTensor, name: str) -> list[LazyTensor]:
    """Return a weight's stored tensors of its activation scale `name`, a key of ACTIVATION_SCALES.

    The result is [] where the weight has no such part.
    """
    return [
        origin.parts[suffix] for suffix in ACTIVATION_SCALES.get(name, ()) if suffix in origin.parts
    ]


class ScaledTensor(LazyTensor):
    """The blocks of a tensor that has a scale in another tensor: a GGUF's NVFP4.

    `companion_bytes` has the other tensors' bytes by name.
    """

    __slots__ = ("companion_bytes", "info", "main", "origin")

    info: TensorInfo

    def __init__(self, origin: LazyTensor) -> None:
        """Set the blocks (the main part of `origin`) as the tensor, and read its scale tensors."""
        self.origin, self.main = origin, origin.parts[""]
        self.info = replace(self.main.info, name=origin.info.name)
        self.companion_bytes = {
            name: bytes(part.raw()) for name, part in origin.parts.items() if name
        }

    @property
    def unwrapped(self) -> LazyTensor:
        """The stored tensor of the blocks."""
        return self.main

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return stored bytes [start, stop)."""
        return self.main.raw(start, stop)

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the memory pages of the blocks."""
        self.main.drop(start, stop)


Substitute = RepackedTensor | ScaledTensor


@dataclass(frozen=True)
class Repacking:
    """The tensors that replace packed weights in a plan, by name, and why others have none."""

    tensors: Mapping[str, Substitute]
    reasons: Mapping[str, str]
    named: frozenset[str] = frozenset()  # names whose encoding somebody asked for

    def replacement(self, tensor: LazyTensor) -> LazyTensor:
        """Return the tensor that replaces a packed one in the plan, else the tensor itself."""
        return self.tensors.get(tensor.info.name, tensor) if tensor.parts else tensor


def find_repacks(model: Model, target: FormatSpec, options: Options, *, copied: bool) -> Repacking:
    """Return the tensors that replace packed weights in the plan, and why others are not replaced.

    A weight is repacked where the target cannot hold it otherwise, or as the options ask. `copied`
    says that packed weights go to the target as the tensors they are stored in.
    """
    # What the options ask for, and what the target holds.
    requested = _requested_encodings(model, options)
    packed = [view for view in model.values() if view.stored[0].parts]
    if not packed:
        return Repacking({}, {}, frozenset(requested))
    from aprfmt.codecs.repacks import repack_targets

    blocks = _mixture_encodings(model, options)
    every = {name for name in ENCODINGS if target.holds(ENCODINGS[name])}
    found: dict[str, Substitute] = {}
    made: dict[str, RepackedTensor | str | AprfmtError] = {}
    tasks: list[Callable[[], None]] = []
    threads = options.threads or cpu_count()

    def try_repack(view: View, allowed: Container[str]) -> None:
        """Put a weight's repacked tensor, why there is none, or the error into `made`, by name."""
        try:
            made[view.name] = _repack_weight(view, allowed, threads)
        except AprfmtError as error:
            made[view.name] = error

    # Choose the weights to repack; blocks with a scale tensor are only wrapped.
    for view in packed:
        tensor = view.stored[0]
        if copied and view.name not in requested and options.writer is None:
            continue
        if tensor.packed is None:
            encoding = requested.get(view.name) or blocks.get(view.name)
            if _WHOLE in tensor.parts and encoding in (None, tensor.info.encoding):
                found[view.name] = ScaledTensor(tensor)
            continue
        encoding = requested.get(view.name)
        allowed: Container[str] = every if encoding is None else {encoding}
        if options.choose is not None or not repack_targets(tensor.info.encoding):
            continue
        tasks.append(partial(try_repack, view, allowed))
    # Read the weights, remote ones by one thread alone.
    here = all(in_mapped_file(tensor) for view in packed for tensor in view.stored)
    run_tasks(tasks, threads if here else 1)
    reasons: dict[str, str] = {}
    for name in (view.name for view in packed if view.name in made):
        answer = made[name]
        if isinstance(answer, AprfmtError):
            raise answer
        if isinstance(answer, RepackedTensor):
            found[name] = answer
        elif answer:
            reasons[name] = answer
    return Repacking(found, reasons, frozenset(requested))


def _repack_weight(view: View, allowed: Container[str], threads: int) -> RepackedTensor | str:
    """Return the tensor that replaces a packed weight, or a text: why it cannot be repacked.

    The text is "" where no encoding in `allowed` is meant for it. Raises ConversionError for parts
    that cannot be decoded either.
    """
    from aprfmt.codecs.repacks import Repacked, repack

    tensor = view.stored[0]
    assert tensor.packed is not None
    try:
        made = repack(tensor.packed(), tensor.info.encoding, allowed)
        if made and isinstance(made, str):
            tensor.packed().laid_out()  # raises where no encoding could help
    except CodecError as error:
        raise ConversionError(f"{view.name}: {error}") from error
    tensor.drop()  # the scales of all weights would stay mapped until each is written
    return RepackedTensor(tensor, made, threads) if isinstance(made, Repacked) else made


def _requested_encodings(model: Model, options: Options) -> Mapping[str, str]:
    """Return {name of a stored tensor: encoding} asked for by --encoding and --tensor."""
    found = dict.fromkeys(model, options.encoding) if options.encoding else {}
    if options.tensor_encodings:
        names, every = list(model), list(spellings_by_name(model).values())
        for pattern, encoding in options.tensor_encodings:
            found.update(
                {names[i]: encoding for i in matching_indices(every, [pattern], str(model.path))}
            )
    return {name: encoding for name, encoding in found.items() if encoding is not None}


def _mixture_encodings(model: Model, options: Options) -> Mapping[str, str]:
    """Return {name: encoding} that a mixture gives to blocks with a scale in another tensor.

    {} where weights are written in a dialect, which takes the blocks themselves.
    """
    if options.choose is None or options.writer is not None:
        return {}
    roles, found = model.roles_of, {}
    for view in model.values():
        if view.parts and view.stored[0].packed is None:
            name = deciding_name((*roles.get(view.name, ()), view.name))
            found[view.name] = options.choose(name, view.shape, view.encoding)
    return {name: encoding for name, encoding in found.items() if encoding is not None}


def with_scale_tensors(outputs: Sequence[Output], drops: Drops) -> Iterator[Output]:
    """Yield the outputs, each followed by the tensors of its scales, such as NAME.scale.

    `drops` say which are left out. Raises ConversionError where a tensor is made of several whose
    scales differ, and for activation scales that are NaN, infinite or negative.
    """
    for output in outputs:
        yield output
        # Numbers that the sources of copied blocks have in further tensors.
        substitutes = [
            one for one in output.sources if isinstance(one, Substitute) and output.copies
        ]
        stem = output.info.name.removesuffix(".weight")
        for name in dict.fromkeys(key for one in substitutes for key in one.companion_bytes):
            stored = {
                part.info.name: one.origin
                for one in substitutes
                for part in _activation_scale_tensors(one.origin, name)
            }
            # Leave out what --drop names, under its old or its new name.
            called = (f"{stem}.{name}", *stored)
            if stored and any(match(each) for match in drops for each in called):
                continue
            for each, origin in stored.items():
                _check_activation_scales(origin, each)
            data = _joined_scales(output, substitutes, name)
            shape = (len(data) // 4,)
            info = make_info(f"{stem}.{name}", shape, "F32")
            tensor = MemoryTensor(info, data)
            yield Output(
                info,
                "F32",
                [ByteRun(tensor, 0, info.nbytes)],
                partial(decode_tensor, tensor),
                (info.name, *output.spellings[:1]),
            )


def _check_activation_scales(origin: LazyTensor, name: str) -> None:
    """Raise ConversionError for activation scales of a weight that are NaN, infinite or negative.

    `name` is the scale's tensor, for the message.
    """
    from aprfmt.codecs.scale_checks import check_input_scale_tensors

    try:
        check_input_scale_tensors(origin.parts)
    except CodecError as error:
        raise ConversionError(
            f"{origin.info.name}: {error}; measure it again, or leave it out with --drop {name}"
        ) from error


def _joined_scales(output: Output, held: Sequence[Substitute], name: str) -> bytes:
    """Return the float32 bytes of the scale `name` for an output made of the tensors `held`.

    That is one number for the whole output, or one for each expert. Raises ConversionError where
    neither fits.
    """
    every = [one.companion_bytes.get(name, b"") for one in held]
    if len(set(every)) == 1 and (len(every) == 1 or len(output.info.shape) < 3):
        return every[0]
    whole = output.info.shape[0] if len(output.info.shape) > 2 else 1
    if len(every) == len(output.sources) == whole and all(len(one) == 4 for one in every):
        return b"".join(every)
    raise ConversionError(
        f"{output.info.name}: is made of {len(output.sources)} tensors, each with a {name} of its "
        "own, which blocks of one tensor cannot have; decode it with --tensor PATTERN=F32"
    )


def check_exact(
    outputs: Sequence[Output], found: Repacking, options: Options, path: object
) -> None:
    """Raise ConversionError if a repack changes values and was not asked for by name.

    `outputs` are the planned tensors, `found.named` the names asked for; `path` begins the message.
    `allow_inexact` of the options accepts it.
    """
    if options.allow_inexact:
        return
    changed: dict[str, RepackedTensor] = {
        one.info.name: one
        for output in outputs
        for one in output.sources
        if isinstance(one, RepackedTensor)
        and one.judged.inexact
        and one.info.name not in found.named
    }
    if not changed:
        return
    every = list(changed.values())
    worst = max(every, key=lambda one: one.judged.largest)
    raise ConversionError(
        f"{path}: {sum(one.judged.inexact for one in every)} of "
        f"{sum(one.judged.groups for one in every)} groups in {len(every)} weights change when "
        f"{worst.origin.info.encoding} is repacked as {worst.info.encoding}, by at most "
        f"{worst.judged.largest:.3g} ({worst.info.name}); accept it with --allow-inexact, or "
        "decode with --encoding F32"
    )


def repack_exactness(output: Output) -> "tuple[str, GroupCounts | None]":
    """Return (encoding before the repack, counts of groups that change) of an output.

    The result is ("", None) for an output that was not repacked.
    """
    repacked = [one for one in output.sources if isinstance(one, RepackedTensor)]
    if not repacked:
        return "", None
    from aprfmt.codecs.repacks import GroupCounts

    said = [one.judged for one in repacked]
    total = GroupCounts(
        sum(one.groups for one in said),
        sum(one.inexact for one in said),
        max(one.largest for one in said),
    )
    return repacked[0].origin.info.encoding, total
