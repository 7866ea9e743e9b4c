"""Writes safetensors as the reference does: its tensor order, its spelling, its padding.

A model larger than the shard size becomes `STEM-00001-of-0000N.safetensors` and
`STEM.safetensors.index.json`, as the Hub names them. The same plan and bytes give the same files.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo, TypedValue, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import ConversionError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import dumps
from aprfmt.formats.cursor import MAX_HEADER
from aprfmt.formats.damage import tensor_label
from aprfmt.formats.safetensors import layout
from aprfmt.formats.safetensors.reader import SafetensorsSource
from aprfmt.formats.sequential import FileProgram, SequentialSink, TensorSlot, distribute_tensors
from aprfmt.formats.shard_index import index_bytes
from aprfmt.formats.unsupported_encodings import KEY, stored_info, unsupported_record

# transformers refuses files that do not name the framework of their tensors.
_FORMAT_KEY, _FORMAT = "format", "pt"
_CARRIES = "aprfmt"  # the framework of a file whose tensors are not all of the format's dtypes
_SHARD = re.compile(r"(?P<stem>.+)-[0-9]{5}-of-[0-9]{5}")


class SafetensorsSink(SequentialSink):
    """A safetensors model being written; see `aprfmt.base.protocols.Sink`.

    Tensors are planned in the order of `order`. Metadata are strings only, and get `format: pt`
    if they lack the key. ConversionError for what the format cannot store. With `carry`, tensors of
    encodings without a dtype are stored as bytes (unsupported_encodings.py); then `format` says so,
    and loaders that check it refuse the file. `like` is an open source whose header is kept if the
    plan is the same.
    """

    def __init__(
        self,
        path: Path,
        *,
        force: bool = False,
        files: FileSet | None = None,
        max_shard_size: int | None = None,
        like: SafetensorsSource | None = None,
        carry: bool = False,
    ) -> None:
        """Prepare to write `path`; nothing is opened before `plan`.

        More than `max_shard_size` tensor bytes become shards. `like` is an open source whose header
        is kept if the plan is the same. `carry` lets encodings without a dtype be stored as bytes.
        `files` is the set to write into, None for one that the sink publishes itself.
        """
        super().__init__(path, force=force, files=files)
        self._limit = max_shard_size
        self._carries = carry or (like is not None and any(s.parsed.carried for s in like.shards))
        self._like = like if like is not None and len(like.shards) == 1 else None

    def order(self, infos: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Return the tensors in the order to plan them: the reference's, or that of `like`.

        The order of `like` is used only if it has exactly the planned tensors.
        """
        if self._like is None or not _has_same_tensors(self._like, infos):
            return layout.storage_order(infos)
        places = self._like.shards[0].parsed.infos
        return sorted(infos, key=lambda info: (places[info.name].offset, info.nbytes))

    def _lay_out(
        self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]
    ) -> Sequence[FileProgram]:
        """Return what each output file holds: with the header of `like`, a new one, or shards.

        A FileProgram has the file's bytes and the ranges of its tensors, in order. Raises
        ConversionError for tensors in another order than the format's, or of a dtype that it cannot
        store.
        """
        where = str(self._path)
        texts = _metadata_texts(metadata, where)
        like = self._like
        in_place = like is not None and _is_in_order_of(like, infos)
        # An unchanged plan keeps the header of `like` byte by byte.
        if like is not None and in_place and self._is_same_file(like, texts, infos):
            return [FileProgram(self._path, like.header_raw, _tensor_slots(infos))]
        texts.setdefault(_FORMAT_KEY, _FORMAT)
        for info in infos:
            _refuse_unstorable(
                stored_info(info, layout.can_store) if self._carries else info, where
            )
        # `format` tells loaders whether all tensors have dtypes of the format.
        if not all(layout.can_store(find_encoding(info.encoding)) for info in infos):
            texts[_FORMAT_KEY] = _CARRIES
        elif texts[_FORMAT_KEY] == _CARRIES:
            texts[_FORMAT_KEY] = _FORMAT
        if not in_place and list(infos) != layout.storage_order(infos):
            raise ConversionError(
                f"{where}: tensors are planned in another order than the format's; "
                "plan them in the order of `order`"
            )
        parts = distribute_tensors(infos, self._limit, where)
        if len(parts) == 1:
            return [_file_program(self._path, texts, infos)]
        return self._lay_out_shards(texts, parts)

    def _is_same_file(
        self, like: SafetensorsSource, texts: Mapping[str, str], infos: Sequence[TensorInfo]
    ) -> bool:
        """Return whether metadata and sharding are those of the one file `like`."""
        if self._limit is not None and sum(info.nbytes for info in infos) > self._limit:
            return False
        return dumps(dict(like.metadata)) == dumps(dict(texts))

    def _lay_out_shards(
        self, texts: Mapping[str, str], parts: Sequence[Sequence[TensorInfo]]
    ) -> list[FileProgram]:
        """Return what each shard and their index hold, as FilePrograms.

        `parts` are the tensors of each shard, `texts` is the metadata. Only the first shard has
        keys other than `format`.
        """
        count = len(parts)
        stem = _shard_stem(self._path.name)
        programs: list[FileProgram] = []
        weight_map: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            path = self._path.with_name(f"{stem}-{number:05d}-of-{count:05d}.safetensors")
            kept = texts if number == 1 else {_FORMAT_KEY: texts[_FORMAT_KEY]}
            programs.append(_file_program(path, kept, part))
            weight_map.update(
                (stored_info(info, layout.can_store).name, path.name) for info in part
            )
        total = sum(info.nbytes for part in parts for info in part)
        path = self._path.with_name(stem + layout.INDEX_SUFFIX)
        return [*programs, FileProgram(path, index_bytes(weight_map, total))]


