"""Where the bytes of a PyTorch file's storages are, in each of its three forms, and its pickle.

Sources: torch/serialization.py: `_save` and `_load` (zip), `_legacy_save` and `_legacy_load`
(the form with a magic number, and the oldest in a tar archive).
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.base.protocols import ByteSource
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from aprfmt.formats.cursor import MAX_COUNT
from aprfmt.formats.pytorch.layout import MAGIC, is_tar, is_zip
from aprfmt.formats.pytorch.pickle_calls import describe_call
from aprfmt.formats.pytorch.pickle_imports import Imports
from aprfmt.formats.pytorch.pickle_reader import Stream, Unpickler, describe_value
from aprfmt.formats.pytorch.pickle_values import (
    DTYPES,
    STORAGES,
    GlobalName,
    PickledDict,
    Storage,
    TensorValue,
)
from aprfmt.formats.pytorch.zip_archive import ZipRecord, read_directory, script_text

MAX_PICKLE = 256 << 20
_PROTOCOL = 1001  # the number after the magic number
_BLOCK = 512  # of tar
# Records that torch.save writes next to those of storages, below the archive's name.
_RECORDS = frozenset(
    (
        "data.pkl", "byteorder", "version", ".format_version", ".storage_alignment",
        ".data/serialization_id",
    )
)  # fmt: skip
_MEMBERS = frozenset(("pickle", "tensors", "storages", "sys_info"))  # of a tar archive


@dataclass(slots=True)
class PickleContents:
    """The described value of a file, and the bytes [start, stop) of every storage by key.

    `unread` are records of the file that loading does not read, by a name for each.
    """

    form: str
    value: Any
    places: dict[str, tuple[int, int]]
    imports: Imports
    swapped: bool = False  # big-endian
    records: Mapping[str, ZipRecord] = field(default_factory=dict)
    size: int = 0  # of the file
    unread: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def regions(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the file's records in order, each with its local header.

        A local header is padded to align its record, so each range ends where the next header
        begins. After the last record is the directory. The older forms have no gaps: one range.
        """
        if not self.records:
            return [(0, self.size)]
        rows = sorted(self.records.values(), key=lambda row: row.header)
        stops = [row.header for row in rows[1:]] + [self.size]
        return [(row.header, stop) for row, stop in zip(rows, stops, strict=True)]


def read_contents(file: ByteSource, where: str) -> PickleContents:
    """Return everything of a file but the storages' bytes. Raises FormatError."""
    head = bytes(file.view[: min(4096, file.size)])
    if is_zip(head):
        return _read_zip(file, where)
    return _read_tar(file, where) if is_tar(head) else _read_legacy(file, where)


