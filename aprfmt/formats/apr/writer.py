"""Writes APR v2: a fresh file as the reference's writer makes it, a set of shards, or a copy.

Fresh files: index sorted by name, data in plan order, every tensor padded to 64 bytes, row-major
flag, header and footer checksums; the same plan and bytes give the same file. With `like`, an
unchanged plan keeps every byte between the tensors; a changed one keeps the flags.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo, TypedValue, Value
from aprfmt.errors import CodecError, ConversionError, UsageError
from aprfmt.formats import sequential, unsupported_encodings
from aprfmt.formats.apr import layout
from aprfmt.formats.apr.layout import BITS, COMPRESSED, align_size
from aprfmt.formats.apr.metadata import TYPED_NAMES, canonical_metadata, metadata_json
from aprfmt.formats.apr.reader import AprSource
from aprfmt.formats.apr.shards import (
    MAX_SHARDS,
    make_manifest,
    manifest_name,
    shard_name,
    shard_stem,
)
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import dumps
from aprfmt.formats.damage import tensor_label

_U64 = 1 << 64
_MAX_METADATA = (1 << 32) - 1
# Flags not kept from `like`: those no longer true, and those that `_fresh_flags` computes.
_NOT_KEPT = (
    COMPRESSED
    | BITS["SHARDED"]
    | BITS["ENCRYPTED"]
    | BITS["SIGNED"]
    | BITS["QUANTIZED"]
    | BITS["HAS_VOCAB"]
)


class AprSink(sequential.SequentialSink):
    """An APR v2 model being written; see `aprfmt.base.protocols.Sink`.

    Metadata is canonical (`apr.metadata`): ConversionError for values JSON cannot express and for
    typed keys of another type. `max_shard_size` limits a file's tensor bytes. `like` is an open
    source whose bytes between the tensors are kept if the plan is the same.
    """

    def __init__(
        self,
        path: Path,
        *,
        force: bool = False,
        files: FileSet | None = None,
        max_shard_size: int | None = None,
        like: AprSource | None = None,
    ) -> None:
        """Prepare to write `path`; nothing is opened before `plan`.

        More than `max_shard_size` tensor bytes become several files. `like` is an open source whose
        bytes are kept if the plan is the same. `files` is the set to write into, None for one that
        the sink publishes itself.
        """
        super().__init__(path, force=force, files=files)
        self._limit = max_shard_size
        self._like = like

    def order(self, infos: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Return the tensors in the order to plan and write them: by name, or that of `like`."""
        if self._like is None or len(self._like.shards) > 1:
            return layout.storage_order(infos)
        places = {info.name: (info.offset, info.nbytes) for info in _infos_of(self._like)}
        last = (_U64, 0)
        return sorted(layout.storage_order(infos), key=lambda info: places.get(info.name, last))

    def _lay_out(
        self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]
    ) -> Sequence[sequential.FileProgram]:
        """Return what each output file holds: a copy of `like`, one new file, or shards.

        A FileProgram has the file's bytes and the ranges of its tensors, in order.
        """
        where, like = str(self._path), self._like
        same = like is not None and _same_metadata(like, metadata)
        if like is not None and same and _is_same_plan(like, infos, self._limit):
            return [_copy_program(self._path, like, infos)]
        for info in infos:
            _refuse_unstorable(info, where)
        parts = sequential.distribute_tensors(infos, self._limit, where)
        flags = _fresh_flags(metadata, infos) | (
            like.header.flags & ~_NOT_KEPT if like is not None else 0
        )
        # Unchanged metadata are copied byte by byte even if the tensors change.
        if like is not None and same and len(parts) == 1:
            if _unsupported_record(infos) == _unsupported_record(_infos_of(like)):
                return [_fresh_program(self._path, like.metadata_raw, infos, flags)]
        plain = canonical_metadata(metadata, where)
        plain.setdefault("param_count", sum(math.prod(info.shape) for info in infos))
        if isinstance(plain.get("sharding"), Mapping) and plain["sharding"].get("shard_count") != 1:
            del plain["sharding"]  # described the source's shards
        if len(parts) > 1:
            return self._lay_out_shards(plain, parts, flags | BITS["SHARDED"])
        raw = _metadata_bytes({**plain, **_unsupported_record(infos)}, where)
        return [_fresh_program(self._path, raw, infos, flags)]

    def _lay_out_shards(
        self, plain: Mapping[str, Value], parts: Sequence[Sequence[TensorInfo]], flags: int
    ) -> list[sequential.FileProgram]:
        """Return what each shard and their manifest hold, as FilePrograms.

        `parts` are the tensors of each shard, `plain` is the metadata, `flags` are those of the
        headers. Only the first shard has the custom keys. Raises ConversionError for more than
        MAX_SHARDS shards.
        """
        where, count = str(self._path), len(parts)
        if count > MAX_SHARDS:
            raise ConversionError(
                f"{where}: {count} shards of {self._limit} bytes; the limit is {MAX_SHARDS}; "
                "allow larger ones"
            )
        stem = shard_stem(self._path.name)
        total = sum(info.nbytes for part in parts for info in part)
        programs: list[sequential.FileProgram] = []
        rows: list[tuple[str, int, Sequence[str]]] = []
        # Every shard repeats the typed keys; only the first one has the others.
        for number, part in enumerate(parts):
            sharding = {"shard_count": count, "shard_index": number, "total_size": total}
            kept = {k: v for k, v in plain.items() if number == 0 or k in TYPED_NAMES}
            raw = _metadata_bytes(
                {**kept, "sharding": sharding, **_unsupported_record(part)}, where
            )
            path = self._path.with_name(shard_name(stem, number, count))
            program = _fresh_program(path, raw, part, flags)
            programs.append(program)
            names = sorted(
                unsupported_encodings.stored_info(info, layout.can_store).name for info in part
            )
            rows.append((path.name, sequential.program_size(program), names))
        text = json.dumps(make_manifest(rows), indent=2, ensure_ascii=False)
        path = self._path.with_name(manifest_name(stem))
        return [*programs, sequential.FileProgram(path, (text + "\n").encode("utf-8"))]


