"""Streams that lack characters: every command prints to cp1252, latin-1 and cp437, none raises.

Seen red: without `spell_missing` in `main`, `tree` and whatever prints the model's name. And
streams that are closed or full.
"""

import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aprfmt.base.streams import OURS, spell_missing
from aprfmt.cli.commands import COMMANDS
from tests.base.test_text_escape import unescape
from tests.cli.examples import make_examples
from tests.cli.run import aprfmt

NAME = "Grüße ☃ 模型"
TEXT = "Once upon a time there was a small model that told the same story twice.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the examples, its model named by characters that Western code pages lack."""
    made = tmp_path_factory.mktemp("streams") / "模型"
    made.mkdir()
    make_examples(made, NAME)
    return made


class Streams:
    """stdout and stderr of an encoding, as the interpreter opens them."""

    def __init__(self, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.encoding = encoding
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(self.out, encoding, "strict"))
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(self.err, encoding, "backslashreplace"))

    def run(self, *args: str) -> tuple[int, str, str]:
        """Run a command on them; its exit code and both texts, decoded."""
        from aprfmt.cli.main import main

        with pytest.raises(SystemExit) as stop:
            main(list(args))
        sys.stdout.flush()
        sys.stderr.flush()
        return int(stop.value.code or 0), *(  # type: ignore[return-value]
            stream.getvalue().decode(self.encoding) for stream in (self.out, self.err)
        )


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "cp437"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_to_a_stream_that_lacks_characters(
    name: str, encoding: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(COMMANDS[name].example)[1:]
    words = [word if word not in ("parts/model.gguf", "out.gguf", "small.gguf", "renamed.gguf",
                                  "one.gguf", "whole.gguf", "logits.npy")
             else str(tmp_path / Path(word).name) for word in words]  # fmt: skip
    if name in ("import", "export", "hash"):
        words += ["--force"]
    code, out, err = Streams(encoding, monkeypatch).run(*words)
    assert code == 0 and "bug:" not in err, err
    assert out or name == "logits"


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_what_is_missing_is_spelled_and_the_rest_stays(
    encoding: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, out, _ = Streams(encoding, monkeypatch).run("inspect", "model.gguf")
    assert code == 0
    assert "Grüße \\u2603 \\u6a21\\u578b" in out
    assert NAME in unescape(out)


def test_lines_of_a_tree_have_a_plain_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plain = aprfmt("tree", "model.gguf").out
    _, out, _ = Streams("cp1252", monkeypatch).run("tree", "model.gguf")
    for theirs, ours in OURS.items():
        if theirs in plain:
            plain = plain.replace(theirs, ours)
    assert out == plain and "`-- " in out and "\\u" not in out


def test_generated_text_is_spelled_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    args = ("run", "model", "--ids", "5,80,300", "--max-tokens", "3", "--temperature", "50",
            "--seed", "{}")  # fmt: skip
    for seed in range(6):
        words = [word.format(seed) for word in args]
        expected = aprfmt(*words).out
        code, out, err = Streams("cp1252", monkeypatch).run(*words)
        assert code == 0 and "bug:" not in err
        assert unescape(out) == unescape(expected)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_each_width_of_an_escape_is_that_of_python(encoding: str) -> None:
    """The last code of one width and the first of the next, by Python's own handler."""
    edges = [0x80, 0x81, 0xFF, 0x100, 0xD7FF, 0xE000, 0xFFFD, 0xFFFF, 0x10000, 0x10001, 0x10FFFF]
    text = "".join(map(chr, edges)) + "1F"  # digits behind an escape that is short belong to it
    held = io.BytesIO()
    stream = io.TextIOWrapper(held, encoding, "strict")
    spell_missing(stream)
    stream.write(text)
    stream.flush()
    assert held.getvalue() == text.encode(encoding, "backslashreplace")


def test_a_stream_that_replaces_already_or_is_no_file_stays() -> None:
    kept = io.TextIOWrapper(io.BytesIO(), "cp1252", "replace")
    spell_missing(kept, io.StringIO())
    assert kept.errors == "replace"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of a POSIX shell, with `aprfmt` for this one."""
    if line.startswith("aprfmt "):
        line = f"{shlex.quote(sys.executable)} -m {line}"
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, capture_output=True, text=True, check=False
    )


POSIX = pytest.mark.skipif(sys.platform == "win32", reason="NOT-RUN: a POSIX shell is needed")


@POSIX
@pytest.mark.parametrize("line", ["aprfmt inspect model", "aprfmt convert model new.gguf"])
def test_a_closed_stdout_is_said_before_anything_is_done(line: str, folder: Path) -> None:
    done = shell(f"{line} >&-", folder)
    assert done.returncode == 2 and not (folder / "new.gguf").exists()
    assert done.stderr.startswith("aprfmt: standard output is closed;")
    assert done.stderr.count("\n") == 1


@POSIX
@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_no_file_takes_the_number_of_a_closed_stream(closed: str, folder: Path) -> None:
    """What a library prints to stderr would go into the file that has its number."""
    script = (
        "import os, sys; from aprfmt.cli.main import main; import aprfmt.formats.output_file as f; "
        "real = f.OutputFile.write; "
        "f.OutputFile.write = lambda self, data: (os.write(2, b'a warning'), real(self, data))[1]; "
        "main(['convert', 'model', sys.argv[1]])"
    )
    run = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    assert shell(f"{run} a.gguf", folder).returncode == 0
    assert shell(f"{run} b.gguf {closed}", folder).returncode == 0
    whole = [(folder / name) for name in ("a.gguf", "b.gguf")]
    assert whole[0].read_bytes() == whole[1].read_bytes()
    for path in whole:
        path.unlink()
    assert shell(f"aprfmt inspect no.gguf {closed}", folder).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT-RUN: there is no /dev/full")
@pytest.mark.parametrize("form", ["", "--json", "--format junit", "--json --debug"])
@pytest.mark.parametrize("line", ["validate model", "validate none.gguf"])
def test_a_full_stdout_is_one_line(line: str, form: str, folder: Path) -> None:
    done = shell(f"aprfmt {line} {form} > /dev/full", folder)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    if "none" in line:
        assert last.startswith("aprfmt: none.gguf: no such file or folder")
    else:
        assert last == (
            "aprfmt: standard output: cannot be written: No space left on device; free some space "
            "or write elsewhere"
        )
    assert "--debug" in form or done.stderr.count("\n") == 1
