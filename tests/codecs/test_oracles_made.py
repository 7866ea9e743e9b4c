"""The libraries of the extra `oracles` make the files of fixtures/oracles again."""

import importlib.util
import subprocess
import sys

import pytest

from tests.codecs.test_oracles import FILES, ROOT, header


@pytest.mark.parametrize("library", FILES)
def test_the_library_makes_its_file_again(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"NOT-RUN: {header(library)['__metadata__']['library']} is not installed")
    command = [sys.executable, str(ROOT / "fixtures" / "make_oracles.py"), "--check", library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
