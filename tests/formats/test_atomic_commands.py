"""Every writing command with a destination it cannot write: one line, exit 2, the old file kept."""

import os
import resource
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from aprfmt.cli.commands import COMMANDS
from aprfmt.formats.journal import Journal
from aprfmt.formats.temporary_files import SUFFIX
from tests.cli.run import Done, aprfmt
from tests.conftest import not_run
from tests.conversion.folders import llama_folder
from tests.formats.writers import contents

Args = Callable[[Path, Path], list[object]]  # (model folder, destination) -> arguments

# name of the case -> the command line; what it makes is a file unless FOLDERS says otherwise
WRITING: Mapping[str, Args] = {
    "convert": lambda m, d: ["convert", m, d.with_suffix(".gguf")],
    "convert-folder": lambda m, d: ["convert", m, d, "--to", "safetensors"],
    "import": lambda m, d: ["import", m, "-o", d.with_suffix(".apr")],
    "export": lambda m, d: ["export", m, "--to", "gguf", "-o", d.with_suffix(".gguf")],
    "quantize": lambda m, d: ["quantize", m, d.with_suffix(".gguf"), "--type", "Q8_0"],
    "set": lambda m, d: ["set", m / "model.safetensors", "__metadata__:note=x", "-o",
                         d.with_suffix(".safetensors")],
    "merge": lambda m, d: ["merge", m, d.with_suffix(".gguf")],
    "repair": lambda m, d: ["repair", m / "model.safetensors", "--from", m, "-o",
                            d.with_suffix(".safetensors")],
    "attest": lambda m, d: ["attest", m, "--from", m, "-o", d.with_suffix(".json")],
    "cat": lambda m, d: ["cat", m, "model.norm.weight", "-o", d.with_suffix(".npy")],
    "logits": lambda m, d: ["logits", m, "--ids", "1,2,3", "--out", d.with_suffix(".npy")],
    "trace-save": lambda m, d: ["trace", m, "--payload", "--ids", "1,2,3", "--save",
                                d.with_suffix(".safetensors")],
    "trace-aprt": lambda m, d: ["trace", m, "--payload", "--ids", "1,2,3", "--save-aprt", d],
    "trace-html": lambda m, d: ["trace", m, "--payload", "--ids", "1,2,3", "--html",
                                d.with_suffix(".html")],
    "diagnose-html": lambda m, d: ["diagnose", m, m, "--ids", "1,2", "--html",
                                   d.with_suffix(".html")],
    "parity-html": lambda m, d: ["parity", m, "--between", "numpy:cpu:float32",
                                 "numpy:cpu:float64", "--ids", "1,2", "--html",
                                 d.with_suffix(".html")],
    "inspect-html": lambda m, d: ["inspect", m, "--html", d.with_suffix(".html")],
    "validate-html": lambda m, d: ["validate", m, "--html", d.with_suffix(".html")],
    "diff-html": lambda m, d: ["diff", m, m, "--html", d.with_suffix(".html")],
    "step-html": lambda m, d: ["step", m, "--after", m, "--optimizer", "adamw:lr=1e-3,step=1",
                               "--accept", "unread:*", "--html", d.with_suffix(".html")],
}  # fmt: skip
FOLDERS = {"convert-folder", "trace-aprt"}
# Cases where nothing of the destination is a single name: sets and what lies beside the model.
ELSEWHERE = {"split", "hash", "qa", "demo", "scan"}  # tested below, or with their own command
PARAMETERS = {"dst", "output", "out", "into", "save", "save_aprt", "html", "write", "save_baseline"}
FILES = [name for name in WRITING if name not in FOLDERS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "m"
    return llama_folder(folder, "BF16", hidden=32, layers=1, vocab=8, heads=2, kv_heads=1)


def destination(args: list[object], place: Path) -> Path:
    """Return the argument that lies in `place`."""
    (found,) = (arg for arg in args if isinstance(arg, Path) and place in arg.parents)
    return found


def check_refused(done: Done, says: str) -> None:
    """One line on stderr that names the trouble, and exit 2."""
    assert done.code == 2, done.err
    (line,) = done.err.strip().splitlines()
    assert says in line and "bug" not in line, line


def quiet(folder: Path) -> None:
    """No hidden file is left anywhere below."""
    names = [path.name for path in folder.rglob("*")]
    assert not [n for n in names if n.endswith(SUFFIX) or n.startswith(".aprfmt")]


def test_every_command_that_can_write_is_in_the_table() -> None:
    from importlib import import_module

    writing = set()
    for name, row in COMMANDS.items():
        command = import_module(f"aprfmt.cli.{row.module}").command
        if PARAMETERS & {parameter.name for parameter in command.params}:
            writing.add(name)
    assert writing == {name.partition("-")[0] for name in WRITING} | ELSEWHERE & writing
    assert {"split", "hash"} <= writing


@pytest.mark.parametrize("name", WRITING)
def test_a_missing_parent(name: str, model: Path, tmp_path: Path) -> None:
    args = WRITING[name](model, tmp_path / "absent" / "x")
    check_refused(aprfmt(*args), "make it first")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_a_folder_as_destination(name: str, model: Path, tmp_path: Path) -> None:
    args = WRITING[name](model, tmp_path / "x")
    target = destination(args, tmp_path)
    (target / "precious").mkdir(parents=True)
    check_refused(aprfmt(*args, "--force"), str(target))
    assert [path.name for path in target.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_a_folder_that_holds_something_else(name: str, model: Path, tmp_path: Path) -> None:
    args = WRITING[name](model, tmp_path / "x")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("mine")
    check_refused(aprfmt(*args, "--force"), "thesis.txt")
    assert contents(tmp_path) == {"x/thesis.txt": b"mine"}
    quiet(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_as_destination(name: str, model: Path, tmp_path: Path) -> None:
    args = WRITING[name](model, tmp_path / "x")
    target = destination(args, tmp_path)
    os.mkfifo(target)
    check_refused(aprfmt(*args, "--force"), "is a pipe")
    assert stat.S_ISFIFO(os.stat(target).st_mode)


@pytest.mark.parametrize("name", WRITING)
def test_what_exists_is_kept_without_force_and_replaced_with_it(
    name: str, model: Path, tmp_path: Path
) -> None:
    args = WRITING[name](model, tmp_path / "x")
    assert aprfmt(*args).code in (0, 1)  # 1: the logits of random weights are no distribution
    before = contents(tmp_path)
    assert before
    check_refused(aprfmt(*args), "--force")
    assert contents(tmp_path) == before
    assert aprfmt(*args, "--force").code in (0, 1)
    assert contents(tmp_path).keys() == before.keys()
    quiet(tmp_path)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Let the system refuse files of more than `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", WRITING)
def test_a_file_limit_leaves_the_old_output(name: str, model: Path, tmp_path: Path) -> None:
    args = WRITING[name](model, tmp_path / "x")
    assert aprfmt(*args).code in (0, 1)
    before = contents(tmp_path)
    with file_limit(20):
        done = aprfmt(*args, "--force")
    check_refused(done, "ulimit -f")
    assert contents(tmp_path) == before
    quiet(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        not_run("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_leaves_the_old_output(name: str, model: Path, disk: Path) -> None:
    args = WRITING[name](model, disk / "x")
    assert aprfmt(*args).code in (0, 1)
    before = contents(disk)
    free = os.statvfs(disk)
    (disk / ".filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
    check_refused(aprfmt(*args, "--force"), "free some space")
    assert contents(disk) == before
    quiet(disk)


@pytest.mark.parametrize("name", WRITING)
def test_a_read_only_place(name: str, model: Path, disk: Path) -> None:
    args = WRITING[name](model, disk / "x")
    assert aprfmt(*args).code in (0, 1)
    before = contents(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    check_refused(aprfmt(*args, "--force"), "write elsewhere")
    assert contents(disk) == before


def test_a_split_is_refused_like_everything_else(model: Path, tmp_path: Path) -> None:
    single, shards = tmp_path / "m.gguf", tmp_path / "s.gguf"
    assert aprfmt("convert", model, single).code == 0
    args = ["split", single, shards, "--max-shard-size", "4K"]
    check_refused(aprfmt("split", single, tmp_path / "absent" / "s.gguf", *args[3:]), "make it")
    assert aprfmt(*args).code == 0
    before = contents(tmp_path)
    check_refused(aprfmt(*args), "--force")
    with file_limit(3000):
        check_refused(aprfmt(*args, "--force"), "ulimit -f")
    assert contents(tmp_path) == before
    quiet(tmp_path)


def test_a_hash_manifest_is_refused_like_everything_else(model: Path, tmp_path: Path) -> None:
    single = tmp_path / "m.gguf"
    assert aprfmt("convert", model, single).code == 0
    assert aprfmt("hash", single, "--write").code == 0
    before = contents(tmp_path)
    check_refused(aprfmt("hash", single, "--write"), "--force")
    with file_limit(20):
        check_refused(aprfmt("hash", single, "--write", "--force"), "ulimit -f")
    assert contents(tmp_path) == before
    quiet(tmp_path)


def test_the_source_may_be_the_destination(model: Path, tmp_path: Path) -> None:
    for extension in ("gguf", "apr", "safetensors"):
        path = tmp_path / f"m.{extension}"
        assert aprfmt("convert", model, path).code == 0
        hashes = aprfmt("hash", path, "--json").json["tensors"]
        assert aprfmt("convert", path, path, "--force").code == 0
        key = "__metadata__:note" if extension == "safetensors" else "general.name"
        done = aprfmt("set", path, f"{key}=other", "-o", path, "--force")
        assert done.code == 0, done.err
        assert aprfmt("hash", path, "--json").json["tensors"] == hashes
    quiet(tmp_path)


def test_a_mixed_set_is_refused_until_a_run_completes_it(model: Path, tmp_path: Path) -> None:
    single, shards = tmp_path / "m.gguf", tmp_path / "s.gguf"
    assert aprfmt("convert", model, single).code == 0
    args = ["split", single, shards, "--max-shard-size", "4K"]
    assert aprfmt(*args).code == 0
    first = min(tmp_path.glob("s-*.gguf"))
    journal = tmp_path / ".aprfmt-journal-0123456789abcdef.json"
    left = f".{first.name}.1-00000000-00000000{SUFFIX}"
    (tmp_path / left).write_bytes(first.read_bytes())
    facts = (tmp_path / left).stat()
    identity = f"{facts.st_ino}:{facts.st_size}:{facts.st_uid}"
    journal.write_bytes(Journal(journal.name, [(left, first.name)], [], {left: identity}).dumps())
    check_refused(aprfmt("inspect", first), "old and new files are mixed")
    done = aprfmt(*args, "--force")
    assert done.code == 0 and f"completed: {first.name}" in done.err
    assert not journal.exists()
    assert aprfmt("inspect", first).code == 0
