"""`aprfmt demo --into DIR`: the shipped model as a folder that this and other tools read."""

from pathlib import Path

import pytest

from aprfmt.cli import demo, render
from tests.cli.run import aprfmt, process
from tests.conftest import ROOT

SHIPPED = {path.name for path in (ROOT / "fixtures" / "demo").iterdir()
           if path.suffix in (".json", ".safetensors", ".jinja")}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_shipped_model_is_written_whole(demo_model: Path, tmp_path: Path) -> None:
    done = process("demo", "--into", "demo", cwd=tmp_path)
    assert (done.code, done.err) == (0, "") and done.out.startswith("wrote demo")
    written = contents(tmp_path / "demo")
    assert set(written) == SHIPPED and "golden.json" in written
    assert all((demo_model / name).read_bytes() == data for name, data in written.items())
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert aprfmt("diff", demo_model, tmp_path / "demo").code == 0
    body = aprfmt("demo", "--into", tmp_path / "other", "--json").json
    assert body["folder"] == str(tmp_path / "other") and body["steps"] == []
    assert {Path(path).name for path in body["files"]} == SHIPPED
    assert all(Path(path).is_file() for path in body["files"])


def test_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert aprfmt("demo", "--into", tmp_path / "demo", "--quiet").out == ""
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo")
    assert sum(value.numel() for value in model.parameters()) == 2_756_864
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "demo")
    assert tokenizer.decode(tokenizer("It is a truth")["input_ids"]) == "It is a truth"


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    """Files in a folder are replaced only with --force, and only if they are the demo's own."""
    target = tmp_path / "demo"
    target.mkdir()
    assert aprfmt("demo", "--into", target).code == 0  # an empty folder is there to be filled
    (target / "config.json").write_text("{}")
    refused = aprfmt("demo", "--into", target)
    assert refused.code == 2 and "not empty; use --force" in refused.err
    assert (target / "config.json").read_text() == "{}"
    assert aprfmt("demo", "--into", target, "--force").code == 0
    assert (target / "config.json").read_text() != "{}"
    (target / "thesis.txt").write_text("mine")
    before = contents(target)
    for option in ((), ("--force",)):
        refused = aprfmt("demo", "--into", target, *option)
        assert refused.code == 2 and refused.err.count("\n") == 1
        assert contents(target) == before
    assert "thesis.txt" in refused.err


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.formats.output_file import OutputFile

    written = []

    def write(self: OutputFile, data: bytes) -> int:
        written.append(self.path.name)
        if len(written) == len(SHIPPED) - 1:
            raise OSError(28, "No space left on device", str(self.path))
        return len(data)

    monkeypatch.setattr(OutputFile, "write", write)
    done = aprfmt("demo", "--into", tmp_path / "demo")
    assert done.code == 2 and "No space left" in done.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--into", "{0}/a/b"), "no folder"),
        (("--into", "{0}/file"), "is a file"),
        (("--into", "{0}/a", "--out", "{0}/b"), "--out"),
        (("--force",), "--into"),
    ],
)
def test_what_cannot_be_done_is_one_line(args: tuple[str, ...], says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = aprfmt("demo", *(word.format(tmp_path) for word in args))
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("wrong", [False, True])
def test_every_step_says_what_it_is_for_and_gives_its_command(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step that ran is the first with another exit code than expected."""
    ran: list[list[str]] = []

    def run(group: object, args: list[str], silent: bool) -> int:
        ran.append(args)
        return 2 if wrong and len(ran) == 2 else steps[len(ran) - 1][2]

    styles: dict[str, str] = {}
    say = render.say

    def note(text: str, *, style: str = "") -> None:
        styles[text] = style
        say(text, style=style)

    monkeypatch.setattr(demo, "run_command", run)
    monkeypatch.setattr(render, "say", note)
    steps = demo.demo_steps(tmp_path / "out")
    done = aprfmt("demo", "--out", tmp_path / "out")
    assert done.code == int(wrong) and len(ran) == (2 if wrong else len(steps))
    at = 0
    for (why, args, _), mine in zip(steps, ran, strict=False):
        assert mine == args
        at = done.out.index(f"# {why}\n$ {demo.command_line(args)}\n", at)
    ran.clear()
    short = aprfmt("demo", "--out", tmp_path / "short", "--format", "agent")
    count = "1 of 2" if wrong else f"{len(steps)} of {len(steps)}"
    first, *rest = short.out.splitlines()
    assert first.endswith(f": {count} steps gave the exit code that they should")
    assert (first[:4], styles[first]) == (("FAIL", "bad") if wrong else ("PASS", "good"))
    assert any(line.startswith("  exit 2, expected 0: aprfmt ") for line in rest) == wrong
