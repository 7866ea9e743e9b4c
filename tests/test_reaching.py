"""`python -m tests --of PATH` names the tests that reach a file: by imports, by name, by table."""

import pytest

from tests.reaching import tests_of as reaching


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("aprfmt/model/ledger.py", "tests/model/ledger/test_verdict.py"),  # a folder of that name
        ("aprfmt/base/crc.c", "tests/base/test_crc.py"),  # a file of that name
        ("aprfmt/measure/prefetch.py", "tests/measure/test_prefetch.py"),
        ("inference/rope.py", "tests/inference/gpu/test_torch_cuda.py"),  # imports it
        ("cli/hex.py", "tests/cli/test_parts_alone.py"),
        ("aprfmt/diagnosis", "tests/diagnosis/test_faults.py"),
        ("aprfmt/adapters/merge_faults.py", "tests/adapters/test_merge_faults.py"),
        ("aprfmt/codecs/q4_0.py", "tests/codecs/test_encode_ggml.py"),  # a row of a table
    ],
)
def test_a_file_has_the_tests_that_reach_it(path: str, test: str) -> None:
    assert test in reaching(path)


def test_what_reaches_nothing_of_it_is_left_out() -> None:
    """Seen red: every test file taken."""
    assert len(reaching("aprfmt/model/ledger.py")) < 40
    assert not [name for name in reaching("aprfmt/base/crc.c") if name.startswith("tests/cli/")]


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.py: not found"):
        reaching("aprfmt/nothing.py")