def open_sink(
    path: Path,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
    files: FileSet | None = None,
    like: Any = None,
    **options: Any,
) -> AprSink:
    """Return a sink that writes an APR v2 model to `path`.

    More than `max_shard_size` tensor bytes become STEM-00000-of-0000N.apr and STEM-manifest.json.
    `like` is an open APR source whose bytes are kept if the plan is the same. With `files` the
    sink writes into that set, and the set's owner publishes it. UsageError for other options.
    """
    if options:
        raise UsageError(f"{path}: APR files are not written with {', '.join(options)}")
    return AprSink(path, force=force, files=files, max_shard_size=max_shard_size, like=like)


def _infos_of(source: AprSource) -> list[TensorInfo]:
    """Return the tensor infos of an open source, in its order."""
    return [tensor.info for tensor in source.tensors.values()]


def _metadata_bytes(metadata: Mapping[str, Value], where: str) -> bytes:
    """Return metadata as the file's JSON bytes; ConversionError if they are too long."""
    raw = metadata_json(metadata, where)
    if len(raw) > _MAX_METADATA:
        raise ConversionError(
            f"{where}: metadata takes {len(raw)} bytes, APR holds at most {_MAX_METADATA}"
        )
    return raw


def _unsupported_record(infos: Iterable[TensorInfo]) -> dict[str, Value]:
    """Return the metadata entry {key: record} for tensors that the format has no code for.

    Empty if there are none. They are stored as bytes under another name.
    """
    return unsupported_encodings.unsupported_record(infos, layout.can_store)


def _refuse_unstorable(info: TensorInfo, where: str) -> None:
    """Raise ConversionError for a tensor that an APR file cannot store."""
    what = f"{where}: {tensor_label(info.name)}"
    stored = unsupported_encodings.stored_info(info, layout.can_store)
    length = len(_name_bytes(stored))
    if length > layout.MAX_NAME_BYTES:
        raise ConversionError(
            f"{what}: its name takes {length} bytes as stored, APR names have at most "
            f"{layout.MAX_NAME_BYTES}; shorten it"
        )
    if len(stored.shape) > layout.MAX_DIMS:
        raise ConversionError(
            f"{what}: {len(stored.shape)} dimensions, APR has at most {layout.MAX_DIMS}; reshape it"
        )
    if any(not 0 <= size < _U64 for size in (*stored.shape, info.nbytes)):
        raise ConversionError(f"{what}: shape {list(info.shape)}; sizes are 0 to 2^64-1")
    row = find_encoding(info.encoding)
    try:
        if row.apr is not None:
            sizes = [fit.nbytes for fit in layout.possible_sizes(row, info.shape)]
        else:
            sizes = [row.nbytes(info.shape) if row.known else info.nbytes]
    except CodecError as error:
        raise ConversionError(f"{what}: {error}") from None
    if info.nbytes not in sizes:
        raise ConversionError(
            f"{what}: {info.nbytes} bytes are planned, shape {list(info.shape)} of "
            f"{info.encoding} takes {' or '.join(map(str, sizes))}"
        )


