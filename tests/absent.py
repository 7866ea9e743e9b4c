"""A library of the test extra that is not installed makes its tests NOT-RUN, not failures.

`conftest.py` imports the hooks. Only an import that a test itself makes counts: the product has to
say what it lacks in its own words.
"""

import importlib.util
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
LIBRARIES = (
    "accelerate", "atheris", "bitsandbytes", "build", "compressed_tensors", "jsonschema",
    "libgguf", "mkdocs", "mlx", "sentencepiece", "torch", "transformers", "zstandard",
)  # fmt: skip


def absent(error: BaseException | None) -> str:
    """Return the name of the library whose import by a test failed; "" for another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    name = error.name.partition(".")[0]
    if name not in LIBRARIES or importlib.util.find_spec(name) is not None:
        return ""
    frame, own = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        own = file if not file.startswith("<frozen ") else own
        frame = frame.tb_next
    return name if Path(own).is_relative_to(TESTS) else ""


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
    """Turn a test that imports a library it has not into one that is NOT-RUN."""
    report = yield
    name = absent(call.excinfo.value) if call.excinfo is not None else ""
    if report.outcome == "failed" and name:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 1, f"NOT-RUN: {name} is not installed")
    return report
