"""Change a file's metadata in place: which bytes become others, or why a copy is needed."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.crc import crc32
from aprfmt.conversion import ConversionReport, arch_name, refuse_changed_source
from aprfmt.errors import ConversionError, FormatError, OutputError
from aprfmt.formats import FORMATS, open_source
from aprfmt.formats.atomic import NullFileSet
from aprfmt.formats.crc_combine import combine_crcs
from aprfmt.formats.in_place_patch import Patch, patch_file
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.formats.sequential import Checksum, FileProgram, SequentialSink, TensorSlot
from aprfmt.remote.paths import RemotePath

if TYPE_CHECKING:
    from aprfmt.base.protocols import ByteSource, TensorInfo
    from aprfmt.conversion.options import Options
    from aprfmt.conversion.outputs import Plan
    from aprfmt.model import Model

_COPY = "write a copy with -o"
_MAGIC = 6  # bytes that say format and version; of safetensors, how long the header is
_BLOCK = 4096  # bytes are compared, and written, in pieces of this size


def change_metadata(model: "Model", options: "Options") -> tuple[ConversionReport, int]:
    """Change metadata in an open model's only file; return (report, number of bytes written).

    Closes the model. Raises ConversionError where the tensors would have to move, OutputError where
    the file cannot be written.
    """
    from aprfmt.conversion.run import WrittenTensor, tensor_outcome

    path = _one_file(model)
    plan, program = _plan_file(model, options)
    identity, pieces = _file_patches(model, program)
    places = {name: _facts(tensor.info) for name, tensor in model.source.tensors.items()}
    report = ConversionReport(
        model.path,
        model.format,
        path,
        model.format,
        (path,),
        arch_name(model, options),
        tuple(tensor_outcome(output, WrittenTensor()) for output in plan.outputs),
        tuple(model.notes),
        None,
        None,
        {path: path.stat().st_size},
    )
    model.close()
    if pieces:
        patch_file(path, pieces, identity)
    _verify(path, places)
    return report, sum(len(data) for _, data in pieces)


def change_texts(
    model: "Model", texts: "Mapping[str, str]", options: "Options"
) -> tuple[ConversionReport, int]:
    """Change text files next to an open model's weights; return (report, number of bytes written).

    `texts` is {file name: new content}. Closes the model; the weights are not touched. Raises
    OutputError where a file cannot be written.
    """
    from aprfmt.conversion.folder_edits import write_in_place
    from aprfmt.conversion.plan import build_plan
    from aprfmt.conversion.run import WrittenTensor, tensor_outcome

    assert model.folder is not None
    folder = model.folder.path
    plan = build_plan(model, FORMATS[model.format], options)
    paths = tuple(folder / name for name in texts)
    sizes = {folder / name: len(text.encode()) for name, text in texts.items()}
    report = ConversionReport(
        model.path,
        model.format,
        folder,
        model.format,
        paths,
        arch_name(model, options),
        tuple(tensor_outcome(output, WrittenTensor()) for output in plan.outputs),
        tuple(model.notes),
        None,
        None,
        sizes,
    )
    model.close()
    return report, write_in_place(folder, texts)


def _file_patches(model: "Model", program: FileProgram) -> tuple[str, list[Patch]]:
    """Return (identity of the file, patches that turn its bytes into the planned ones).

    The identity lets the writer refuse a file that was changed since. Raises FormatError where it
    was changed since it was opened.
    """
    file = open_bytes(_one_file(model))
    try:
        refuse_changed_source(model)
        start = min(
            (t.info.offset for t in model.source.tensors.values() if t.info.nbytes),
            default=file.size,
        )
        head = _fit_header(program.head, start, model)
        pieces = list(_differing_blocks(file, 0, head))
        for offset, data in _tail_pieces(program, head, model, file):
            pieces += _differing_blocks(file, offset, data)
        return file.identity, pieces
    finally:
        file.close()


def _one_file(model: "Model") -> Path:
    """Return the file to change; OutputError for one that cannot be changed in place."""
    path = model.source.files[0]
    if isinstance(path, RemotePath):
        raise OutputError(f"{path}: is an address; files are changed on this machine: {_COPY}")
    if len(model.source.files) > 1:
        raise OutputError(
            f"{model.path}: is a set of {len(model.source.files)} files; one file is changed in "
            f"place: {_COPY}"
        )
    if path.is_symlink():
        raise OutputError(
            f"{path}: is a link, and what it leads to may belong to others (a hub cache?); name "
            f"that file, or {_COPY}"
        )
    if os.stat(path).st_nlink > 1:
        raise OutputError(
            f"{path}: has {os.stat(path).st_nlink} names (hard links), which would all change; "
            f"{_COPY}"
        )
    return path


def _plan_file(model: "Model", options: "Options") -> tuple["Plan", FileProgram]:
    """Return (plan, the file as it would be written anew).

    Raises ConversionError for a format that is not written in sequence.
    """
    from aprfmt.conversion.metadata import target_metadata
    from aprfmt.conversion.plan import build_plan

    target = FORMATS[model.format]
    plan = build_plan(model, target, options)
    metadata = target_metadata(model, target.name, plan, options).metadata
    like: dict[str, Any] = {"like": model.source} if target.rewrites else {}
    sink = target.open_sink(model.source.files[0], files=NullFileSet(), **like)
    if not isinstance(sink, SequentialSink):
        raise ConversionError(
            f"{model.path}: files of {target.name} are not changed in place; {_COPY}"
        )
    places = {name: (t.info.offset, t.info.nbytes) for name, t in model.source.tensors.items()}
    infos = sorted((output.info for output in plan.outputs), key=lambda info: places[info.name])
    sink.plan(metadata, infos)
    (program,) = sink.programs
    return plan, program


def _fit_header(head: bytes, start: int, model: "Model") -> bytes:
    """Return the header `head` with exactly `start` bytes, padded if the format can.

    `start` is where the first tensor begins. Raises ConversionError where it does not fit.
    """
    if len(head) < start:
        head = FORMATS[model.format].fill(head, start)
    if len(head) != start:
        more = "more" if len(head) > start else "less"
        raise ConversionError(
            f"{model.path}: the new metadata takes {abs(len(head) - start)} bytes {more} than the "
            f"{start} before the tensors, which would have to move; {_COPY}"
        )
    return head


def _tail_pieces(
    program: FileProgram, head: bytes, model: "Model", file: "ByteSource"
) -> list[tuple[int, bytes]]:
    """Return [(offset, bytes)] of all that the planned file has after its header, except tensors.

    Raises ConversionError if a tensor would move, or the file was not laid out by this version.
    """
    found: list[tuple[int, bytes]] = []
    at = len(head)
    for part in program.body:
        if isinstance(part, TensorSlot):
            info = model.source.tensors[part.name].info
            if part.nbytes and (info.offset, info.nbytes) != (at, part.nbytes):
                raise ConversionError(
                    f"{model.path}: its tensors do not lie as this version writes them "
                    f"({part.name} at byte {info.offset}, expected {at}); {_COPY}"
                )
            at += part.nbytes
            continue
        data = _checksum(file, head, at) if isinstance(part, Checksum) else bytes(part)
        found.append((at, data))
        at += len(data)
    if at != file.size or bytes(file.view[:_MAGIC]) != head[:_MAGIC]:
        raise ConversionError(
            f"{model.path}: is not as this version writes it ({file.size} bytes, expected {at}; or "
            f"another version or byte order); {_COPY}"
        )
    return found


def _checksum(file: "ByteSource", head: bytes, at: int) -> bytes:
    """Return the CRC-32 of the file with the header `head`, without reading its tensors.

    It is computed from the stored checksum, whose offset is `at`. A checksum that was wrong stays
    wrong.
    """
    length = at - len(head)
    old = int.from_bytes(bytes(file.view[at : at + 4]), "little")
    before = crc32(file.view[: len(head)])
    rest = old ^ combine_crcs(before, 0, length)
    return combine_crcs(crc32(head), rest, length).to_bytes(4, "little")


def _differing_blocks(file: "ByteSource", offset: int, data: bytes) -> Iterator[Patch]:
    """Yield (offset, bytes) of the blocks of `data` that the file does not have at `offset`."""
    for start in range(0, len(data), _BLOCK):
        piece = data[start : start + _BLOCK]
        if bytes(file.view[offset + start : offset + start + len(piece)]) != piece:
            yield offset + start, piece


def _facts(info: "TensorInfo") -> tuple[object, ...]:
    """Return (shape, encoding, offset, size in bytes) of a TensorInfo, to be compared."""
    return info.shape, info.encoding, info.offset, info.nbytes


def _verify(path: Path, tensors: dict[str, tuple[object, ...]]) -> None:
    """Raise ConversionError unless the file opens and every tensor is where it was.

    `tensors` is {name: its facts before the change}.
    """
    try:
        with open_source(path) as source:
            found = {name: _facts(tensor.info) for name, tensor in source.tensors.items()}
    except FormatError as error:
        raise ConversionError(f"{path}: was changed, and does not open: {error}") from error
    if found != tensors:
        raise ConversionError(f"{path}: was changed, and its tensors lie elsewhere on reading")
