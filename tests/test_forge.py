"""What a public forge runs: workflow files, the version in one place, tests without torch."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import aprfmt

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    """Check one workflow against the forge's own schema, which the checker carries."""
    pytest.importorskip("check_jsonschema", reason="NOT-RUN: check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    return subprocess.run(
        [*command, "vendor.github-workflows", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_fit_their_schema(path: Path) -> None:
    done = lint(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_workflow_is_seen(tmp_path: Path) -> None:
    broken = tmp_path / "ci.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs_on:"))
    assert lint(broken).returncode == 1


def test_there_are_jobs_for_the_three_systems() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert len(WORKFLOWS) == 2
    for system in ("ubuntu", "macos", "windows"):
        assert f"{system}-latest" in text
    assert "python -m tests --fast" in text and ".ci/run" in text


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", aprfmt.__version__)
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")


PLANTED = """
import importlib
import pytest

def test_needs_it():
    import torch

def test_fails():
    assert False

def test_the_product_needs_it():
    importlib.import_module("%s")
"""


def test_a_library_that_is_absent_is_not_run_and_hides_no_failure(tmp_path: Path) -> None:
    """Only an import by a test itself counts; one by the package under test is a failure."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "product").mkdir()
    (tmp_path / "product" / "product_without.py").write_text("import torch\n")
    (tmp_path / "test_planted.py").write_text(PLANTED % "product_without")
    (tmp_path / "test_whole_module.py").write_text("import torch\n\ndef test_x(): pass\n")
    script = (
        "import sys, pathlib, pytest\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path / 'product')!r}]\n"
        "sys.modules['torch'] = None\n"
        "from tests import absent\n"
        "absent.TESTS = pathlib.Path.cwd()\n"
        "absent.PRODUCT = (pathlib.Path.cwd().parent / 'product',)\n"
        "class Frames:\n"
        "    pytest_make_collect_report = staticmethod(absent.pytest_make_collect_report)\n"
        "    pytest_runtest_makereport = staticmethod(absent.pytest_runtest_makereport)\n"
        "raise SystemExit(pytest.main(['-q', '-rs', '-p', 'no:cacheprovider', '.'], [Frames()]))\n"
    )
    (tmp_path / "room").mkdir()
    for name in ("test_planted.py", "test_whole_module.py"):
        (tmp_path / name).rename(tmp_path / "room" / name)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "room",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("NOT-RUN: torch is not installed") == 2, done.stdout
