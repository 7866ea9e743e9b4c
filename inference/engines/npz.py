"""`.npz` files of module outputs: keys are transformers module paths, arrays are read one by one.

The file is untrusted: sizes are checked before anything is allocated, pickles are refused, and a
member is decompressed in windows up to the size in its own array header.
"""

import ast
import math
import os
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.text_escape import shorten
from aprfmt.errors import AprfmtError, FormatError, TruncatedError, UnsupportedError
from aprfmt.formats.mapped_file import open_regular
from aprfmt.formats.pytorch.zip_archive import CUT, is_cut_archive
from aprfmt.inference.engines.modules import ModuleReader, points_named
from aprfmt.inference.engines.record_collector import Collector
from aprfmt.inference.trace import Positions, Trace
from aprfmt.inference.trace_file import Spool
from aprfmt.inference.weights import model_weights
from aprfmt.measure.distances import exact_16_bit_type
from aprfmt.model import Model

Numbers = NDArray[Any]
IDS, ORDER = "input_ids", "__order__"
MAX_MEMBERS = 1 << 16
MAX_HEADER = 64 << 10
MAX_MEMBER = 8 << 30  # bytes of one array
MAX_TOTAL = 64 << 30  # bytes of all arrays
# Activations do not compress a hundredfold; zeros, and decompression bombs, do.
MAX_RATIO, SMALL = 100, 64 << 20
_WINDOW = 1 << 20


def _short_text(found: object) -> str:
    """Return a text from the file, shortened and escaped for a message."""
    return shorten(str(found), 200)