class Resolver:
    """Describes storages by the persistent ids of a pickle, and collects them by key."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}

    def __call__(self, given: Any) -> Any:
        """Return the Storage of ('storage', class, key, device, elements[, view]).

        ValueError for any other persistent id, or a key that was declared with another size. A
        ('module', class, ...) gives the class.
        """
        if not isinstance(given, tuple) or not given or not isinstance(given[0], str):
            raise ValueError(
                f"has a persistent id that is {describe_value(given)}, no tuple of a kind"
            )
        if given[0] == "module" and len(given) == 4:
            return given[1]  # a class, and its source, which says nothing of tensors
        if given[0] != "storage" or len(given) not in (5, 6):
            raise ValueError(
                f"has a persistent id of kind {shorten(given[0], 40)!r} with {len(given)} values; "
                "expected 'storage' with five or six"
            )
        kind, key, count = given[1], given[2], given[4]
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        if not isinstance(key, str) or type(count) is not int or not 0 <= count < 1 << 62:
            raise ValueError(
                f"has a storage of key {describe_value(key)} with {describe_value(count)}"
            )
        dtype = storage_dtype(kind)
        size = DTYPES[dtype][1]
        known = self.storages.get(key)
        if known is not None and known.nbytes != count * size:
            raise ValueError(
                f"declares storage {shorten(key, 40)!r} with {count * size} bytes, and before with "
                f"{known.nbytes}"
            )
        self.storages.setdefault(key, Storage(key, dtype, count * size))
        view = given[5] if len(given) == 6 else None
        if view is None:
            return Storage(key, dtype, count * size)
        if (
            not isinstance(view, tuple)
            or len(view) != 3
            or any(type(each) is not int or each < 0 for each in view[1:])
        ):
            raise ValueError(f"has a view of a storage that is {describe_value(view)}")
        if (view[1] + view[2]) > count:
            raise ValueError(f"has a view {view[1]}..{view[1] + view[2]} of {count} elements")
        return Storage(key, dtype, view[2] * size, view[1] * size)


def storage_dtype(kind: Any) -> str:
    """Return the dtype name of a storage class; ValueError for any other name."""
    if (
        isinstance(kind, GlobalName)
        and kind.name in STORAGES
        and (kind.module in ("torch", "torch.storage", "torch.cuda"))
    ):
        return STORAGES[kind.name]
    raise ValueError(f"has a storage of class {describe_value(kind)}, which is not read here")


def _read_zip(file: ByteSource, where: str) -> PickleContents:
    """Return the contents of a zip file, the form that torch.save writes today.

    Raises FormatError where records are missing or impossible, TruncatedError for a storage that is
    cut, UnsupportedError for a TorchScript program.
    """
    records = read_directory(file, where)
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise FormatError(
            f"{where}: has {len(pickles)} records NAME/data.pkl; expected the one of torch.save"
        )
    root = pickles[0].removesuffix("data.pkl")
    if root + "constants.pkl" in records:
        raise UnsupportedError(script_text(where))
    record = records[pickles[0]]
    if record.size > MAX_PICKLE:
        raise FormatError(
            f"{where}: {pickles[0]} has {record.size} bytes; at most {MAX_PICKLE} are read"
        )
    # The pickle declares the storages; each has a separate record.
    imports = Imports()
    resolver = Resolver()
    stream = Stream(file.view, record.start, record.start + record.size, f"{where}: {pickles[0]}")
    value = Unpickler(stream, describe_call, resolver, imports).load()
    unread = {
        f"record {shorten(name, 100)!r}": (row.start, row.start + row.size)
        for name, row in records.items()
        if name.removeprefix(root) not in _RECORDS
        and name.removeprefix(root + "data/") not in resolver.storages
    }
    if stream.at < stream.end:
        unread[f"what follows the pickle in {pickles[0]}"] = (stream.at, stream.end)
    places = {}
    for key, storage in resolver.storages.items():
        held = records.get(f"{root}data/{key}")
        if held is None:
            raise FormatError(
                f"{where}: has no record of storage {shorten(key, 40)!r}; get it again"
            )
        if held.size < storage.nbytes:
            raise TruncatedError(
                f"{where}: storage {shorten(key, 40)!r} needs {storage.nbytes} bytes, its record "
                f"has {held.size}; the file is damaged"
            )
        places[key] = (held.start, held.start + storage.nbytes)
    # Files of old versions have no record of the byte order: they are little-endian.
    order = records.get(root + "byteorder")
    said = b"little"
    if order is not None:
        said = bytes(file.view[order.start : order.start + min(order.size, 16)])
    if said not in (b"little", b"big"):
        raise FormatError(f"{where}: its byte order is {said!r}; expected little or big")
    return PickleContents("zip", value, places, imports, said == b"big", records, file.size, unread)


def _read_legacy(file: ByteSource, where: str) -> PickleContents:
    """Return the contents of a file with a magic number, the form before zip files.

    Raises FormatError where the magic number is another or the storages do not fit the pickle,
    TruncatedError for a file that is cut.
    """
    imports = Imports()
    resolver = Resolver()
    stream = Stream(file.view, 0, file.size, where)

    def load() -> Any:
        """Return what the next pickle of the file describes; nothing in it is executed."""
        return Unpickler(stream, describe_call, resolver, imports).load()

    # Five pickles follow each other: three of the header, the value, the storages' keys.
    magic, protocol, system = load(), load(), load()
    if magic != MAGIC or protocol != _PROTOCOL:
        raise FormatError(f"{where}: its magic number or protocol is another; it is damaged")
    swapped = isinstance(system, PickledDict) and system.get("little_endian") is False
    value, keys = load(), load()
    if not isinstance(keys, list) or len(keys) > MAX_COUNT:
        raise FormatError(f"{where}: its list of storages is {describe_value(keys)}; it is damaged")
    # Then the bytes of each storage, in the order of the keys.
    places: dict[str, tuple[int, int]] = {}
    at = stream.at
    for key in keys:
        storage = resolver.storages.get(str(key)) if isinstance(key, str | int) else None
        if storage is None or storage.key in places:
            raise FormatError(
                f"{where}: its list of storages has {describe_value(key)} that no tensor has, or "
                "twice"
            )
        at = _locate_storage(file, at, storage, places, where)
    for key in resolver.storages:
        if key not in places:
            raise FormatError(f"{where}: holds no bytes of storage {shorten(key, 40)!r}")
    unread = {"what follows the last storage": (at, file.size)} if at < file.size else {}
    return PickleContents("legacy", value, places, imports, swapped, size=file.size, unread=unread)


def _locate_storage(
    file: ByteSource, at: int, storage: Storage, places: dict[str, tuple[int, int]], where: str
) -> int:
    """Add (start, stop) of a storage whose count of elements is at offset `at`; return its end.

    Raises TruncatedError where the file ends before that, FormatError where the count contradicts
    the pickle.
    """
    shown = shorten(storage.key, 40)
    if at + 8 > file.size:
        raise TruncatedError(f"{where}: ends before storage {shown!r}; get it again")
    count = int.from_bytes(file.view[at : at + 8], "little")
    if count * DTYPES[storage.dtype][1] != storage.nbytes:
        raise FormatError(
            f"{where}: storage {shown!r} at byte {at} has {count} elements, its pickle says "
            f"{storage.nbytes} bytes of {storage.dtype}; the file is damaged"
        )
    stop = at + 8 + storage.nbytes
    if stop > file.size:
        raise TruncatedError(
            f"{where}: storage {shown!r} needs bytes {at + 8}..{stop}, the file has {file.size}; "
            "get it again"
        )
    places[storage.key] = (at + 8, stop)
    return stop


# --- the oldest form: a tar archive --------------------------------------------------------------


def _read_tar_members(file: ByteSource, where: str) -> dict[str, tuple[int, int]]:
    """Return {name: (start, stop)} of the files in a tar archive.

    Raises FormatError for a damaged header, a name that appears twice and too many files,
    TruncatedError for an archive that is cut.
    """
    found: dict[str, tuple[int, int]] = {}
    at = 0
    while at + _BLOCK <= file.size:
        head = bytes(file.view[at : at + _BLOCK])
        if not any(head):
            break
        name = head[:100].split(b"\0")[0].decode("utf-8", "replace").removeprefix("./")
        size = _tar_size(head[124:136])
        if size is None or head[257:262] != b"ustar":
            raise FormatError(f"{where}: no tar header at byte {at}; the file is damaged")
        if at + _BLOCK + size > file.size:
            raise TruncatedError(f"{where}: ends inside {shorten(name, 40)!r}; get it again")
        # Only regular files count; folders and links have no bytes.
        if head[156:157] in (b"0", b"\0"):
            if name in found:
                raise FormatError(f"{where}: has {shorten(name, 40)!r} twice; it is damaged")
            found[name] = (at + _BLOCK, at + _BLOCK + size)
        at += _BLOCK + -(-size // _BLOCK) * _BLOCK
        if len(found) > MAX_COUNT:
            raise FormatError(f"{where}: has more than {MAX_COUNT} members")
    return found


def _tar_size(text: bytes) -> int | None:
    """Return a tar header's size, in octal or GNU's binary form; None if it is neither."""
    if text[:1] == b"\x80":
        return int.from_bytes(text[1:], "big")
    plain = text.strip(b" \0")
    return int(plain, 8) if plain and all(48 <= byte < 56 for byte in plain) else None


class _TarReader:
    """Reads the members of the oldest form, a tar archive, one after another."""

    def __init__(self, file: ByteSource, where: str) -> None:
        """Read the archive's list of members; the other attributes are filled by `read_...`."""
        self.file, self.where = file, where
        self.members = _read_tar_members(file, where)
        self.imports = Imports()
        self.tensors: dict[str, Any] = {}
        self.storages: dict[str, Storage] = {}
        self.places: dict[str, tuple[int, int]] = {}

    def stream(self, name: str) -> Stream:
        """Return a stream of one member's bytes; FormatError if the archive has no such member."""
        if name not in self.members:
            raise FormatError(f"{self.where}: has no member {name!r}; expected one of torch.save")
        start, stop = self.members[name]
        return Stream(self.file.view, start, stop, f"{self.where}: {name}")

    def load(self, stream: Stream) -> Any:
        """Return the description of the next pickle of a member."""
        return Unpickler(stream, describe_call, self._resolve, self.imports).load()

    def _resolve(self, given: Any) -> Any:
        """Return the tensor or storage of a persistent id; ValueError for an unknown one."""
        if isinstance(given, tuple) and len(given) == 4 and given[0] == "module":
            return given[1]
        key = str(given) if isinstance(given, str | int) else None
        if key in self.tensors:
            return self.tensors[key]
        if key in self.storages:
            return self.storages[key]
        raise ValueError(
            f"has a persistent id ({describe_value(given)}) that the file does not hold"
        )

    def count(self, stream: Stream) -> int:
        """Return the next pickle of a member, which must be a count.

        Raises FormatError for anything else.
        """
        found = self.load(stream)
        if type(found) is not int or not 0 <= found <= MAX_COUNT:
            raise FormatError(
                f"{stream.where}: its count is {describe_value(found)}; it is damaged"
            )
        return found

    def read_storages(self) -> None:
        """Read the storages' sizes and offsets, and the views of them, into this object.

        Each storage is a pickled (key, device, class), the number of elements, and the elements.
        Raises FormatError for a storage or view that is damaged, UnsupportedError for a class of
        storage that is not known, TruncatedError for bytes that are missing.
        """
        stream = self.stream("storages")
        for _ in range(self.count(stream)):
            row = self.load(stream)
            if not isinstance(row, tuple) or len(row) != 3 or not isinstance(row[0], str | int):
                raise FormatError(
                    f"{stream.where}: a storage is {describe_value(row)}; it is damaged"
                )
            try:
                dtype = storage_dtype(row[2])
            except ValueError as error:
                raise UnsupportedError(f"{stream.where}: {error}") from None
            key, count = str(row[0]), stream.uint(8, "a storage's count")
            nbytes = count * DTYPES[dtype][1]
            start = stream.at
            if nbytes > stream.end - start:
                raise TruncatedError(
                    f"{stream.where}: storage {shorten(key, 40)!r} needs {nbytes} bytes, "
                    f"{stream.end - start} remain; get the file again"
                )
            stream.at = start + nbytes
            self.places[key] = (start, start + nbytes)
            self.storages[key] = Storage(key, dtype, nbytes)
        # After the storages there may be views, which share their bytes.
        views = self.load(stream) if stream.at < stream.end else []
        for row in views if isinstance(views, list) else [views]:
            whole = self.storages.get(str(row[1])) if _is_view(row) else None
            if whole is None:
                raise FormatError(f"{stream.where}: a view is {describe_value(row)}; it is damaged")
            size = DTYPES[whole.dtype][1]
            if (row[2] + row[3]) * size > whole.nbytes:
                raise FormatError(f"{stream.where}: a view reaches past its storage")
            view = Storage(whole.key, whole.dtype, row[3] * size, whole.start + row[2] * size)
            self.storages[str(row[0])] = view

    def read_tensors(self) -> None:
        """Read the descriptions of the tensors into this object.

        Each is a pickled (key, storage, class), then dimensions, sizes, strides and offset as
        numbers. Raises FormatError for a description of another form.
        """
        stream = self.stream("tensors")
        for _ in range(self.count(stream)):
            row = self.load(stream)
            if not isinstance(row, tuple) or len(row) != 3 or not isinstance(row[0], str | int):
                raise FormatError(
                    f"{stream.where}: a tensor is {describe_value(row)}; it is damaged"
                )
            dims = stream.uint(4, "the number of dimensions")
            stream.take(4, "a number that is not used")
            numbers = struct.unpack(f"<{2 * dims + 1}q", stream.take(16 * dims + 8, "its sizes"))
            storage = self.storages.get(str(row[1])) if isinstance(row[1], str | int) else None
            made = describe_call(
                GlobalName("torch._utils", "_rebuild_tensor"),
                (storage, numbers[-1], numbers[:dims], numbers[dims:-1]),
            )
            assert isinstance(made, TensorValue)
            self.tensors[str(row[0])] = made


def _is_view(row: Any) -> bool:
    """Return whether a value is the view of a storage: (key, storage's key, offset, elements)."""
    return (
        isinstance(row, tuple)
        and len(row) == 4
        and all(isinstance(each, str | int) for each in row[:2])
        and all(type(each) is int and each >= 0 for each in row[2:])
    )


def _read_tar(file: ByteSource, where: str) -> PickleContents:
    """Return the contents of a tar archive, the oldest form.

    Raises FormatError for a damaged archive, UnsupportedError for one of a big-endian machine.
    """
    tar = _TarReader(file, where)
    system = tar.load(tar.stream("sys_info"))
    swapped = isinstance(system, PickledDict) and system.get("little_endian") is False
    if swapped:
        raise UnsupportedError(f"{where}: a big-endian file of before 2017; save it again")
    try:
        tar.read_storages()
        tar.read_tensors()
        value = tar.load(tar.stream("pickle"))
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: {error}; the file is damaged") from None
    unread = {
        f"member {shorten(name, 100)!r}": place
        for name, place in tar.members.items()
        if name not in _MEMBERS
    }
    return PickleContents("tar", value, tar.places, tar.imports, size=file.size, unread=unread)
