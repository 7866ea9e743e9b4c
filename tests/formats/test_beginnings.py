"""A format that is not asked, because a file begins otherwise, would not have taken it."""

import struct
from pathlib import Path

import pytest

from aprfmt.errors import AprfmtError
from aprfmt.formats import BEGINNINGS, FORMATS, detect_format
from aprfmt.formats.apr.layout import LEGACY_MAGICS, MAGIC, REFUSED_MAGICS

HEADER = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
HEADS = {
    **{repr(magic): magic for magic in (MAGIC, *LEGACY_MAGICS, *REFUSED_MAGICS, b"GGUF")},
    "the manifest of a set": b'{"shard_count": 2, "shards": [{"filename": "a.apr"}]}',
    "a manifest after blanks": b' \r\n\t{"shard_count": 2, "shards": [{"filename": "a.apr"}]}',
    "an index": b'{"weight_map": {"t": "model-00001-of-00001.safetensors"}}',
    "safetensors": struct.pack("<Q", len(HEADER)) + HEADER,
    "a header as long as a brace is": struct.pack("<Q", 0x7B) + HEADER.ljust(0x7B),
    "a header as long as G": struct.pack("<Q", 0x47) + HEADER.ljust(0x47),
    "a pickle": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
    "small letters": b"gguf\x03\0\0\0",
    "blanks before GGUF": b" GGUF\x03\0\0\0",
    "blanks alone": b"  \n",
    "nothing": b"",
}


@pytest.mark.parametrize("case", HEADS)
def test_the_format_is_that_of_asking_all(case: str, tmp_path: Path) -> None:
    """Seen red: without the brace of a manifest, and without `lstrip`."""
    head = HEADS[case] + b"\0" * bool(HEADS[case].strip())
    path = tmp_path / "file"
    path.write_bytes(head)
    asked = [name for name in FORMATS if FORMATS[name].recognise(head, len(head))]
    try:
        found = detect_format(path).name
    except AprfmtError:
        found = None
    assert found == next(iter(asked), None)


def test_only_formats_of_ours_have_a_beginning() -> None:
    assert BEGINNINGS.keys() <= {*FORMATS.own}
