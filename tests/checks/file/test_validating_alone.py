"""What `validate` asks of a model before its checks run, with all of its parts replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt import checks
from aprfmt.errors import ArchError, FormatError, UnsupportedError, UsageError


class Opened:
    """An open model that says when its roles are resolved; `fault` is what that raises."""

    def __init__(self, log: list[str], fault: Exception | None, name: str) -> None:
        self.log, self.fault, self.name = log, fault, name
        self.source = SimpleNamespace(files=(name,))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append(f"closed {self.name}")

    @property
    def resolution(self) -> str:
        self.log.append("resolved")
        if self.fault is not None:
            raise self.fault
        return "roles"


def validated(
    monkeypatch: pytest.MonkeyPatch, *, fault: Exception | None = None, **options: Any
) -> tuple[Any, list[str]]:
    """Return what `validate` returns, and what was done in which order."""
    log: list[str] = []
    refused: Any = options.pop("refused", None)

    def open_model(path: Any, **given: Any) -> Any:
        log.append(f"open {path} {given}")
        if refused is not None:
            raise refused
        return Opened(log, fault, str(path))

    @contextmanager
    def digests(files: Any) -> Iterator[None]:
        log.append(f"digests of {files}")
        yield

    def judge(model: Any, **given: Any) -> Any:
        log.append("checked")
        return model.name, given

    monkeypatch.setattr(checks, "check_arch", lambda arch: log.append(f"arch {arch}"))
    monkeypatch.setattr(checks, "open_model", open_model)
    monkeypatch.setattr(checks, "checked_by_published_digests", digests)
    monkeypatch.setattr(checks, "validate_model", judge)
    monkeypatch.setattr(checks, "_report_unreadable", lambda *given: given)
    return checks.validate("m", **options), log


def test_a_pattern_of_missing_roles_is_held_to_the_model_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "resolved" not in validated(monkeypatch)[1]
    for fault in (None, ArchError("no such architecture")):
        (name, _), log = validated(monkeypatch, fault=fault, allow_missing=("x*",))
        assert name == "m" and log.count("resolved") == 1
        assert log.index("resolved") < log.index("checked") < log.index("closed m")
    with pytest.raises(UsageError, match=r"^x: no role$"):
        validated(monkeypatch, fault=UsageError("x: no role"), allow_missing=("x",))


def test_a_model_and_what_it_was_made_of_are_open_while_checks_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (name, given), log = validated(monkeypatch, against="source", arch="llama", strict=True)
    opened = [line for line in log if line.startswith("open ")]
    assert opened == [
        "open m {'arch': 'llama', 'partial': True, 'damaged': True, 'allow_missing': ()}",
        "open source {}",
    ]
    assert (name, given["source"].name, given["arch"], given["strict"]) == (
        "m", "source", "llama", True,
    )  # fmt: skip
    assert log[-3:] == ["checked", "closed source", "closed m"] and log[0] == "arch llama"
    (_, given), log = validated(monkeypatch)
    assert given["source"] is None and log.count("closed m") == 1


def test_published_digests_are_held_to_the_bytes_of_a_run_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (_, given), log = validated(monkeypatch)
    assert "digests of ('m',)" in log and given["budget"] is None
    limit: Any = object()
    (_, given), log = validated(monkeypatch, budget=limit)
    assert not any(line.startswith("digests") for line in log) and given["budget"] is limit


def test_a_file_that_cannot_be_read_is_reported_and_another_version_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage = FormatError("m: cut")
    found, log = validated(monkeypatch, refused=damage, second_reader=True)
    assert found == (Path("m"), damage, False, True) and "checked" not in log
    for refused in (UnsupportedError("m: version 9"), ArchError("no such architecture")):
        with pytest.raises(type(refused)):
            validated(monkeypatch, refused=refused)