class NpzFile:
    """An open .npz: `arrays` maps keys to (shape, dtype); `read` gives one array.

    `file` are its bytes, if they are in memory already.
    """

    def __init__(self, path: Path, stack: ExitStack, file: BinaryIO | None = None) -> None:
        """Open the archive and read every array's header; sizes are checked first.

        Raises FormatError for a file that is no .npz or declares too much, TruncatedError for one
        that is cut, UnsupportedError for a zip that Python cannot read.
        """
        self.path = path
        if file is None:
            file = stack.enter_context(os.fdopen(open_regular(path), "rb"))
        try:
            self._zip = stack.enter_context(zipfile.ZipFile(file))
            members = self._zip.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, EOFError) as error:
            if is_cut_archive(path):
                raise TruncatedError(f"{path}: {CUT}") from error
            raise FormatError(f"{path}: is not an .npz file: {_short_text(error)}") from error
        except NotImplementedError as error:
            raise UnsupportedError(f"{path}: {_short_text(error)}") from error
        if len(members) > MAX_MEMBERS:
            raise FormatError(f"{path}: {len(members)} members; at most {MAX_MEMBERS} are read")
        self._members: dict[str, zipfile.ZipInfo] = {}
        self.arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self.left: dict[str, str] = {}  # arrays that hold no numbers, and what they hold
        self._fortran: dict[str, bool] = {}
        total = 0
        # Check what a member declares before its header is read.
        for member in members:
            key = self._member_key(member)
            total += member.file_size
            if total > MAX_TOTAL:
                raise FormatError(f"{path}: declares over {MAX_TOTAL} bytes of arrays")
            self._members[key] = member
            with self._open_member(member) as file:
                where = f"{path}: {_short_text(key)!r}"
                try:
                    found = read_header(file, where, member.file_size)
                except UnsupportedError as error:
                    self.left[key] = str(error).removeprefix(f"{where}: ")
                    continue
                self.arrays[key], self._fortran[key] = found
        if self.left and self.arrays.keys() <= {IDS, ORDER}:
            key, why = next(iter(self.left.items()))
            raise UnsupportedError(f"{path}: {_short_text(key)!r}: {why}")

    def _member_key(self, member: zipfile.ZipInfo) -> str:
        """Return the name of the array that a file in the .npz contains.

        FormatError if it is no array or too large, UnsupportedError if it is encrypted.
        """
        name = member.filename
        if not name.endswith(".npy"):
            raise FormatError(
                f"{self.path}: member {_short_text(name)!r} is not an array; expected NAME.npy"
            )
        key = name.removesuffix(".npy")
        if key in self._members:
            raise FormatError(f"{self.path}: {_short_text(key)!r} appears twice")
        if member.flag_bits & 1:
            raise UnsupportedError(f"{self.path}: {_short_text(key)!r} is encrypted")
        packed = max(member.compress_size, 1)
        if member.file_size > MAX_MEMBER or (
            member.file_size > SMALL and member.file_size / packed > MAX_RATIO
        ):
            raise FormatError(
                f"{self.path}: {_short_text(key)!r} declares {member.file_size} bytes in {packed}; "
                f"expected at most {MAX_MEMBER}, and activations that compress at most "
                f"1:{MAX_RATIO}"
            )
        return key

    @contextmanager
    def _open_member(self, member: zipfile.ZipInfo) -> Iterator[Any]:
        """Yield an array's file in the .npz, open for reading.

        Errors of zipfile become FormatError or UnsupportedError.
        """
        where = f"{self.path}: {_short_text(member.filename)!r}"
        try:
            with self._zip.open(member) as file:
                yield file
        except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError) as error:
            raise FormatError(f"{where}: {_short_text(error)}") from error
        except (NotImplementedError, RuntimeError) as error:
            raise UnsupportedError(f"{where}: {_short_text(error)}") from error
        except (OSError, ValueError, struct.error) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{where}: {_short_text(error)}") from error
        except Exception as error:  # zlib.error or lzma.LZMAError, if the module exists
            if type(error).__module__ not in ("zlib", "lzma", "_lzma", "bz2"):
                raise
            raise FormatError(f"{where}: {_short_text(error)}") from error

    def read(self, key: str) -> Numbers:
        """Return one array of the .npz by its key; FormatError if its data does not fit its header.

        TruncatedError if the data ends before.
        """
        shape, dtype = self.arrays[key]
        size = math.prod(shape) * dtype.itemsize
        member = self._members[key]
        data = bytearray()
        with self._open_member(member) as file:
            file.read(member.file_size - size)
            while len(data) < size:
                window = file.read(min(_WINDOW, size - len(data)))
                if not window:
                    raise TruncatedError(
                        f"{self.path}: {_short_text(key)!r} ends after {len(data)} of {size} bytes"
                    )
                data += window
            file.read(1)  # reading past the end checks the CRC
        if dtype.kind == "U" and size:
            codes = np.frombuffer(data, np.dtype("u4").newbyteorder(dtype.byteorder))
            if codes.max() > sys.maxunicode:
                raise FormatError(
                    f"{self.path}: {_short_text(key)!r} holds text that is no Unicode"
                )
        flat = np.frombuffer(data, dtype)
        order: Any = "F" if self._fortran[key] else "C"
        return flat.reshape(shape, order=order).astype(dtype.newbyteorder("="), copy=False)


