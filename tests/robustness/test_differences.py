"""Other readers over the same files: they differ from us exactly where the table says, and why."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.conftest import not_run
from tests.robustness.differences import (
    FOUND,
    HEAP,
    KINDS,
    NO_ANSWER,
    OPENS,
    REASONS,
    REFUSES,
    VERSIONS,
    cases,
    page,
)
from tests.robustness.jail import ROOT, UNSAID, Done, Job, run


def verdict(done: Done) -> str:
    """Return what a reader did with a file."""
    if done.code < 0 or done.code == UNSAID or "MemoryError" in done.err:
        return NO_ANSWER
    return REFUSES if done.code else OPENS


@pytest.mark.parametrize("reader", VERSIONS)
def test_a_reader_differs_where_the_table_says(reader: str, tmp_path: Path) -> None:
    package, pinned = VERSIONS[reader]
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = "absent"
    if installed != pinned:
        not_run(f"{package} is {installed}; the table was taken with {pinned}")
    jobs = []
    for id, (data, _) in cases(reader).items():
        path = tmp_path / f"{id}.{KINDS[reader]}"
        path.write_bytes(data)
        jobs.append(Job(id, (str(path),), reader, heap=HEAP))
    done = run(jobs)
    differs = {
        id: theirs
        for id, (_, opens) in cases(reader).items()
        if (theirs := verdict(done[id])) != (OPENS if opens else REFUSES)
    }
    assert differs == dict(FOUND[reader])


def test_every_difference_has_its_reason_and_no_reason_is_idle() -> None:
    assert {case for found in FOUND.values() for case in found} == set(REASONS)
    for reader, found in FOUND.items():
        opened = {id for id, (_, opens) in cases(reader).items() if opens}
        for case, theirs in found.items():
            assert (theirs == REFUSES) == (case in opened), (reader, case)


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "reference" / "reader_differences.md").read_text() == page()
