"""Lists a file of torch.save field by field: records of the archive, or its storages."""

from collections.abc import Iterator
from pathlib import Path

from aprfmt.base.protocols import Region
from aprfmt.formats.header_field import HeaderField
from aprfmt.formats.mapped_file import BufferFile
from aprfmt.formats.pytorch.storages import read_contents


def header_fields(buffer: Region, where: str) -> Iterator[HeaderField]:
    """Yield a field for each record of an archive by offset; in older forms, for each storage.

    `buffer` is the whole file; `where` begins messages.
    """
    file = BufferFile(buffer[0 : len(buffer)], Path(where))
    contents = read_contents(file, where)
    if contents.records:
        for record in sorted(contents.records.values(), key=lambda row: row.header):
            head = record.start - record.header
            yield HeaderField(record.header, head, "local header", record.name)
            if record.size and "/data/" not in record.name:
                yield HeaderField(record.start, record.size, "record", record.name)
        return
    first = min((start for start, _ in contents.places.values()), default=file.size)
    yield HeaderField(0, first, f"pickles ({contents.form})", "")
    for key, (start, stop) in sorted(contents.places.items(), key=lambda row: row[1]):
        yield HeaderField(start, stop - start, "storage", key)
