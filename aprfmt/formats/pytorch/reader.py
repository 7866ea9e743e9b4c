"""Opens files of torch.save, and models in several of them by their index, as sources."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from aprfmt.base.name_copies import copies_text, repeated_prefixes
from aprfmt.base.protocols import ByteSource, Damage, LazyTensor, Note, Source, TensorInfo, Value
from aprfmt.base.sequences import first_and_more
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.formats.damage import Faults, Structure
from aprfmt.formats.foreign_formats import DISTRIBUTED_SHARD
from aprfmt.formats.mapped_file import Buffer, BufferFile, open_bytes
from aprfmt.formats.pytorch.layout import is_index
from aprfmt.formats.pytorch.pickle_calls import DESCRIBED
from aprfmt.formats.pytorch.pickle_imports import hidden_imports
from aprfmt.formats.pytorch.state_dict import Flattened
from aprfmt.formats.pytorch.storages import PickleContents, read_contents
from aprfmt.formats.pytorch.tensor import StridedTensor, open_tensor
from aprfmt.remote.paths import parse_location

_SHOWN = 12  # names of a note
_SEARCHED = 1 << 20  # bytes of a part that loading does not read, in which pickles are looked for


class ParsedPickle(Structure):
    """The structure of one file: tensors, notes and regions. Damage raises when it is opened.

    `infos` are those of the tensors that the file stores: arrays in the pickle lie nowhere.
    """

    def __init__(
        self, where: str, infos: dict[str, TensorInfo], notes: list[Note], contents: PickleContents
    ) -> None:
        self.where, self.infos, self.notes = where, infos, notes
        self.faults = Faults(where, False)
        self._contents = contents

    def regions(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the records or storages in order; between them is padding."""
        return self._contents.regions()


class PickledFile:
    """One open file: its tensors and values by path, and the names that its pickle imports."""

    def __init__(self, file: ByteSource) -> None:
        """Read all of an open file except the tensors' bytes.

        Raises FormatError, and UnsupportedError for a pickle that imports a name no value needs.
        """
        where = str(file.path)
        self.file = file
        self.contents: PickleContents = read_contents(file, where)
        _refuse_unlisted_imports(self.contents, where)
        found = Flattened(self.contents.value, where, file.size)
        places, swapped = self.contents.places, self.contents.swapped
        self.metadata: dict[str, Value] = found.values
        self.tensors: dict[str, LazyTensor] = {
            name: open_tensor(file, name, value, places, swapped)
            for name, value in found.tensors.items()
        }
        stored = [name for name, value in found.tensors.items() if not value.in_pickle]
        infos = {name: self.tensors[name].info for name in stored}
        self.parsed = ParsedPickle(where, infos, list(_make_notes(found, self)), self.contents)
        self.contents.value = None

    @property
    def data(self) -> ByteSource:
        """The bytes in which the tensors' offsets count: the file itself."""
        return self.file

    def footer_matches(self) -> bool | None:
        """Return whether every record has the CRC-32 that the archive's directory says.

        None where the file has none: the older forms, and archives saved with
        torch.serialization.set_crc32_options(False), whose records all say 0.
        """
        from aprfmt.base.crc import crc32

        records = [row for row in self.contents.records.values() if row.size]
        if not any(row.crc for row in records):
            return None
        for row in records:
            total = 0
            for window in self.file.windows(row.start, row.start + row.size):
                total = crc32(window, total)
            if total != row.crc:
                return False
        return True

    @property
    def imports(self) -> tuple[str, ...]:
        """The names that loading the file's pickle would import, in the order of the file."""
        return tuple(self.contents.imports)

    def unfit_imports(self) -> list[str]:
        """Return in words each import that a file of tensors does not need.

        They are those of its pickle, and all of a pickle that is hidden after or next to it.
        """
        found = list(self.contents.imports.unfit(DESCRIBED))
        for place, (start, stop) in self.contents.unread.items():
            names = hidden_imports(bytes(self.file.view[start : min(stop, start + _SEARCHED)]))
            if names:
                found.append(f"{place} is a pickle that imports {first_names(names)}")
        return found


