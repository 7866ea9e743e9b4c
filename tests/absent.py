"""A library of the test or oracles extra that is not installed makes its tests NOT-RUN.

`conftest.py` imports the hooks. Only an import in the test itself, or in a library it uses, counts:
the product has to report a missing library itself. Tests that run a backend of such a library
through the product are listed in `RUN`.
"""

import importlib.util
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
PRODUCT = tuple(TESTS.parent / name for name in ("aprfmt", "cli", "inference"))
LIBRARIES = (
    "accelerate", "atheris", "bitsandbytes", "build", "compressed_tensors", "jsonschema",
    "libgguf", "mkdocs", "mlx", "peft", "sentencepiece", "torch", "transformers", "zstandard",
)  # fmt: skip

# Tests of torch's backend, which they name and do not import.
RUN = (
    "tests/cli/parity/test_parity.py::",
    "tests/cli/trace/test_trace.py::test_the_run_behind_the_model[torch",
    "tests/diagnosis/test_faults.py::test_the_verdict_the_cause_and_the_place[torch",
    "tests/diagnosis/test_honesty.py::test_runs_are_told_it_too[torch",
    "tests/diagnosis/test_command.py::test_exit_codes_and_json[torch",
    "tests/test_api.py::test_a_packed_weight_is_sliced_too",
)


def run_without_torch(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of RUN as NOT-RUN where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.nodeid.startswith(RUN):
                item.add_marker(pytest.mark.skip(reason="NOT-RUN: torch is not installed"))


def absent(error: BaseException | None) -> str:
    """Return the name of the library whose import by a test failed; "" for another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    name = error.name.partition(".")[0]
    if name not in LIBRARIES or importlib.util.find_spec(name) is not None:
        return ""
    frame, asked = error.__traceback__, False
    while frame is not None:
        file = Path(frame.tb_frame.f_code.co_filename)
        if file.is_relative_to(TESTS):
            asked = True
        elif any(file.is_relative_to(folder) for folder in PRODUCT):
            asked = False
        frame = frame.tb_next
    return name if asked else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module that cannot be collected without a library into one that is NOT-RUN."""
    report = yield
    info: Any = getattr(report, "call", None)
    error = info.excinfo.value if info is not None and info.excinfo is not None else None
    name = absent(error if isinstance(error, ModuleNotFoundError) else _cause(error))
    if report.outcome == "failed" and name:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"NOT-RUN: {name} is not installed")
    return report


def _cause(error: BaseException | None) -> BaseException | None:
    """Return the ImportError behind pytest's own CollectError."""
    return None if error is None else error.__cause__ or error.__context__


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a test that imports a missing library into one that is NOT-RUN."""
    report = yield
    name = absent(call.excinfo.value) if call.excinfo is not None else ""
    if report.outcome == "failed" and name:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 1, f"NOT-RUN: {name} is not installed")
    return report
