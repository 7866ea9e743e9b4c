"""Splits: one model in files NAME-00001-of-00003.gguf, as llama.cpp's gguf-split makes them.

`split.no` counts from 0, names from 1; `split.tensors.count` is the total over all files; only the
first file has the model's metadata.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.errors import FormatError
from aprfmt.formats import mapped_file
from aprfmt.formats.gguf.layout import (
    BYTE_ORDERS,
    MAX_SPLITS,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    align_size,
    parse_split_name,
    split_name,
)

if TYPE_CHECKING:
    from aprfmt.formats.gguf.parse import ParsedGguf


class GgufShard(mapped_file.Shard["ParsedGguf"]):
    """One open file of a GGUF model, and its structure."""

    __slots__ = ()

    @property
    def tensor_class(self) -> type[mapped_file.StoredTensor]:
        """The class of an undamaged tensor: one that swaps bytes if the file is big-endian."""
        if self.parsed.order != ">":
            return mapped_file.StoredTensor

        from aprfmt.formats.gguf.byteorder import SwappedTensor

        return SwappedTensor


def _read_split_key(parsed: "ParsedGguf", key: str) -> int | None:
    """Return an integer key of a split, None where it is absent; FormatError for other values."""
    value: Value = parsed.metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise FormatError(
            f"{parsed.where}: {key} has type {parsed.metadata.fields[key].type}; "
            "it must be a whole number, not negative"
        )
    return value


def sibling_names(path: Path, parsed: "ParsedGguf") -> list[str]:
    """Return the file names of the model that `path` belongs to, in order.

    Without a split, that of the file alone. Raises FormatError where the split's keys and the
    file's name disagree: then the other files' names are not known.
    """
    count = _read_split_key(parsed, SPLIT_COUNT)
    if count is None or count < 2:
        return [path.name]
    number = _read_split_key(parsed, SPLIT_NO)
    found = parse_split_name(path.name)
    if count > MAX_SPLITS or number is None or number >= count:
        raise FormatError(
            f"{path}: {SPLIT_COUNT} is {count}, {SPLIT_NO} is {number}; expected a number below "
            f"the count, and at most {MAX_SPLITS} files"
        )
    if found is None or found[1:] != (number, count):
        expected = split_name(found[0] if found else "NAME", number, count)
        if parsed.joined:
            raise FormatError(
                f"{path}: is file {number + 1} of {count} by its keys{parsed.joined}; each of the "
                f"files is read under its own name, this one as {expected}"
            )
        raise FormatError(
            f"{path}: is file {number + 1} of {count} by its keys; then its name must be "
            f"{expected}, or the other files cannot be found; rename it as it was"
        )
    return [split_name(found[0], at, count) for at in range(count)]


def check_set(shards: Sequence[GgufShard], *, complete: bool) -> None:
    """Raise FormatError for shards that do not belong together.

    Tensors are counted only if the set is `complete`.
    """
    first = shards[0].parsed
    seen: dict[str, str] = {}
    for shard in shards:
        parsed = shard.parsed
        for name, of_shard, of_first in (
            (
                SPLIT_COUNT,
                _read_split_key(parsed, SPLIT_COUNT),
                _read_split_key(first, SPLIT_COUNT),
            ),
            (
                SPLIT_TENSORS,
                _read_split_key(parsed, SPLIT_TENSORS),
                _read_split_key(first, SPLIT_TENSORS),
            ),
            ("the byte order", BYTE_ORDERS[parsed.order], BYTE_ORDERS[first.order]),
        ):
            if of_shard != of_first:
                raise FormatError(
                    f"{parsed.where}: {name} is {of_shard}, in {first.where} it is {of_first}; "
                    "the files are of different sets: get all of one set again"
                )
        if len(shards) > 1:
            sibling_names(shard.file.path, parsed)  # its own number must fit its own name
        for name in parsed.infos:
            if name in seen:
                raise FormatError(
                    f"{parsed.where}: tensor {name!r} is in {seen[name]} as well; "
                    "names must be unique over all files of a split"
                )
            seen[name] = parsed.where
    total = _read_split_key(first, SPLIT_TENSORS)
    if len(shards) > 1 and complete and total is not None and total != len(seen):
        raise FormatError(
            f"{first.where}: {SPLIT_TENSORS} is {total}, the files have {len(seen)} tensors; "
            "the files are of different sets: get all of one set again"
        )


def divide_tensors(
    costs: Sequence[tuple[int, int]], heads: tuple[int, int], alignment: int, limit: int
) -> list[int]:
    """Return how many tensors each file gets, in order, so that none is larger than `limit`.

    `costs` are (bytes in the tensor table, padded bytes of data), `heads` the bytes before the
    table in the first file and in the others. A tensor is never cut, so a file with only one
    may be larger.
    """
    counts = [0]
    table, data = heads[0], 0
    for entry, padded in costs:
        if counts[-1] and align_size(table + entry, alignment) + data + padded > limit:
            counts.append(0)
            table, data = heads[1], 0
        counts[-1] += 1
        table, data = table + entry, data + padded
    return counts
