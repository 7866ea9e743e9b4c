"""What a reading of the promises against the program found broken, and must not break again."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def aprfmt(*args: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "aprfmt", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )


@pytest.fixture
def unknown_type(tmp_path: Path) -> Path:
    """A GGUF of one tensor of ggml type 142."""
    info = struct.pack("<Q1sIQIQ", 1, b"u", 1, 32, 142, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    path = tmp_path / "unknown.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(range(64)))
    return path


@pytest.mark.parametrize("args", [("inspect",), ("inspect", "--json"), ("tensors",), ("hash",)])
def test_a_closed_pipe_is_141_and_silent(args: tuple[str, ...]) -> None:
    process = aprfmt(*args, ROOT / "fixtures" / "demo")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (141, b"")


def test_blocks_of_an_unknown_type_are_refused_in_words(unknown_type: Path) -> None:
    process = aprfmt("hex", unknown_type, "--tensor", "u")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert b"type#142 has no blocks to show" in errors
    assert b"bug" not in errors
