"""Recognises files of torch.save: zip archives, the older two forms, and an index.

Sources: torch/serialization.py (`MAGIC_NUMBER`, `_legacy_load`, `_load`), and
caffe2/serialize/inline_container.cc.
"""

import re

MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC = MAGIC.to_bytes(10, "little")
_ZIP = re.compile(
    rb"[^/\0]{0,255}/(?:data\.pkl|version|byteorder|\.format_version|\.storage_alignment|"
    rb"\.data/serialization_id|data/[0-9]+|constants\.pkl|code/.*)\Z",
    re.S,
)
TAR_MEMBERS = (b"sys_info", b"pickle", b"tensors", b"storages")
_LOCAL_NAME = 30  # where the name begins in a local header of zip


def is_zip(head: bytes) -> bool:
    """Return whether a file begins as an archive of torch.save, by its first record's name."""
    if not head.startswith(b"PK\x03\x04") or len(head) < _LOCAL_NAME:
        return False
    size = int.from_bytes(head[26:28], "little")
    return _ZIP.match(head[_LOCAL_NAME : _LOCAL_NAME + size]) is not None


def is_legacy(head: bytes) -> bool:
    """Return whether a file begins with the pickled magic number, in any protocol since 2."""
    return head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and _MAGIC in head[2:24]


def is_tar(head: bytes) -> bool:
    """Return whether a file is a tar archive whose first member is one of the oldest form's."""
    name = head[:100].split(b"\0")[0].removeprefix(b"./")
    return head[257:262] == b"ustar" and name in TAR_MEMBERS


def is_index(head: bytes) -> bool:
    """Return whether a file is the index of a model whose shards are pickles."""
    return (
        head.lstrip()[:1] == b"{"
        and b'"weight_map"' in head
        and re.search(rb"\.(?:bin|pt|pth)\"", head) is not None
    )


def recognise(head: bytes, size: int) -> bool:
    """Return whether a file is one of torch.save, or an index of such; `size` is not used.

    All formats have a function of this signature.
    """
    return is_zip(head) or is_legacy(head) or is_tar(head) or is_index(head)
