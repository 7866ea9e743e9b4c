"""The forms of an answer: which is chosen, and that `agent` is short, plain and says the same.

Seen red: a thirteenth line, a colour, an exit code of its own, --format human without effect where
a variable is set, a `next:` that does not run.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from aprfmt.cli import output_format, render
from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.main import group
from tests.cli.run import ROOT, Done, aprfmt
from tests.patience import PATIENCE

IDS = "1417,362,258,1168,1529,457,72"
# Commands that answer a question: at most 12 lines. `{}` is a folder with the files made below.
VERDICTS = [
    "diff {m} {q}", "diff {m} {bad}", "diff {m} {bad} --base {m}", "diff {m} {m}",
    "diff {m} {other}", "diff {m} {cut}", "diff {m} {q} --sample 100K",
    "diagnose {m} {other}", "diagnose {m} {q}", "attest {q} --from {m}", "attest {bad} --from {m}",
    "attest {other} --from {m}",
    "validate {q}", "validate {cut}", "validate {bad} --against {m}", "validate {nan}",
    "qa {q} --only tensor-contract --only metadata", "qa {nan} --only init-statistics",
    "scan {m} {cut} -o {rows} --checks layout",
    f"parity {{m}} --between numpy numpy:float64 --ids {IDS}",
    "inspect {m}", "inspect {q}", "inspect {cut}", "doctor",
    f"eval {{q}} --ids {IDS} --against {{m}}", f"logits {{m}} --ids {IDS}",
    f"trace {{q}} --payload --ids {IDS} --reference {{m}}",
    f"trace {{m}} --payload --ids {IDS} --reference {{m}}",
    "convert {m} {new}", "quantize {m} {new} --type Q4_K_M", "demo",
    "repair {cut} --from {q} -o {new}", "hash {q} --check {manifest}", "explain Q4_K",
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, Path]:
    """Return the files that the commands name: sound, quantized, damaged, cut, with NaN, edited."""
    folder = tmp_path_factory.mktemp("forms")
    names = ("q.gguf", "bad.gguf", "cut.gguf", "nan.gguf", "other.gguf", "plain.gguf")
    made = {name.partition(".")[0]: folder / name for name in names}
    m = demo_model.parent if demo_model.is_file() else demo_model
    for args in (
        ("quantize", m, made["q"], "--type", "Q4_K_M"), ("convert", m, made["plain"]),
        ("set", made["plain"], "qwen2.rope.freq_base=10000", "-o", made["other"]),
        ("hash", made["q"], "--write"),
    ):  # fmt: skip
        assert aprfmt(*args, "--quiet").code == 0, args
    where = next(
        row["offset"] for row in aprfmt("tensors", made["q"], "L0.attn_q.weight", "--json").json[
            "tensors"]
    )  # fmt: skip
    data = bytearray(made["q"].read_bytes())
    made["cut"].write_bytes(data[: len(data) // 2])
    data[where + 200] ^= 0x10
    made["bad"].write_bytes(data)
    data[where : where + 2] = b"\xff\x7f"
    made["nan"].write_bytes(data)
    manifest = made["q"].with_name("q.gguf.aprfmt-hash.json")
    return {**made, "m": m, "manifest": manifest, "rows": folder / "rows.jsonl"}


def run(command: str, files: dict[str, Path], tmp_path: Path, *more: str) -> Done:
    """Run one of VERDICTS with more options."""
    named = {name: shlex.quote(str(path)) for name, path in files.items()}
    new = tmp_path / f"new{len(list(tmp_path.iterdir()))}.gguf"
    return aprfmt(*shlex.split(command.format(**named, new=new)), *more)


@pytest.mark.parametrize("command", VERDICTS)
def test_an_answer_for_agents_is_short_plain_and_the_same(
    command: str, files: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("rows", "new"):
        if name in files:
            files[name].unlink(missing_ok=True)
    short = run(command, files, tmp_path, "--format", "agent")
    files["rows"].unlink(missing_ok=True)
    whole = run(command, files, tmp_path, "--format", "human")
    assert short.code == whole.code, (short, whole)
    lines = short.out.splitlines()
    assert 1 <= len(lines) <= output_format.LINES, short.out
    if command.split()[0] in ("validate", "qa", "eval", "hash"):  # seen red: up to 41 lines
        shown = whole.out.splitlines()
        assert len(shown) <= output_format.LINES and (
            whole.code or "PASS" in whole.out.upper() or "equal" in shown[0]
        )
    assert "\x1b" not in short.out and "\r" not in short.out
    for line in lines:  # a list that is cut says where the rest is
        assert not re.search(r"\.\.\. \d+ more", line) or "--json" in line or "-v" in line, line
    if short.code == 1:
        assert not lines[0].startswith(("PASS", "equal", "derived", "precision", "same")), lines


NEXT = [command for command in VERDICTS if command.split()[0] in (
    "diff", "diagnose", "attest", "validate", "qa", "scan", "trace")]  # fmt: skip


@pytest.mark.parametrize("command", NEXT)
def test_what_is_not_done_says_the_next_command_and_it_runs(
    command: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files["rows"].unlink(missing_ok=True)
    monkeypatch.chdir(tmp_path)
    found = run(command, files, tmp_path, "--format", "agent")
    steps = re.findall(r"^next: aprfmt (.+)$", found.out, re.M)
    if found.code == 0:
        assert not steps
        return
    if command == "diagnose {m} {q}":  # what is quantized is no bug: nothing to mend
        return
    assert steps, found.out
    for step in steps:
        step = re.sub(r"\bbad-fixed\.gguf$", str(tmp_path / "fixed.gguf"), step)
        again = aprfmt(*shlex.split(step))
        said = f"aprfmt {step}: exit {again.code}\n{again.err}"
        assert again.code in (0, 1) or "is damaged" in again.err, said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_every_form(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    option = next(param for param in command.params if "--format" in param.opts)
    assert isinstance(option.type, click.Choice)
    choices = tuple(option.type.choices)
    assert choices in (output_format.FORMS, output_format.CI_FORMS)


def environment(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **more}


def piped(*args: object, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", *map(str, args)], capture_output=True, text=True,
        timeout=PATIENCE, check=False, env=environment(**variables),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("variable", output_format.AGENT_VARIABLES)
def test_an_agents_variable_chooses_its_form(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output_format.answer_format() == "human"
    monkeypatch.setenv(variable, "1")
    assert output_format.answer_format() == "agent"
    for off in ("", "0", "false"):
        monkeypatch.setenv(variable, off)
        assert output_format.answer_format() == "human"


def test_what_is_asked_for_wins_over_the_environment(demo_model: Path) -> None:
    human, agent = piped("inspect", demo_model), piped("inspect", demo_model, CLAUDECODE="1")
    assert len(agent.splitlines()) <= output_format.LINES < len(human.splitlines())
    assert piped("inspect", demo_model, "--format", "agent") == agent
    assert piped("inspect", demo_model, "--format", "human", CLAUDECODE="1") == human
    for asked in (("--json",), ("--format", "json"), ("--json", "--format", "human")):
        body = json.loads(piped("inspect", demo_model, *asked, CLAUDECODE="1"))
        assert body["command"] == "inspect"


def test_a_terminal_is_a_persons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AI_AGENT", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert output_format.answer_format() == "human"


def test_a_list_that_was_asked_for_is_whole(files: dict[str, Path]) -> None:
    rows = aprfmt("tensors", files["q"], "--format", "agent").out.splitlines()
    assert len(rows) == 51
    found = aprfmt("diff", files["m"], files["bad"], "-v", "--format", "agent").out
    assert not re.search(r"\.\.\. \d+ more (findings|\(--json\))", found)


def test_what_does_not_fit_is_counted_and_the_command_stays() -> None:
    lines = [(f"line {i}", "") for i in range(30)] + [("next: aprfmt doctor", "head")]
    found = render.shorten_answer(lines)
    assert len(found) == output_format.LINES
    assert found[-1][0] == "next: aprfmt doctor" and found[0][0] == "line 0"
    assert found[-2][0].startswith("... 20 more lines")
    assert render.shorten_answer(lines[:12]) == lines[:12]
    for order in (lines, [*lines[:-2], lines[-1], lines[-2]]):
        for kept in (0, 1, 2, 5):
            found = render.shorten_answer(order, kept=kept)
            assert len(found) == output_format.LINES and lines[-1] in found
            shown = max(kept, 1)
            assert found[-2 - (shown - 1)][0].startswith(f"... {len(lines) - 11} more lines")
            assert kept < 2 or list(found[-kept:]) == order[-kept:]


def test_the_page_names_every_variable() -> None:
    text = (ROOT / "docs" / "reference" / "json.md").read_text()
    assert [name for name in output_format.AGENT_VARIABLES if f"`{name}`" not in text] == []
