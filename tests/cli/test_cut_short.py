"""A source that is cut while a command reads it: one line, exit 2, and nothing half written.

Seen red: the process ended by SIGBUS, a temporary file left beside the output, the output blamed, a
file blamed that a shorter one had replaced.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aprfmt.errors import FormatError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.mapped_file import MappedFile, truncated_files
from tests.conftest import ROOT
from tests.conversion.folders import write_safetensors
from tests.patience import PATIENCE

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGBUS"), reason="NOT-RUN: no such signal on this system"
)
SIZE = 4 << 20
# Runs a command whose first comparison of bytes finds its source cut.
DRIVER = """
import os, sys
from aprfmt.tensors import memory_compare as module
from aprfmt.cli.main import main
real = module.bytes_equal
def cutting(a, b):
    os.truncate(sys.argv[1], 5000)
    return real(a, b)
module.bytes_equal = cutting
main(sys.argv[2:])
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": (SIZE // 4,)}, {"a": bytes(SIZE)}, "F32")
    return path


def cut(source: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DRIVER, str(source), *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_conversion_ends_in_one_line_and_leaves_nothing(source: Path) -> None:
    size = source.stat().st_size
    done = cut(source, "convert", source, source.with_name("y.apr"), "--generic", "--quiet")
    assert done.returncode == 2, done.stderr
    assert f"{source}: was cut while it was read, from {size} to 5000 bytes" in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(source.parent) == [source.name]


def test_the_json_has_the_error(source: Path) -> None:
    other = source.with_name("y.safetensors")
    other.write_bytes(source.read_bytes())
    done = cut(source, "diff", source, other, "--only", "tensors", "--json")
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "format" and error["where"] == str(source)


def test_a_write_from_it_names_it_and_not_the_output(source: Path) -> None:
    file = MappedFile(source)
    os.truncate(source, 5000)
    with FileSet() as files:
        out = files.create(source.with_name("y"))
        with pytest.raises(FormatError, match=r"x\.safetensors: was cut .* to 5000 bytes"):
            out.write(file.view[1 << 20 : 2 << 20])
        files.discard()
    assert os.listdir(source.parent) == [source.name]


def test_a_file_that_was_replaced_by_a_shorter_one_was_not_cut(source: Path) -> None:
    old = MappedFile(source.with_name("x.safetensors"))
    other = source.with_name("z")
    other.write_bytes(source.read_bytes()[:5000])
    os.replace(other, source)
    assert source not in [path for path, _, _ in truncated_files()]
    os.truncate(source, 4000)  # the file that lies there now
    now = MappedFile(source)
    os.truncate(source, 3000)
    assert (source, 4000, 3000) in truncated_files()
    old.close()
    now.close()