def read_header(
    file: Any, where: str, size: int
) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], bool]:
    """Return ((shape, dtype), whether the order is Fortran's) of an .npy array.

    `size` are the array's bytes. Afterwards `file` is positioned after the header. The header is
    not evaluated as Python, and its sizes must fit the bytes that follow. Raises FormatError for a
    header that is no literal of that kind, TruncatedError for one that is cut, UnsupportedError for
    a dtype that is not numbers.
    """
    # The fixed part: magic, version and length.
    magic = file.read(8)
    if len(magic) < 8 or magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise FormatError(f"{where}: begins with {magic.hex(' ')}; expected an .npy array")
    size_format = "<H" if magic[6] == 1 else "<I"
    raw = file.read(struct.calcsize(size_format))
    if len(raw) < struct.calcsize(size_format):
        raise TruncatedError(f"{where}: ends inside its header")
    (length,) = struct.unpack(size_format, raw)
    if length > MAX_HEADER:
        raise FormatError(f"{where}: a header of {length} bytes; at most {MAX_HEADER} are read")
    # The dictionary of the header, parsed as a literal.
    text = file.read(length)
    if len(text) < length:
        raise TruncatedError(f"{where}: ends inside its header")
    try:
        found = ast.literal_eval(text.decode("utf-8" if magic[6] == 3 else "latin1").strip())
        shape, descr, fortran = found["shape"], found["descr"], found["fortran_order"]
        dtype = np.dtype(descr) if isinstance(descr, str) else None
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(f"{where}: its header is not readable: {_short_text(error)}") from None
    # Shape, dtype and size must be plausible before anything is allocated.
    if (
        not isinstance(shape, tuple)
        or len(shape) > 8
        or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
        or type(fortran) is not bool
    ):
        raise FormatError(f"{where}: shape {_short_text(shape)}; expected up to 8 sizes")
    if dtype is None or dtype.kind not in "fiubU" or not dtype.itemsize:
        raise UnsupportedError(
            f"{where}: holds {_short_text(descr)!r}; expected numbers (pickled objects are "
            f"not read)"
        )
    body = size - (8 + len(raw) + length)
    if math.prod(shape) * dtype.itemsize != body:
        raise FormatError(
            f"{where}: shape {list(shape)} of {dtype} takes {math.prod(shape) * dtype.itemsize}"
            f" bytes; {body} follow the header"
        )
    return (shape, dtype), fortran


@contextmanager
def load_npz(
    path: Path,
    ids: Sequence[int] | None = None,
    model: Model | None = None,
    *,
    positions: Positions = "all",
    wanted: Collection[str] | None = None,
    file: BinaryIO | None = None,
) -> Iterator[Trace]:
    """Yield the trace of an .npz of module outputs; `file` is its open file, if there is one.

    `ids` are the run's token ids if the file has no `input_ids`. Raises FormatError for a damaged
    or hostile file, UnsupportedError for arrays that do not hold numbers.
    """
    with ExitStack() as stack:
        # Find token ids, the order of the arrays and their arithmetic.
        opened = NpzFile(path, stack, file)
        found = _token_ids(opened)
        given = None if ids is None else [int(i) for i in ids]
        tokens = found if found is not None else given
        keys = [key for key in opened.arrays if key not in (IDS, ORDER)]
        order, missing = _execution_order(opened, keys)
        kinds = {key: opened.arrays[key][1].name for key in keys}
        collector = Collector(
            stack.enter_context(Spool()),
            model,
            tokens=None if tokens is None else len(tokens),
            dtype=arithmetic_of_arrays(kinds, opened.read),
            positions=positions,
            wanted=wanted,
        )
        reader = ModuleReader(
            collector,
            keys,
            block=None if model is None else model.spec.block,
            architecture="" if model is None else model.spec.name,
            tokens=None if tokens is None else len(tokens),
            scaled_embedding=is_embedding_scaled(keys, opened.read, model, tokens),
        )
        # Read the arrays one by one.
        valueless = dict(opened.left)
        for key in order:
            shape, dtype = opened.arrays[key]
            if dtype.kind == "U":
                valueless[key] = "holds text"
            elif 0 in shape:
                valueless[key] = f"holds no value: its shape is {list(shape)}"
            else:
                collector.giver = key
                reader.add(key, opened.read(key))
        collector.unknown |= valueless
        collector.lost |= set(filter(points_named, valueless))
        collector.note_unlike_seconds(
            lambda key, into: reader.for_collector(into).add(key, opened.read(key))
        )
        for key in missing:
            collector.unknown[key] = f"named in {ORDER}, but not in the file"
        run = {
            "format": "npz", "path": str(path), "ids": tokens, "order": order,
            "ids_given": found is None and given is not None,
            "backend": {"backend": "npz", "of": "transformers module outputs"},
        }  # fmt: skip
        unread = partial(_unread_values, opened, collector.unknown)
        yield collector.trace(run, fetch_unread=unread)


