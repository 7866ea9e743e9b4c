"""Python files that lie beside models are never run, by any command or by what a command starts.

Seen red: workers started with `-m`, a child's search path with the working folder in it, `""` kept
in that path, and a process that is started elsewhere than in base/child_process.py.
"""

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from aprfmt.base.child_process import import_path, start_module
from aprfmt.cli.commands import COMMANDS
from tests.cli.examples import make_examples
from tests.cli.run import ROOT
from tests.patience import PATIENCE

OURS = ("aprfmt", "cli", "inference", "sitecustomize", "usercustomize", "cupy", "ray")
PACKAGES = {name for name in packages_distributions() if name.isidentifier()}
RUNS = [sys.executable, "-P", "-c", "from aprfmt.cli.main import main; main()"]
MAIN = [sys.executable, "-m", "aprfmt"]


def plant(folder: Path, names: set[str], mark: Path) -> None:
    """Put Python files into a folder that leave a mark when one is run."""
    for name in names:
        code = f"import os\nos.open({str(mark / name)!r}, os.O_WRONLY | os.O_CREAT)\n"
        (folder / f"{name}.py").write_text(code)


def environment(**more: str) -> Mapping[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | more


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), text=True, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mark: Path) -> Path:
    """The folder of the examples, with a Python file for every module there is."""
    made = tmp_path_factory.mktemp("hostile")
    make_examples(made)
    for place in (made, made / "model"):
        plant(place, PACKAGES | set(OURS) | set(sys.stdlib_module_names), mark)
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_a_python_file_of_the_folder(name: str, folder: Path, mark: Path) -> None:
    done = run([*RUNS, *shlex.split(COMMANDS[name].example)[1:]], folder)
    assert done.returncode == 0, done.stderr
    assert os.listdir(mark) == []


@pytest.mark.parametrize(
    "arguments",
    [("scan", "."), ("template", "model", "--user", "Hi"), ("validate", "model.gguf")],
    ids=lambda arguments: arguments[0],
)
def test_nor_do_processes_that_are_started_with_m(
    arguments: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """With `-m` Python itself searches the folder for `aprfmt` and what it needs to begin."""
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("model", "model.gguf"):
        (beside / name).symlink_to(folder / name)
    mark = tmp_path / "mark"
    mark.mkdir()
    plant(beside, PACKAGES - {"aprfmt"}, mark)
    done = run([*MAIN, *arguments], beside)
    assert done.returncode == 0, done.stderr
    assert os.listdir(mark) == []


def test_the_files_are_run_where_python_finds_them(folder: Path, mark: Path) -> None:
    """What the other tests look for would be seen."""
    done = run([sys.executable, "-c", "import tokenizers"], folder)
    assert done.returncode == 0, done.stderr
    found = os.listdir(mark)
    for name in found:
        (mark / name).unlink()
    assert "tokenizers" in found


@pytest.mark.parametrize("entry", ["", ".", "absolute", "link"])
def test_a_child_is_not_given_the_working_folder(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, link, other = tmp_path / "here", tmp_path / "link", tmp_path / "other"
    here.mkdir()
    link.symlink_to(here)
    monkeypatch.chdir(here)
    spelled = {"absolute": str(here), "link": str(link)}.get(entry, entry)
    monkeypatch.setattr(sys, "path", [spelled, str(other), *sys.path])
    found = import_path()
    assert str(other) in found and found[0] == str(ROOT)
    assert not {os.path.realpath(path) for path in found} & {str(here)}
    assert all(map(os.path.isabs, found))


def test_the_package_is_found_from_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert import_path()[0] == str(ROOT)


def test_a_child_lies_elsewhere_and_is_told_nothing_by_pythons_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown.py").write_text("import os, sys\nprint(os.getcwd(), sys.flags.isolated)\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{tmp_path / 'here'}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    child = start_module("shown")
    out, _ = child.communicate(timeout=PATIENCE)
    assert out.decode().split() == [os.path.abspath(os.sep), "1"]


# --- no other way to start a process -------------------------------------------------------------

STARTS = frozenset(
    "Popen run call check_call check_output getoutput getstatusoutput system popen spawnl spawnle "
    "spawnlp spawnlpe spawnv spawnve spawnvp spawnvpe execl execle execlp execlpe execv execve "
    "execvp execvpe posix_spawn posix_spawnp fork forkpty startfile Process Pool "
    "ProcessPoolExecutor create_subprocess_exec create_subprocess_shell".split()
)
OWNERS = frozenset(
    "os subprocess multiprocessing mp asyncio pty futures concurrent.futures context".split()
)


def starts(text: str) -> list[str]:
    """Return every call of a source text that may start a process."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute):
            owner = ast.unparse(called.value)
            if called.attr in STARTS and owner in OWNERS:
                found.append(ast.unparse(called))
        elif isinstance(called, ast.Name) and called.id in ("Popen", "ProcessPoolExecutor"):
            found.append(called.id)
    return found


def test_processes_are_started_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ("aprfmt", "cli", "inference")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.resolve() == path and starts(path.read_text(encoding="utf-8"))
    }
    # git, in the repository that the hook was called for; llama.cpp's server, by a child of ours
    others = {"cli/pre_commit.py", "aprfmt/tokenizer/llama_server_child.py"}
    assert found == {"aprfmt/base/child_process.py", *others}, (
        "start it by aprfmt.base.child_process"
    )


@pytest.mark.parametrize(
    "line",
    ["subprocess.Popen(x)", "subprocess.run(x)", "os.system(x)", "os.execv(x, y)", "os.fork()",
     "multiprocessing.Process(target=x)", "Popen(x)", "ProcessPoolExecutor()"],
)  # fmt: skip
def test_the_check_sees(line: str) -> None:
    assert starts(line)