def open_sink(
    path: Path,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
    files: FileSet | None = None,
    like: Any = None,
    carry: bool = False,
    **options: Any,
) -> SafetensorsSink:
    """Return a sink that writes a safetensors model to `path`.

    More than `max_shard_size` tensor bytes become shards with an index. `like` is an open
    safetensors source whose header is kept if the plan is the same. `carry` lets bytes of encodings
    without a dtype be stored under another name. With `files` the sink writes
    into that set, and the set's owner publishes it. UsageError for other options.
    """
    if options:
        raise UsageError(f"{path}: safetensors files are not written with {', '.join(options)}")
    return SafetensorsSink(
        Path(path), force=force, files=files, max_shard_size=max_shard_size, like=like, carry=carry
    )


def _metadata_texts(metadata: Mapping[str, Value | TypedValue], where: str) -> dict[str, str]:
    """Return the metadata as {key: text}; ConversionError unless all are UTF-8 strings."""
    texts: dict[str, str] = {}
    for key, value in metadata.items():
        text = value.value if isinstance(value, TypedValue) else value
        if not _is_utf8(key):
            raise ConversionError(f"{where}: metadata key {shorten(key, 80)!r} is not UTF-8")
        if not isinstance(text, str) or not _is_utf8(text):
            raise ConversionError(
                f"{where}: metadata key {shorten(key, 80)!r} holds {type(text).__name__} "
                f"{shorten(repr(text), 80)}; safetensors metadata holds UTF-8 strings only"
            )
        texts[key] = text
    return texts


def _is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unstorable(info: TensorInfo, where: str) -> None:
    """Raise ConversionError for a tensor that the format cannot store."""
    what = f"{where}: {tensor_label(info.name)}"
    row = find_encoding(info.encoding)
    if not row.safetensors:
        raise ConversionError(
            f"{what}: safetensors has no dtype for {info.encoding}; choose another one"
        )
    if not _is_utf8(info.name):
        raise ConversionError(f"{what}: that name is not UTF-8; rename the tensor")
    if info.name == layout.METADATA:
        raise ConversionError(f"{what}: the format has no room for that name; rename the tensor")
    count = 1
    for dim in info.shape:
        count *= dim
        if dim < 0 or count * layout.element_bits(row) >= layout.U64:
            raise ConversionError(f"{what}: shape {list(info.shape)} does not fit into 64 bits")
    if count * layout.element_bits(row) % 8:
        raise ConversionError(
            f"{what}: {count} elements of {info.encoding} end inside a byte; "
            "the format wants whole bytes"
        )
    if info.nbytes != count * layout.element_bits(row) // 8:
        raise ConversionError(
            f"{what}: {info.nbytes} bytes are planned, shape {list(info.shape)} of "
            f"{info.encoding} takes {count * layout.element_bits(row) // 8}"
        )


def _file_program(path: Path, texts: Mapping[str, str], infos: Sequence[TensorInfo]) -> FileProgram:
    """Return what one file holds: its header, then the ranges of the tensors.

    `texts` is the metadata. ConversionError if the header is too long.
    """
    described = unsupported_record(infos, layout.can_store)
    if described:
        texts = {**texts, KEY: dumps(described[KEY])}
    head = layout.header_bytes(texts, infos)
    size = len(head) - layout.PREFIX
    if size > MAX_HEADER:
        raise ConversionError(
            f"{path}: its header takes {size} bytes, the format allows {MAX_HEADER}"
        )
    return FileProgram(path, head, _tensor_slots(infos))


def _tensor_slots(infos: Sequence[TensorInfo]) -> list[TensorSlot]:
    """Return the ranges of the file that are reserved for the tensors, in order."""
    return [TensorSlot(info.name, info.nbytes) for info in infos]


def _has_same_tensors(like: SafetensorsSource, infos: Sequence[TensorInfo]) -> bool:
    """Return whether `like` has exactly the planned names, with equal shapes and encodings."""
    known = like.shards[0].parsed.infos
    return len(known) == len(infos) and all(
        info.name in known
        and known[info.name].shape == info.shape
        and known[info.name].encoding == info.encoding
        for info in infos
    )


def _is_in_order_of(like: SafetensorsSource, infos: Sequence[TensorInfo]) -> bool:
    """Return whether the plan has the tensors of `like` in the same order."""
    if not _has_same_tensors(like, infos):
        return False
    places = like.shards[0].parsed.infos
    offsets = [places[info.name].offset for info in infos]
    return offsets == sorted(offsets)


def _shard_stem(name: str) -> str:
    """Return the name that shards begin with: without suffix and without a shard number."""
    stem = name.removesuffix(".safetensors")
    match = _SHARD.fullmatch(stem)
    return match["stem"] if match else stem
