"""Pages of the site that tables and the commands' own help already say: made, never written.

Every page also stands in the site as the Markdown it was made of, under its source's path, and
`llms.txt` (https://llmstxt.org) lists these: an agent reads them without the site's HTML.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from aprfmt.arch import ARCHS
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.outcome import EXIT_CODES
from aprfmt.cli.commands import COMMANDS, GROUPS
from aprfmt.cli.main import group
from aprfmt.codecs import CODECS
from aprfmt.formats import FORMATS

SKILL = Path(__file__).parent.parent / "aprfmt" / ".agents" / "skills" / "aprfmt"
EXAMPLES = Path(__file__).with_name("examples.md")  # a section for every command, run by a test


def table(head: str, rows: list[tuple[Any, ...]]) -> str:
    """Return a Markdown table; `head` has the columns between bars."""
    lines = [f"| {head} |", "|" + " --- |" * (head.count("|") + 1)]
    lines += [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def command_page(name: str) -> str:
    """Return the page of one command: an example with what it prints, and its own help."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    context = click.Context(command, info_name=f"aprfmt {name}", max_content_width=96)
    return (
        f"# aprfmt {name}\n\n{COMMANDS[name].summary}\n\n## Example\n\n{example(name)}\n\n"
        f"## Options\n\n```text\n{command.get_help(context)}\n```\n"
    )


def example(name: str) -> str:
    """Return what docs/examples.md has under a command's name; KeyError where there is none."""
    parts = re.split(r"^## (\S+)$", EXAMPLES.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[name].strip()


def command_index() -> str:
    """Return the list of commands."""
    page = "# Commands\n\nEvery command has `--json`, `--quiet` and `--debug`.\n"
    for title, group_rows in GROUPS.items():
        rows = [(f"[`{name}`]({name}.md)", row.summary) for name, row in group_rows.items()]
        page += f"\n## {title}\n\n" + table("command | does", rows)
    return page


def formats() -> str:
    """Return what each container can hold."""
    rows = [
        (
            name,
            ", ".join(spec.extensions),
            spec.style.upper(),
            "as F32" if spec.vectors_f32 else "as they are",
            ", ".join(row.name for row in ENCODINGS.values() if row.known and spec.holds(row)),
            "losslessly, under another name" if spec.carries else "refused without a flag",
        )
        for name in FORMATS.own
        for spec in [FORMATS[name]]
    ]
    head = "format | extension | tensor names | vectors | encodings with a code | others"
    return "# Formats\n\n" + table(head, rows)


def encodings() -> str:
    """Return the encoding table."""
    rows = [
        (
            row.name,
            row.block_size or "",
            row.type_size or "",
            f"{row.bits_per_weight:.4g}" if row.known else "",
            "" if row.ggml is None else row.ggml,
            row.safetensors,
            "" if row.apr is None else row.apr,
            row.removed or ("yes" if row.name in CODECS else "by its dialect"),
        )
        for row in ENCODINGS.values()
    ]
    head = (
        "name | elements a block | bytes a block | bits a weight | GGML id | safetensors | APR code"
    )
    return "# Encodings\n\n" + table(f"{head} | decoded", rows)


def architectures() -> str:
    """Return the architectures, and what they are called where."""
    rows = [
        (
            name,
            *(", ".join(ARCHS[name].called.get(style, ())) for style in ("hf", "gguf", "apr")),
            len(ARCHS[name].tensors),
            ", ".join(sorted({loss.name for loss in ARCHS[name].lost})),
        )
        for name in ARCHS.own
    ]
    head = "architecture | Hugging Face | GGUF | APR | roles | hyperparameters a GGUF can lose"
    return "# Architectures\n\n" + table(head, rows)


def exit_codes() -> str:
    """Return the exit-code table."""
    return "# Exit codes\n\n" + table("code | means", list(EXIT_CODES.items()))


PAGES: Mapping[str, Callable[[], str]] = {
    "commands/index.md": command_index,
    "reference/formats.md": formats,
    "reference/encodings.md": encodings,
    "reference/architectures.md": architectures,
    "reference/exit_codes.md": exit_codes,
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for name in COMMANDS:
        files.append(File.generated(config, f"commands/{name}.md", content=command_page(name)))
    return files


TEXTS: dict[str, tuple[str, str]] = {}  # source path -> title and Markdown of the pages being built


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Keep a page's Markdown for its twin."""
    title = re.search(r"^# (.+)$", markdown, re.M)
    TEXTS[page.file.src_uri] = (title[1] if title else str(page.title), markdown)
    return markdown


def on_post_build(config: Any) -> None:
    """Write the twins and llms.txt."""
    site = Path(config["site_dir"])
    for path, (_, markdown) in TEXTS.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(markdown, encoding="utf-8")
    for page in sorted(SKILL.rglob("*.md")):
        copy = site / "skill" / page.relative_to(SKILL)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    (site / "llms.txt").write_text(llms_text(config), encoding="utf-8")
    TEXTS.clear()


def llms_text(config: Any) -> str:
    """Return llms.txt: what the project is, the skill, a link to the Markdown of every page."""
    text = f"# {config['site_name']}\n\n> {config['site_description']}\n"
    skill = "- [Which command answers what](skill/SKILL.md): begin here; the wheel has it too\n"
    sections: dict[str, list[str]] = {"Skill": [skill], "How to": [], "Pages": [], "Commands": []}
    for path in sorted(TEXTS):
        name = path.removeprefix("commands/").removesuffix(".md")
        command = COMMANDS.get(name) if path.startswith("commands/") else None
        said = f": {command.summary}" if command is not None else ""
        section = "How to" if path.startswith("how-to/") else "Pages"
        section = section if command is None else "Commands"
        sections[section].append(f"- [{TEXTS[path][0].replace('`', '')}]({path}){said}\n")
    for title, lines in sections.items():
        text += f"\n## {title}\n\n" + "".join(lines)
    return text
