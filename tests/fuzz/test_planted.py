"""No command passes a string of a file unescaped to a terminal, a log, a page or JSON.

Checked are both streams of every reading command over models whose every string is hostile.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aprfmt.cli.commands import COMMANDS
from tests.cli.run import Done, aprfmt
from tests.fuzz import planted
from tests.fuzz.planted import NAME, PLANTED

HARMFUL = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
# Read nothing, or need what no damaged file gives; qa runs the gates on a working model.
SPEAKING = ("template", "run")  # whose output is the model's own text, line by line
NOT_READING = {"demo", "explain", "doctor", "qa"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("planted")
    made = {
        "folder": planted.folder(root),
        "gguf": planted.gguf(root / f"{planted.FILE}.gguf"),
        "gguf-unknown": planted.gguf(root / f"{planted.FILE}-u.gguf", planted.NASTY),
        "gguf-bytes": planted.gguf(root / f"{planted.FILE}-b.gguf", damaged=True),
        "apr": planted.apr(root / f"{planted.FILE}.apr"),
        "apr-unknown": planted.apr(root / f"{planted.FILE}-u.apr", planted.NASTY),
        "safetensors": planted.safetensors(_folder(root) / f"{planted.FILE}.safetensors"),
        "index": planted.index(root),
        "trace": planted.trace(root / f"{planted.FILE}-trace.safetensors"),
        "absent": root / f"{planted.NASTY.replace('/', '').replace(chr(0), '')}.gguf",
    }
    for name in ("gguf", "apr", "safetensors"):  # cut in the middle: messages quote what they find
        data = made[name].read_bytes()
        cut = made[name].with_name("cut-" + made[name].name)
        cut.write_bytes(data[: len(data) * 2 // 3])
        made[f"{name}-cut"] = cut
    return made


def _folder(root: Path) -> Path:
    (root / "alone").mkdir()
    return root / "alone"


MODELS = (
    "folder", "gguf", "gguf-unknown", "gguf-bytes", "apr", "apr-unknown", "safetensors", "index",
    "trace", "absent", "gguf-cut", "apr-cut", "safetensors-cut",
)  # fmt: skip
Lines = Callable[[Path, Path], list[list[object]]]  # (model, scratch folder) -> command lines

COMMAND_LINES: dict[str, Lines] = {
    "inspect": lambda m, d: [["inspect", m], ["inspect", m, "--partial"],
                             ["inspect", m, "--account", "--format", "agent"]],
    "tensors": lambda m, d: [["tensors", m], ["tensors", m, "--stats"], ["tensors", m, NAME]],
    "tree": lambda m, d: [["tree", m]],
    "hex": lambda m, d: [["hex", m], ["hex", m, NAME]],
    "cat": lambda m, d: [["cat", m, NAME], ["cat", m, "nothing"]],
    "import": lambda m, d: [["import", m, "-o", d / "x.apr", "--force"]],
    "export": lambda m, d: [["export", m, "--to", "gguf", "-o", d / "x.gguf", "--force"]],
    "convert": lambda m, d: [["convert", m, d / "hf", "--to", "safetensors", "--force"],
                             ["convert", m, d / "x.gguf", "--arch", "none", "--force"]],
    "quantize": lambda m, d: [["quantize", m, d / "x.gguf", "--type", "Q8_0", "--dry-run"]],
    "set": lambda m, d: [["set", m, f"__metadata__:{NAME}=x", "-o", d / "s", "--force"]],
    "split": lambda m, d: [["split", m, d / "s.gguf", "--max-shard-size", "1K", "--force"]],
    "merge": lambda m, d: [["merge", m, d / "s.gguf", "--force"]],
    "repair": lambda m, d: [["repair", m, "--from", m, "-o", d / "r", "--force"],
                            ["repair", m, "--partial", "-o", d / "r", "--force"]],
    "diff": lambda m, d: [["diff", m, m], ["diff", m, m, "--html", d / "d.html", "--force"]],
    "diagnose": lambda m, d: [["diagnose", m, m, "--ids", "1,2"]],
    "attest": lambda m, d: [["attest", m, "--from", m, "-o", d / "a.json", "--force"],
                            ["attest", m, "--from", m, "--check", m, "--format", "agent"]],
    "step": lambda m, d: [["step", m, "--after", m, "--optimizer", "adamw:lr=1e-3,step=1"],
                          ["step", m, "--after", m, "--grads", m, "--html", d / "t.html",
                           "--force"]],
    "hash": lambda m, d: [["hash", m], ["hash", m, "--check", m]],
    "scan": lambda m, d: [["scan", m, "-o", d / "rows.jsonl", "--jobs", "1"]],
    "validate": lambda m, d: [["validate", m], ["validate", m, "--strict"],
                              ["validate", m, "--format", "agent"]],
    "tokenize": lambda m, d: [["tokenize", m, f"ab <{planted.NASTY.replace(chr(0), '')}>"]],
    "template": lambda m, d: [["template", m, "--user", "hi"]],
    "trace": lambda m, d: [["trace", m],
                           ["trace", m, "--payload", "--ids", "1,2", "--html", d / "t.html",
                            "--force"],
                           ["trace", "--load", m, "--html", d / "l.html", "--force"]],
    "logits": lambda m, d: [["logits", m, "--ids", "1,2"]],
    "parity": lambda m, d: [["parity", m, "--between", "cpu", "cpu", "--ids", "1,2"]],
    "run": lambda m, d: [["run", m, "--prompt", "ab", "--max-tokens", "3"]],
    "eval": lambda m, d: [["eval", m, "--ids", "1,2,3"]],
}  # fmt: skip


def test_every_reading_command_is_in_the_table() -> None:
    assert set(COMMANDS) - NOT_READING <= set(COMMAND_LINES)


def check_text(text: str, line: object) -> None:
    """Nothing that moves a cursor or turns text, and no line that a file began."""
    bad = {hex(ord(c)) for c in text if c != "\n" and unicodedata.category(c) in HARMFUL}
    assert not bad, f"{line}: {bad} in {text[:2000]!r}"
    if isinstance(line, list) and line[0] in SPEAKING:
        return
    for row in text.split("\n"):
        assert not row.lstrip().startswith(PLANTED), f"{line}: a file began a line: {row!r}"


def check(done: Done, line: list[object]) -> None:
    assert done.code in (0, 1, 2), line
    assert "bug:" not in done.err, done.err
    check_text(done.out, line)
    check_text(done.err, line)
    if done.code == 2 and "--debug" not in line:
        errors = [row for row in done.err.splitlines() if not row.startswith("warning: ")]
        assert len(errors) <= 1, done.err


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [name for name in COMMAND_LINES if name in COMMANDS])
def test_nothing_of_a_file_is_shown_raw(
    name: str, model: str, files: dict[str, Path], tmp_path: Path
) -> None:
    for line in COMMAND_LINES[name](files[model], tmp_path):
        check(aprfmt(*line), line)
    line = [*COMMAND_LINES[name](files[model], tmp_path)[0], "--json"]
    done = aprfmt(*line)
    check(done, line)
    assert done.out.isascii() and done.out.count("\n") == 1
    list(strings(json.loads(done.out)))
    for page in tmp_path.glob("*.html"):
        check_page(page.read_text())


def check_page(text: str) -> None:
    """The page has our own scripts only, and no tag or attribute that a file made."""
    check_text(re.sub(r"\n\s*", "\n", text), "a page")
    assert "alert(1)</script>" not in text
    assert not re.search(r"<img|<[^>]*\sonerror", text)


@pytest.mark.parametrize("model", ["gguf-cut", "absent", "index"])
def test_a_traceback_shows_nothing_raw_either(model: str, files: dict[str, Path]) -> None:
    done = aprfmt("inspect", files[model], "--debug")
    assert done.code == 2 and "Traceback" in done.err
    check_text(done.err, "inspect --debug")


def test_the_check_sees_what_is_raw() -> None:
    for text in ("\x1b[2J", "a\u202eb", "\x9b", "\rx", f"ok\n  {PLANTED}: x", "\ud800"):
        with pytest.raises(AssertionError):
            check_text(text, "x")
    check_text("aprfmt: fine\nn\\x1b PLANTED", "x")
    with pytest.raises(AssertionError):
        check_page("<p><img src=x></p>")
