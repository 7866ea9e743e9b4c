"""Only the publishing modules write files: a static check of the whole source."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

PUBLISHING = {
    f"aprfmt/formats/{n}.py"
    for n in (
        "atomic",
        "journal",
        "output_file",
        "in_place_patch",
        "positional_io",
        "resumable_output",
        "signature",
        "temporary_files",
    )
}
# (file, call) -> why it writes nothing that a user asked for
ALLOWED = {
    ("cli/pre_commit.py", "target.mkdir"): "in git's own folder: a model as a commit has it",
    ("cli/pre_commit.py", "(target / name).open"): "the same",
    ("cli/pre_commit.py", "shutil.rmtree"): "the same",
    ("aprfmt/tokenizer/llama_server.py", "tempfile.TemporaryDirectory"): "a stand-in for a server",
    ("aprfmt/tokenizer/llama_server_child.py", "os.fdopen"): "its own stdout, for its answer",
    ("aprfmt/tokenizer/llama_server_child.py", "os.open"): "the null device, for other output",
    (
        "aprfmt/formats/mapped_file.py",
        "os.open",
    ): "reads only: the flags are O_RDONLY and what it needs",
    ("aprfmt/training/saved_step.py", "self.folder.mkdir"): "a folder of the trainer's own run",
    ("aprfmt/training/saved_step.py", "self.model.save_pretrained"): "transformers writes its own",
    ("inference/trace_file.py", "tempfile.TemporaryFile"): "values of a running trace, no name",
    ("inference/engines/llama_cpp.py", "tempfile.TemporaryDirectory"): "a copy for that engine",
    ("inference/engines/transformers.py", "tempfile.TemporaryDirectory"): "a copy for that engine",
    ("inference/fast/cuda/loader.py", "path.parent.mkdir"): "a cache of compiled kernels",
    ("inference/fast/cuda/loader.py", "tempfile.NamedTemporaryFile"): "the same",
    ("inference/fast/cuda/loader.py", "os.replace"): "the same: in one step, and no loss",
    ("aprfmt/conversion/estimate.py", "tempfile.TemporaryFile"): "no name: it measures a disk",
    ("aprfmt/remote/disk_cache.py", "path.parent.mkdir"): "a cache of fetched ranges, no output",
    ("aprfmt/remote/disk_cache.py", "tempfile.mkstemp"): "the same",
    ("aprfmt/remote/disk_cache.py", "os.fdopen"): "the same: bytes and their digest",
    ("aprfmt/remote/disk_cache.py", "os.replace"): "the same: in one step, and no loss",
    ("aprfmt/remote/disk_cache.py", "os.unlink"): "the same: what could not be written",
    ("aprfmt/remote/disk_cache.py", "path.unlink"): "the same: what is damaged, or used least",
    ("aprfmt/remote/temporary_cache.py", "tempfile.TemporaryFile"): "what was fetched, no name",
    ("inference/weights.py", "rows.touch"): "counts a row as used; no file",
    ("aprfmt/formats/apr/parse.py", "faults.rename"): "names of damaged tensors; no file",
    (
        "aprfmt/checks/gates/model_under_test.py",
        "tempfile.TemporaryDirectory",
    ): "copies to compare, gone at the end",
    ("aprfmt/fleet/results.py", "self.lines.open"): "rows are added as they come",
    ("aprfmt/fleet/worker_process.py", "os.fdopen"): "a worker's pipe",
    ("aprfmt/formats/safetensors/parse.py", "parsed.faults.rename"): "names in findings, no file",
    ("aprfmt/fleet/workers.py", "pickle.dump"): "into that pipe",
    ("cli/quantize.py", "formatter.write_text"): "a line of --help",
    ("aprfmt/fleet/results.py", "self.lines.unlink"): "rows that the Parquet file now holds",
    ("aprfmt/fleet/results.py", "os.replace"): "pyarrow's own file, put in place in one step",
    ("aprfmt/fleet/results.py", "path.open"): "a Parquet file's rows, to be added to",
    ("aprfmt/fleet/summary.py", "tempfile.TemporaryDirectory"): "a database, gone at the end",
    ("cli/quantize.py", "tempfile.TemporaryDirectory"): "a matrix, gone at the end",
    ("inference/rows.py", "self._rows.touch"): "counts a row as used; no file",
    ("aprfmt/formats/npy.py", "np.save"): "into memory; the bytes are published",
    ("cli/demo.py", "out.mkdir"): "the folder of --out; its files are other commands' outputs",
    ("cli/demo.py", "tempfile.TemporaryDirectory"): "a folder of its own, gone at the end",
    ("cli/main.py", "os.open"): "/dev/null in place of a closed pipe",
    ("aprfmt/base/streams.py", "os.open"): "the null device, in place of a closed stream",
    ("aprfmt/tokenizer/hf_engine.py", "open"): "/dev/null for a library's panic report",
}
METHODS = frozenset(
    "write_text write_bytes touch mkdir makedirs rename unlink rmdir rmtree symlink_to hardlink_to "
    "savez save savez_compressed save_file tofile copyfile copytree move symlink mkfifo "
    "TemporaryFile NamedTemporaryFile TemporaryDirectory mkdtemp mkstemp SpooledTemporaryFile "
    "to_file save_pretrained memmap".split()
)
OF_OS = frozenset(
    "write pwrite replace remove link truncate ftruncate chmod fchmod removedirs renames".split()
)
OF_SHUTIL = frozenset("copy copy2 copyfile copytree move rmtree".split())
WRITING = frozenset("wax+")


def writes(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every call of a source file that may make or change a file, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and _may_write(node):
            yield ast.unparse(node.func), node.lineno


def _may_write(node: ast.Call) -> bool:
    if isinstance(node.func, ast.Name):
        return node.func.id == "open" and _mode_writes(node, 1)
    if not isinstance(node.func, ast.Attribute):
        return False
    name, owner = node.func.attr, ast.unparse(node.func.value)
    if owner == "os" and name == "open":
        return len(node.args) < 2 or "O_RDONLY" not in ast.unparse(node.args[1])
    if name == "open" and owner not in ("os", "tarfile"):
        return _mode_writes(node, 1 if owner in ("io", "gzip", "codecs") else 0)
    if name == "fdopen":
        return _mode_writes(node, 1)
    return (
        name in METHODS
        or (owner == "os" and name in OF_OS)
        or (owner == "shutil" and name in OF_SHUTIL)
        or (owner in ("json", "pickle") and name == "dump")
    )


def _mode_writes(node: ast.Call, place: int) -> bool:
    modes = [k.value for k in node.keywords if k.arg == "mode"] + node.args[place : place + 1]
    if not modes or not isinstance(modes[0], ast.Constant):
        return False  # the default, or no mode at all: archives open members by name
    return isinstance(modes[0].value, str) and bool(WRITING & set(modes[0].value))


@cache
def found() -> dict[tuple[str, str], int]:
    """Return (file, call) -> line of everything that may write, publishing modules left out."""
    calls = {}
    for folder in ("aprfmt", "cli", "inference"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            # The links aprfmt/cli and aprfmt/inference; suites that write where a test tells them.
            if path.resolve() != path or name in PUBLISHING or name.startswith("aprfmt/testing/"):
                continue
            for call, line in writes(path):
                calls[name, call] = line
    return calls


def test_only_the_publishing_modules_write() -> None:
    unknown = {key: line for key, line in found().items() if key not in ALLOWED}
    assert not unknown, "write through aprfmt.formats.atomic.FileSet"


def test_what_is_allowed_is_still_there() -> None:
    assert set(ALLOWED) <= set(found())


@pytest.mark.parametrize(
    "line",
    [
        "open(p, 'w')", "open(p, mode='ab')", "p.open('r+')", "p.write_text('x')",
        "np.save(p, x)", "os.open(p, os.O_WRONLY | os.O_CREAT)", "os.open(p)", "os.replace(a, b)",
        "shutil.copy(a, b)", "json.dump(x, f)", "tempfile.mkdtemp()", "os.fdopen(fd, 'wb')",
        "io.open(p, 'x')", "torch.save(x, p)", "p.unlink()",
    ],
)  # fmt: skip
def test_the_check_sees(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(line)
    assert list(writes(tmp_path / "x.py"))


@pytest.mark.parametrize(
    "line",
    ["open(p)", "open(p, 'rb')", "p.open()", "'a'.replace('b', 'c')", "zip.open(member)",
     "os.open(p, os.O_RDONLY)", "os.fdopen(fd, 'rb')", "json.dumps(x)"],
)  # fmt: skip
def test_the_check_lets_pass(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(line)
    assert not list(writes(tmp_path / "x.py"))