def _refuse_unlisted_imports(contents: PickleContents, where: str) -> None:
    """Raise UnsupportedError if a file's pickle imports a name that none of its values needs.

    Loading the file would run the code of that name's module, even if nothing is called. `where`
    (the file) begins the message.
    """
    found = list(contents.imports.unlisted(DESCRIBED))
    if not found:
        return
    name, place, why = found[0]
    more = f", and {len(found) - 1} more such names" if len(found) > 1 else ""
    raise UnsupportedError(
        f"{where}: {place} imports {shorten(name, 200)}, {why}{more}; expected only what "
        "torch.save writes for tensors, containers and numbers. Loading this file may run code: "
        "ask for safetensors, or save its state_dict alone"
    )


def _make_notes(found: Flattened, opened: PickledFile) -> Sequence[Note]:
    """Return the notes about a file: tensors without data, subclasses, copies, objects, views."""
    path, notes = str(opened.file.path), []
    absent = [name for name, value in found.tensors.items() if value.storage is None]
    if absent:
        text = f"{len(absent)} tensors have no data in the file (meta): {first_names(absent)}"
        notes.append(Note("warning", path, text, "meta_tensors"))
    kinds = {
        name: value
        for name, value in found.tensors.items()
        if value.kind not in ("", "Parameter", "storage", "quantized")
    }
    if kinds:
        shown = first_names([f"{name} ({value.kind})" for name, value in kinds.items()])
        text = (
            f"{len(kinds)} tensors are of a class of their own, shown by their stored numbers: "
            f"{shown}"
        )
        notes.append(Note("note", path, text, "remark"))
    codes = [name for name, value in found.tensors.items() if value.quantized]
    if codes:
        text = (
            f"{len(codes)} tensors are quantized, shown by their values, (code - zero point) * "
            f"scale: {first_names(codes)}"
        )
        notes.append(Note("note", path, text, "remark"))
    pairs = [n for n, v in found.tensors.items() if v.dtype in ("complex128", "complex32")]
    if pairs:
        text = f"{len(pairs)} complex tensors are shown as pairs of floats: {first_names(pairs)}"
        notes.append(Note("note", path, text, "remark"))
    shapes = {name: value.shape for name, value in found.tensors.items()}
    copies = repeated_prefixes(shapes)
    if copies:
        notes.append(Note("note", path, copies_text(copies, shapes, path), "remark"))
    if found.classes:
        text = "holds objects, of which only numbers and texts are read: " + first_names(
            [f"{name} ({count})" for name, count in found.classes.items()]
        )
        notes.append(Note("note", path, text, "remark"))
    strided = [n for n, t in opened.tensors.items() if isinstance(t, StridedTensor)]
    if strided:
        names = first_names(strided)
        text = f"{len(strided)} tensors are views that are put in order when read: {names}"
        notes.append(Note("note", path, text, "remark"))
    return notes


def first_names(names: Sequence[str]) -> str:
    """Return the first 12 names as text, with the number of those left out."""
    return first_and_more(names, _SHOWN, lambda name: shorten(name, 100))


class PytorchSource:
    """An open model of torch.save: one file, or all files that an index names.

    `metadata` are the values of the pickle that are not tensors, by path. `imports` are the names
    that loading it with pickle would import; nothing here does.
    """

    format = "pytorch"
    types: Mapping[str, str] = {}
    damage: Sequence[Damage] = ()

    def __init__(
        self,
        path: Path,
        opened: Sequence[PickledFile],
        tensors: Mapping[str, LazyTensor],
        index_metadata: Mapping[str, Value],
        notes: Sequence[Note] = (),
    ) -> None:
        """Take the opened files, in order, and their joined tensors.

        `index_metadata` is the metadata of the index file, `notes` are those on the set of files.
        """
        self.path = path
        self.shards = tuple(opened)
        self.files = tuple(each.file.path for each in opened)
        self.version = "+".join(dict.fromkeys(each.contents.form for each in opened))
        self.tensors = tensors
        self.index_metadata = index_metadata
        merged: dict[str, Value] = {}
        for one in opened:
            merged = {**one.metadata, **merged}
        self.metadata: Mapping[str, Value] = merged
        self.notes: Sequence[Note] = [
            *notes,
            *(note for one in opened for note in one.parsed.notes),
        ]

    def footer_matches(self) -> bool | None:
        """Return whether the CRC-32 of every record is right; None where a file has none."""
        found = [one.footer_matches() for one in self.shards]
        return False if False in found else None if None in found else True

    @property
    def imports(self) -> tuple[str, ...]:
        """The names that loading the files would import, each once."""
        return tuple(dict.fromkeys(name for one in self.shards for name in one.imports))

    def close(self) -> None:
        """Unmap all files."""
        for one in self.shards:
            one.file.close()

    def __enter__(self) -> "PytorchSource":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_source(path: Path, *, partial: bool = False) -> PytorchSource:
    """Return the open model of one torch.save file, or of all files of an index.

    `partial` allows files of an index that are missing; a file itself has to be whole. Raises
    FormatError, UnsupportedError for a shard of torch.distributed.checkpoint.
    """
    path = parse_location(path)
    if path.suffix == ".distcp":  # an archive for each tensor, one after another, without names
        raise UnsupportedError(f"{path}: {DISTRIBUTED_SHARD}")
    file = open_bytes(path)
    try:
        if not is_index(bytes(file.view[:4096])):
            return _open_file(file)
    except BaseException:
        file.close()
        raise
    file.close()
    return open_index(path, partial=partial)


