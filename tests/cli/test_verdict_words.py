"""The word that an answer begins with and its exit code say the same, in every command.

A grid of small pairs is put to all commands that compare two sides. Seen red: `equal in what was
compared`, exit 1, of two files without a tensor, one of whose keys differs.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from aprfmt.diagnosis.records import KINDS
from tests.cli.run import Done
from tests.cli.run import aprfmt as command
from tests.cli.verdict_pairs import PAIRS, make_pair

_EQUAL: Mapping[int, tuple[str, ...]] = {0: ("equal",), 1: ("different",), 2: ("not decided",)}
# {command and its options: {exit code: the words that its headline may begin with}}
WORDS: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "diff": _EQUAL,
    "diff --only tensors": _EQUAL,
    "diff --only metadata": _EQUAL,
    "diff --only tokenizer": _EQUAL,
    "diff --only hyperparameters": _EQUAL,
    "diff --sample 50M --seed 1": {**_EQUAL, 2: ("not decided", "not shown to be equal")},
    "diagnose": {
        0: (KINDS["same"], KINDS["precision"]),
        1: (KINDS["bug"], KINDS["derived"], KINDS["not_exercised"]),
        2: (KINDS["not_comparable"],),
    },
    "attest": {0: ("derived",), 1: ("not derived",), 2: ("not decided",)},
    "validate --against": {0: ("PASS",), 1: ("FAIL",), 2: ("not decided", "NOT-RUN")},
    "hash --check": {
        0: ("equal to the manifest",), 1: ("not what the manifest says",), 2: ("not decided",),
    },
}  # fmt: skip
SAID_OF_A_PART = (  # below a headline of exit code 0, of a part that it takes for equal
    " different", " only in A", " only in B", "that differ", " unequal",
)  # fmt: skip


def ask(name: str, a: Path, b: Path, *more: str) -> Done:
    """Run one command of WORDS on two sides; A is the source, the reference, the manifest's."""
    words = name.split()
    if name == "attest":
        return command("attest", b, "--from", a, *more)
    if name == "validate --against":
        return command("validate", b, "--against", a, *more)
    if name == "hash --check":
        written = command("hash", a, "--write", "--force", "--json")
        if written.code:
            return written
        manifest = Path(written.json["written"])
        kept = manifest.rename(a.parent / "manifest.json")
        return command("hash", b, "--check", kept, *more)
    return command(words[0], a, b, *words[1:], *more)


def check_headline(name: str, a: Path, b: Path) -> None:
    """Ask one command; its first words are those of its exit code, and no line says otherwise."""
    done = ask(name, a, b)
    if not done.out:  # refused: nothing was said but an error
        assert done.code == 2 and done.err
        return
    lines = [line for line in done.out.splitlines() if not line.startswith(" ")]
    begins = lines if "--sample" in name else lines[:1]  # what was drawn comes first
    assert any(line.startswith(WORDS[name][done.code]) for line in begins), done.out
    assert done.code or not any(text in done.out for text in SAID_OF_A_PART), done.out


def check_json(name: str, a: Path, b: Path) -> None:
    """Ask one command for JSON; its word, its sentence, `exit` and its exit code agree."""
    done = ask(name, a, b, "--json")
    if "error" in done.json:
        assert done.code == 2
        return
    said = done.json["pronounced"]
    assert said["exit"] == done.json["exit"] == done.code
    assert said["word"].startswith(WORDS[name][done.code]), said
    assert said["says"].startswith(WORDS[name][done.code]), said


@pytest.mark.parametrize("pair", PAIRS)
def test_word_and_exit_code_agree(pair: str, demo_model: Path, tmp_path: Path) -> None:
    a, b = make_pair(pair, demo_model, tmp_path)
    for name in WORDS:
        check_headline(name, a, b)
        check_json(name, b, a)


@pytest.mark.parametrize("name", WORDS)
def test_every_command_has_pairs_of_both_answers(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    """Else the grid would hold for a command that always says the same."""
    codes = set()
    for pair in ("nothing", "a matrix", "no tensor, no key", "two tokens"):
        folder = tmp_path / pair
        folder.mkdir()
        codes.add(ask(name, *make_pair(pair, demo_model, folder)).code)
    assert len(codes) > 1, codes