def _unread_values(file: NpzFile, unknown: Collection[str], name: str) -> Numbers | None:
    """Return the numbers of an array that is among those without a capture point, `unknown`.

    None where the file has no such numbers, or they cannot be read.
    """
    if name not in unknown or name not in file.arrays or file.arrays[name][1].kind not in "iufb":
        return None
    try:
        return file.read(name)
    except AprfmtError:
        return None


def _token_ids(file: NpzFile) -> list[int] | None:
    """Return the token ids in a file; None without them. FormatError for a batch."""
    if IDS not in file.arrays:
        return None
    shape, dtype = file.arrays[IDS]
    if dtype.kind not in "iu" or math.prod(shape) != max(shape, default=0):
        raise FormatError(
            f"{file.path}: {IDS} is {dtype} {list(shape)}; expected the ids of one sequence"
        )
    return [int(i) for i in file.read(IDS).reshape(-1)]


def _execution_order(file: NpzFile, keys: list[str]) -> tuple[list[str], list[str]]:
    """Return (keys in execution order, keys in `__order__` that the file lacks).

    Keys that `__order__` does not name come last. Without it `keys` are returned as they are.
    Raises FormatError where `__order__` is not a list of names.
    """
    if ORDER not in file.arrays:
        return keys, []
    if file.arrays[ORDER][1].kind != "U":
        raise FormatError(f"{file.path}: {ORDER} is not a list of names")
    named = [str(name) for name in file.read(ORDER).reshape(-1)]
    known = set(keys)
    first = [name for name in dict.fromkeys(named) if name in known]
    chosen = set(first)
    missing = [n for n in dict.fromkeys(named) if n not in known and n not in (IDS, ORDER)]
    return first + [key for key in keys if key not in chosen], missing


def arithmetic_of_arrays(dtypes: Mapping[str, str], read: Callable[[str], Numbers]) -> str:
    """Return the dtype a run computed in, by the dtypes of its arrays.

    `dtypes` are by array name. A run of 16 bits often keeps logits and routers in float32, so the
    dtype of most arrays counts. numpy has no bfloat16, which may be stored as float32: up to four
    float32 arrays of norms are read to see whether all their values fit it.
    """
    kinds = Counter(name for name in dtypes.values() if "float" in name)
    for short in ("bfloat16", "float16"):
        if kinds[short] and ("float32" not in kinds or 2 * kinds[short] > kinds.total()):
            return short
    if set(kinds) == {"float64"}:
        return "float64"
    # numpy has no bfloat16, so such a run is stored as float32 with zeros in the low 16 bits.
    sample = [key for key, name in dtypes.items() if name == "float32" and "norm" in key][:4]
    arrays = [read(key) for key in sample]
    if arrays and all(
        array.size and exact_16_bit_type(array[np.isfinite(array)]) == "bfloat16"
        for array in arrays
    ):
        return "bfloat16"
    return "float32"


def is_embedding_scaled(
    names: Iterable[str],
    read: Callable[[str], Numbers],
    model: Model | None,
    ids: Sequence[int] | None,
) -> bool:
    """Return whether the embedding module's output is scaled (gemma), by comparing norms.

    True if the norm of its first rows is nearer to that of the model's scaled rows than to that of
    the unscaled ones. False without model, ids or such an array.
    """
    name = next((key for key in names if key.endswith("embed_tokens")), None)
    if name is None or model is None or float(model.hyper["embedding_scale"]) == 1 or not ids:
        return False

    table = model_weights(model)["token_embd.weight"]
    rows = np.concatenate([table.rows(i, i + 1) for i in ids[:8] if i < table.n_rows])
    values = read(name)
    found = values.reshape(-1, values.shape[-1])[: len(rows)]
    ratio = float(np.linalg.norm(found)) / max(float(np.linalg.norm(rows)), 1e-30)
    scale = float(model.hyper["embedding_scale"])
    return abs(math.log(max(ratio, 1e-30) / scale)) < abs(math.log(max(ratio, 1e-30)))
