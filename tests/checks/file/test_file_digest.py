"""SHA-256 of a file on this machine, read in pieces: every length, and a file that fails under it.

Seen red: the rest of the buffer hashed with the last piece, a file that was cut taken for whole.
"""

import errno
import hashlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from aprfmt.conversion.source_hash import SourceHash
from aprfmt.errors import FormatError
from aprfmt.model import open_model
from aprfmt.tensors import digest
from tests.conversion.folders import write_safetensors

pytestmark = pytest.mark.skipif(
    not hasattr(os, "preadv"), reason="NOT-RUN: files are mapped for it on this system"
)
PIECE = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE", PIECE)


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 77])
def test_it_is_the_digest_of_all_bytes(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "x").write_bytes(data)
    assert digest.file_sha256(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def test_a_file_that_is_cut_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(3 * PIECE))
    real = os.preadv

    def cutting(*asked: Any) -> int:
        os.truncate(tmp_path / "x", 2 * PIECE)
        return real(*asked)

    monkeypatch.setattr(os, "preadv", cutting)
    with pytest.raises(
        FormatError, match=f"was cut while it was read, from {3 * PIECE} to {2 * PIECE} bytes"
    ):
        digest.file_sha256(tmp_path / "x")


def test_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(PIECE))

    def failing(*asked: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(FormatError, match="x: cannot be read at byte 0: Input/output error"):
        digest.file_sha256(tmp_path / "x")


def test_the_interpreter_is_handed_over_as_before_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": (4,)}, {"a": bytes(16)}, "F32")
    before = sys.getswitchinterval()
    with open_model(path) as model, SourceHash(model.source) as hashed:
        assert sys.getswitchinterval() < before
        assert hashed.result() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sys.getswitchinterval() == before