def open_buffer(buffer: Buffer, path: Path) -> PytorchSource:
    """Return the open model of a torch.save file's bytes in memory; `path` begins the messages.

    Raises FormatError.
    """
    return _open_file(BufferFile(buffer, path))


def _open_file(file: ByteSource) -> PytorchSource:
    """Return the open model of one torch.save file. Raises FormatError."""
    try:
        opened = PickledFile(file)
    except RecursionError:
        raise FormatError(f"{file.path}: its values nest too deep; it is damaged") from None
    return PytorchSource(file.path, [opened], opened.tensors, {})


def open_index(path: Path, *, partial: bool = False) -> PytorchSource:
    """Return the open model of every file that a `*.bin.index.json` names; they must agree.

    With `partial`, missing files are noted. FormatError if a file lacks a tensor of the index.
    """
    from aprfmt.formats.shard_index import existing_files, open_files, read_index
    from aprfmt.formats.shard_set import join_tensors

    path = parse_location(path)
    index = read_index(path)
    homes, notes = index.homes, list[Note]()
    single = path.with_name(path.name.removesuffix(".index.json"))
    if single.is_file() and not any(home.exists() for home in homes.values()):
        raise FormatError(
            f"{path}: the index is stale: none of the {len(homes)} files it names is there, while "
            f"{single.name} is, which transformers loads; name that file, or take the index away"
        )
    if partial:
        homes, notes = existing_files(path, homes, "files")
    with open_files(path, homes, PickledFile) as opened:
        tensors = join_tensors([(one.file.path, one.tensors) for one in opened.values()], str(path))
        # The index and the files have to agree on every tensor.
        for name, home in index.weight_map.items():
            if home in opened and name not in opened[home].tensors:
                raise FormatError(
                    f"{path}: tensor {shorten(name, 100)!r} is said to be in {home}, which does "
                    "not hold it; get the files of one model again"
                )
        loose = [name for name in tensors if name not in index.weight_map]
        if loose:
            text = (
                f"the index does not name {len(loose)} tensors of its files: {first_names(loose)}"
            )
            notes.append(Note("warning", str(path), text, "index"))
        return PytorchSource(path, list(opened.values()), tensors, index.metadata, notes)


def check_record_checksums(source: Source, known: Mapping[Path, int]) -> bool | None:
    """Return whether every record of the archives has the CRC-32 that its directory gives.

    None where a file has no CRC-32 (see `PickledFile.footer_matches`), and for tensors that were
    joined from the files of several ranks. `known` is not used: it is for formats with a checksum
    of the whole file.
    """
    return source.footer_matches() if isinstance(source, PytorchSource) else None


def refuse_writing(path: Path, **options: object) -> None:
    """Raise UnsupportedError: this format is only read. `options` are those of every sink."""
    raise UnsupportedError(
        f"{path}: files of torch.save are read here, not written, as others have to run code to "
        "load them; write .safetensors: torch loads it with safetensors.torch.load_file"
    )