def _name_bytes(info: TensorInfo) -> bytes:
    """Return a tensor's name as UTF-8; ConversionError for lone surrogates."""
    try:
        return info.name.encode("utf-8")
    except UnicodeEncodeError:
        raise ConversionError(
            f"tensor {info.name!r}: holds half of a surrogate pair, which UTF-8 cannot hold"
        ) from None


def _fresh_program(
    path: Path, metadata: bytes, infos: Sequence[TensorInfo], flags: int
) -> sequential.FileProgram:
    """Return what a new file holds: data in the order of `infos`, index sorted by name.

    `metadata` are the JSON bytes, `flags` those of the header.
    """
    stored = [unsupported_encodings.stored_info(info, layout.can_store) for info in infos]
    sequential.check_unique(stored, str(path))
    entries: list[tuple[bytes, bytes]] = []
    body: list[sequential.Segment] = []
    at = 0
    for info, place in zip(infos, stored, strict=True):
        code = find_encoding(place.encoding).apr
        assert code is not None  # stored_info gives nothing else
        name = _name_bytes(place)
        entries.append((name, layout.pack_entry(name, code, place.shape, at, place.nbytes)))
        body += [sequential.TensorSlot(info.name, info.nbytes), layout.padding_bytes(info.nbytes)]
        at += align_size(info.nbytes)
    index = b"".join(entry for _, entry in sorted(entries))
    header = layout.fresh_header(flags, len(infos), len(metadata), len(index))
    head = [
        header.pack(),
        metadata,
        layout.padding_bytes(len(metadata)),
        index,
        layout.padding_bytes(len(index)),
    ]
    return sequential.FileProgram(path, b"".join(head), [*body, sequential.Checksum()])


def _fresh_flags(metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]) -> int:
    """Return the header flags that apply to a new file of these tensors and metadata."""
    quantized = any(not find_encoding(info.encoding).numpy for info in infos)
    return (
        BITS["LAYOUT_ROW_MAJOR"]
        | BITS["QUANTIZED"] * quantized
        | BITS["HAS_VOCAB"] * ("tokenizer.vocabulary" in metadata)
    )


def _same_metadata(like: AprSource, metadata: Mapping[str, Value | TypedValue]) -> bool:
    """Return whether the metadata equal those of `like`, compared as JSON.

    In Python 1 == True, so that dicts would not do.
    """
    if len(like.shards) > 1:
        return False
    plain = {k: v.value if isinstance(v, TypedValue) else v for k, v in metadata.items()}
    return dumps(plain) == dumps(dict(like.metadata))


def _is_same_plan(like: AprSource, infos: Sequence[TensorInfo], limit: int | None) -> bool:
    """Return whether the plan has the tensors of `like`, a single plain file, in its data order."""
    parsed = like.shards[0].parsed
    if parsed.expanded or parsed.size < parsed.end:
        return False
    if limit is not None and sum(info.nbytes for info in infos) > limit:
        return False
    ours = parsed.infos
    for info in infos:
        known = ours.get(info.name)
        if known is None or (known.shape, known.encoding, known.nbytes) != (
            info.shape,
            info.encoding,
            info.nbytes,
        ):
            return False
    offsets = [ours[info.name].offset for info in infos if info.nbytes]
    return len(ours) == len(infos) and offsets == sorted(offsets)


def _copy_program(
    path: Path, like: AprSource, infos: Sequence[TensorInfo]
) -> sequential.FileProgram:
    """Return what a copy of `like` holds: its bytes around the tensors, then the footer.

    The footer's checksum is computed from what is written, unless the source's own footer is
    wrong: a copy of a damaged file must not get a valid checksum.
    """
    parsed = like.shards[0].parsed
    buffer = parsed.buffer
    ours = [parsed.infos[info.name] for info in infos]
    data = min((info.offset for info in ours if info.nbytes), default=parsed.end)
    at = data
    # Bytes between the tensors are copied, each tensor becomes a slot.
    body: list[sequential.Segment] = []
    for info in ours:
        if info.nbytes:
            body.append(buffer[at : info.offset])
            at = info.offset + info.nbytes
        body.append(sequential.TensorSlot(info.name, info.nbytes))
    body.append(buffer[at : parsed.end])
    after = bytes(buffer[parsed.end :])
    if parsed.footer == "present":

        def choose_footer(computed: bytes) -> bytes:
            """Return the footer that a copy gets: the checksum `computed` from the bytes written.

            It is the source's own where that does not match its bytes: a damaged file's copy
            stays so.
            """
            damaged = computed != after and like.footer_matches() is False
            return after if damaged else computed

        body.append(sequential.Checksum(choose_footer))
    else:
        body.append(after)
    return sequential.FileProgram(path, bytes(buffer[:data]), body)
