"""A Model: an open file plus its folder, architecture, hyperparameters, and roles.

`model[...]` are the file's own names (companions joined); `model.roles[...]` are logical tensors
under role keys (`L3.attn_q.weight`), with the file's layout steps undone on demand.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.companions import join
from aprfmt.dtypes import encoding as encoding_row
from aprfmt.errors import ArchError, CodecError, TensorNotFoundError, UsageError
from aprfmt.hf_folder import INDEX, HFFolder, find_weights, in_hub_cache, read_folder
from aprfmt.tensor import LazyTensor, Note, Source, TensorInfo, Value

if TYPE_CHECKING:
    from aprfmt.arch.bind import Group
    from aprfmt.arch.hyper import KeyReport
    from aprfmt.arch.spec import ArchSpec, HyperParams, Move
    from aprfmt.conversion.restore import Restoration
    from aprfmt.tokenizer import Tokenizer

HF_CONFIG_KEYS = {"gguf": "aprfmt.hf_config", "apr": "hf_config"}


def decode_tensor(tensor: LazyTensor) -> Any:
    """Return a tensor's numbers as a row-major array of its shape.

    float32 for everything quantized, F16, BF16 and FP8; the own type of F32, F64, integers.
    """
    from aprfmt.codecs import decode

    info = tensor.info
    own = getattr(tensor, "decode", None)
    if own is not None:
        try:
            return own()
        except CodecError as error:
            raise CodecError(f"{info.name}: {error}") from error
    raw = {suffix: part.raw() for suffix, part in tensor.parts.items()} or {"": tensor.raw()}
    try:
        return decode(info.encoding, raw, info.shape, row_bytes=info.row_bytes)
    except CodecError as error:
        raise CodecError(f"{info.name}: {error}") from error


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor under its name in the file: facts at once, bytes and numbers when asked for."""

    lazy: LazyTensor

    @property
    def name(self) -> str:
        """The file's own name of it."""
        return self.lazy.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, outermost first; that of the weight itself, also when packed."""
        return self.lazy.info.shape

    @property
    def encoding(self) -> str:
        """Key of dtypes.ENCODINGS, or `type#142`."""
        return self.lazy.info.encoding

    @property
    def nbytes(self) -> int:
        """Stored bytes (of the main part, where there are companions)."""
        return self.lazy.info.nbytes

    @property
    def offset(self) -> int:
        """Where the bytes begin, from the start of the file that holds them."""
        return self.lazy.info.offset

    @property
    def parts(self) -> Mapping[str, LazyTensor]:
        """Companion tensors by suffix; empty for most."""
        return self.lazy.parts

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a read-only view of the stored bytes, valid until the model is closed."""
        return self.lazy.raw(start, stop)

    def numpy(self) -> Any:
        """Return the decoded values, row-major, as a new array."""
        return decode_tensor(self.lazy)


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` stored bytes of `tensor` from byte `start`."""

    tensor: LazyTensor
    start: int
    nbytes: int


class LogicalTensor:
    """One role of the model, with the file's layout steps undone on demand.

    `stored` are the tensors it is made of, `runs` the byte runs that are its bytes when the steps
    only move rows (None where a step changes values or the encoding cannot be cut that way).
    """

    def __init__(
        self,
        key: str,
        group: "Group",
        stored: Sequence[LazyTensor],
        hp: "HyperParams",
        record: "tuple[str, Value] | None" = None,
    ) -> None:
        self.key = key
        self.group = group
        self.stored = tuple(stored)
        self._hp = hp
        self._record = record
        self._index = group.roles.index(key)
        shapes = [tensor.info.shape for tensor in stored]
        for step in group.binding.steps:
            try:
                shapes = step.shapes(shapes, hp)
            except ArchError as error:
                raise ArchError(f"{self.stored[0].info.name}: {error}") from error
        self.shape = tuple(shapes[self._index])

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings of the stored tensors, each once, in order."""
        return tuple(dict.fromkeys(tensor.info.encoding for tensor in self.stored))

    @property
    def encoding(self) -> str:
        """The one encoding of the stored tensors; mixed experts give `A+B`."""
        return "+".join(self.encodings)

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the layout steps between file and logical tensor."""
        return tuple(str(step) for step in self.group.binding.steps)

    @cached_property
    def moves(self) -> "list[Move] | None":
        """Runs of stored elements, or None where a step has to decode."""
        from aprfmt.arch.moves import compose
        from aprfmt.arch.spec import Move

        shapes = [tensor.info.shape for tensor in self.stored]
        moves = [[Move(i, 0, _count(shape))] for i, shape in enumerate(shapes)]
        for step in self.group.binding.steps:
            outer = step.moves(shapes, self._hp)
            if outer is None:
                return None
            moves = compose(outer, moves)
            shapes = step.shapes(shapes, self._hp)
        return moves[self._index]

    @cached_property
    def runs(self) -> list[Run] | None:
        """Byte runs that make up this tensor undecoded, or None."""
        if len(self.encodings) != 1 or any(tensor.parts for tensor in self.stored):
            return None
        moves = self.moves
        return None if moves is None else element_runs(self.stored, moves)

    @property
    def whole(self) -> LazyTensor | None:
        """The one stored tensor whose bytes are exactly this tensor's, if it is so."""
        if len(self.stored) != 1:
            return None
        moves = self.moves
        tensor = self.stored[0]
        if moves is None or len(moves) != 1 or moves[0].start != 0:
            return None
        return tensor if moves[0].count == _count(tensor.info.shape) else None

    @cached_property
    def _restored(self) -> Any:
        """The source's own bits, if the file records them and they fit what it stores; else None.

        The record is believed only if widening the bits and applying the layout steps again gives
        exactly the stored numbers: a tensor edited since then is read as it stands.
        """
        if self._record is None or len(self.group.roles) != 1 or len(self.stored) != 1:
            return None
        import numpy as np

        from aprfmt.codecs import decode, encode
        from aprfmt.conversion.restore import restore_bits

        name, patch = self._record
        logical = [decode_tensor(self.stored[0])]
        stored = logical[0]
        for step in self.group.binding.steps:
            logical = step.undo(logical, self._hp)
        narrow = np.frombuffer(encode(name, logical[0].astype(np.float32))[""], np.uint8)
        size = encoding_row(name).type_size
        bits = restore_bits(narrow.view(f"<u{size}"), patch, self.stored[0].info.name)
        wide = decode(name, {"": bits.tobytes()}, self.shape)
        again = [wide]
        for step in reversed(self.group.binding.steps):
            again = step.apply(again, self._hp)
        same = np.array_equal(again[0].view(np.uint32), stored.view(np.uint32))
        return bits.tobytes() if same else None

    @property
    def restored(self) -> str:
        """The encoding the file says this tensor had in its source, where it can be restored."""
        return self._record[0] if self._record is not None and self._restored is not None else ""

    def raw(self) -> bytes | memoryview | None:
        """Return the logical tensor's bytes in its own (or its restored) encoding, if it has any.

        None where a layout step changes values and nothing restores the source's bits.
        """
        if self.restored:
            return bytes(self._restored)
        if self.runs is None:
            return None
        return gather(self.runs, 0, sum(run.nbytes for run in self.runs))

    def numpy(self) -> Any:
        """Return the decoded logical tensor (float32 for quantized encodings)."""
        if self._record is not None and self._restored is not None:
            from aprfmt.codecs import decode

            return decode(self._record[0], {"": self._restored}, self.shape)
        whole = self.whole
        if whole is not None:
            return decode_tensor(whole).reshape(self.shape)
        if self.runs is not None:
            from aprfmt.codecs import decode

            raw = b"".join(run.tensor.raw(run.start, run.start + run.nbytes) for run in self.runs)
            return decode(self.encoding, {"": raw}, self.shape)
        arrays = [decode_tensor(tensor) for tensor in self.stored]
        for step in self.group.binding.steps:
            arrays = step.undo(arrays, self._hp)
        return arrays[self._index].reshape(self.shape)

    def decode_rows(self, start: int, stop: int) -> Any:
        """Return rows [start, stop) of the tensor seen as [rows, last axis], decoded."""
        columns = self.shape[-1] if self.shape else 1
        runs = self.runs
        row = encoding_row(self.encoding) if len(self.encodings) == 1 else None
        row_bytes = row.row_bytes(self.shape) if row is not None else None
        if runs is None or row_bytes is None:
            return self.numpy().reshape(-1, columns)[start:stop]
        from aprfmt.codecs import decode

        raw = gather(runs, start * row_bytes, stop * row_bytes)
        return decode(self.encoding, {"": raw}, (stop - start, columns))

    def drop(self) -> None:
        """Release the mapped pages of the stored tensors."""
        for tensor in self.stored:
            tensor.drop()


def gather(runs: Sequence[Run], start: int, stop: int) -> bytes | memoryview:
    """Return bytes [start, stop) of the concatenated runs; a view where one run holds them."""
    pieces: list[memoryview] = []
    at = 0
    for run in runs:
        low, high = max(start, at), min(stop, at + run.nbytes)
        if low < high:
            pieces.append(run.tensor.raw(run.start + low - at, run.start + high - at))
        at += run.nbytes
        if at >= stop:
            break
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def element_runs(stored: "Sequence[LazyTensor]", moves: "Sequence[Move]") -> list[Run] | None:
    """Turn runs of elements into runs of bytes; None where a block would be cut."""
    runs: list[Run] = []
    for move in moves:
        info = stored[move.source].info
        if move.start == 0 and move.count == _count(info.shape):
            runs.append(Run(stored[move.source], 0, info.nbytes))
            continue
        row = encoding_row(info.encoding)
        if not row.known or row.flat or move.start % row.block_size or move.count % row.block_size:
            return None
        if info.nbytes * row.block_size != _count(info.shape) * row.type_size:
            return None  # padded rows: elements and bytes do not run in step
        start = move.start // row.block_size * row.type_size
        size = move.count // row.block_size * row.type_size
        last = runs[-1] if runs else None
        if last and last.tensor is stored[move.source] and last.start + last.nbytes == start:
            runs[-1] = Run(last.tensor, last.start, last.nbytes + size)
        else:
            runs.append(Run(stored[move.source], start, size))
    return runs


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class Model(Mapping[str, Tensor]):
    """An open model; a mapping from the file's own tensor names, and a context manager.

    `arch` forces an architecture by name. Where the architecture is unknown the model still
    opens: `arch_error` says why, and asking for `spec`, `hyper` or `roles` raises it.
    """

    def __init__(self, source: Source, folder: HFFolder | None, arch: str | None = None) -> None:
        self.source = source
        self.folder = folder
        self._forced = arch
        self._lazy = join(source.tensors, self.config)

    # --- the file ---------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """What was opened (the first file of a split or folder)."""
        return self.source.path

    @property
    def format(self) -> str:
        """Key of FORMATS."""
        return self.source.format

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The file's own key-value part."""
        return self.source.metadata

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._lazy:
            raise TensorNotFoundError(self._not_found(name))
        return Tensor(self._lazy[name])

    def __contains__(self, name: object) -> bool:
        return name in self._lazy  # Mapping's own would look for near names on every miss

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor, or `default` where the file has none of that name."""
        return self[name] if name in self._lazy else default

    def _not_found(self, name: str) -> str:
        from aprfmt.names import near

        return f"{self.path}: no tensor {name!r}; near names: {', '.join(near(name, self._lazy))}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._lazy)

    def __len__(self) -> int:
        return len(self._lazy)

    def close(self) -> None:
        """Close the file; views given out by raw() end with it."""
        self.source.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- configuration ----------------------------------------------------------------------

    @cached_property
    def config(self) -> Mapping[str, Value] | None:
        """config.json: the folder's, or the one our own GGUF and APR carry; None without."""
        if self.folder is not None and self.folder.config is not None:
            return self.folder.config
        carried = self.source.metadata.get(HF_CONFIG_KEYS.get(self.source.format, ""))
        if isinstance(carried, str):
            from aprfmt.formats.jsonio import loads

            where = f"{self.path}: metadata {HF_CONFIG_KEYS[self.source.format]}"
            carried = loads(carried.encode(), where, max_bytes=16 << 20)
        return carried if isinstance(carried, Mapping) else None

    @cached_property
    def style(self) -> str | None:
        """The naming style of the tensors ("hf", "gguf"), or None where neither fits."""
        from aprfmt.arch.bind import detect_style

        return detect_style(self._lazy)

    @cached_property
    def resolution(self) -> "Resolution":
        """Architecture, hyperparameters and roles together; raises ArchError or FormatError."""
        from aprfmt.resolve import resolve

        return resolve(self, self._forced)

    @property
    def spec(self) -> "ArchSpec":
        """The architecture's tables; ArchError names an unknown one."""
        return self.resolution.spec

    @property
    def hyper(self) -> "HyperParams":
        """Hyperparameters, each with its origin."""
        return self.resolution.hyper

    @property
    def roles(self) -> Mapping[str, LogicalTensor]:
        """Logical tensors by role key, in execution order of the file's own listing."""
        return self.resolution.roles

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer, built from whatever this format carries; FormatError without one."""
        from aprfmt.tokenizer import load

        return load(self)

    @cached_property
    def records(self) -> "Restoration":
        """What a file of ours records of its source's bits; empty for others."""
        from aprfmt.conversion.restore import read_restoration

        return read_restoration(self.metadata, str(self.path))

    @property
    def notes(self) -> Sequence[Note]:
        """The reader's remarks about the file."""
        return self.source.notes


@dataclass(frozen=True)
class Resolution:
    """What the architecture's tables made of a file."""

    spec: "ArchSpec"
    hyper: "HyperParams"
    roles: Mapping[str, LogicalTensor]
    report: "KeyReport"
    unbound: tuple[str, ...]  # stored tensors no role of the architecture claims
    missing: tuple[str, ...]  # role keys the configuration demands and the file lacks
    notes: tuple[Note, ...] = ()


def open_model(path: Path | str, *, arch: str | None = None, partial: bool = False) -> Model:
    """Open a model file, a shard index, a Hugging Face folder, or `org/name` from the hub cache.

    The format is decided by content. config.json and tokenizer files are read from the folder of
    a safetensors file, and from any folder that was named itself. Raises FormatError, UsageError.
    """
    path = Path(path)
    named_folder = False
    if not path.exists():
        cached = in_hub_cache(str(path))
        if cached is None:
            raise UsageError(f"{path}: no such file or folder")
        path = cached
    if path.is_dir():
        named_folder = True
        path = find_weights(path)
    source = _open_source(_whole_set(path), partial)
    folder = None
    try:
        if named_folder or source.format == "safetensors":
            folder = read_folder(path.parent)
        return Model(source, folder, arch)
    except BaseException:
        source.close()
        raise


def _whole_set(path: Path) -> Path:
    """Return the index of a folder for one of its shards: any shard opens the whole model."""
    index = path.with_name(INDEX)
    shard = re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", path.name)
    return index if shard and index.is_file() else path


def _open_source(path: Path, partial: bool) -> Source:
    from aprfmt.formats import open_source

    if path.name == INDEX or path.name.endswith(".safetensors.index.json"):
        from aprfmt.formats.safetensors.reader import open_index

        return open_index(path, partial=partial)
    return open_source(path, partial=partial)


def plain_info(info: TensorInfo, name: str) -> TensorInfo:
    """Return a copy of an info under another name, offset unset."""
    return TensorInfo(name, info.shape, info.encoding, 0, info.nbytes, info.row_bytes)
