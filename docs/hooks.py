"""What the site has more than the pages of docs/: examples of commands, Markdown, llms.txt.

The page of a command gets its section of reference/examples.md. Every page is also in the site as
Markdown, under its source's path. `llms.txt` (https://llmstxt.org) lists these for agents.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from aprfmt.cli.commands import COMMANDS

SKILL = Path(__file__).parent.parent / "aprfmt" / ".agents" / "skills" / "aprfmt"
EXAMPLES = (
    Path(__file__).parent / "reference" / "examples.md"
)  # a section for every command, run by a test


def example(name: str) -> str:
    """Return a command's section of docs/reference/examples.md; KeyError where there is none."""
    parts = re.split(r"^## (\S+)$", EXAMPLES.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[name].strip()


def command_of(path: str) -> str:
    """Return the command whose page a source path is, "" for any other page."""
    name = path.removeprefix("reference/commands/").removesuffix(".md")
    return name if path.startswith("reference/commands/") and name in COMMANDS else ""


TEXTS: dict[str, tuple[str, str]] = {}  # source path -> title and Markdown of the pages being built


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Put the example into a command's page, and store every page's Markdown for the site."""
    name = command_of(page.file.src_uri)
    if name:
        head, _, options = markdown.partition("\n## Usage\n")
        above = head.partition("\nAn example with its output")[0]
        markdown = f"{above}\n## Example\n\n{example(name)}\n\n## Usage\n{options}"
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


SECTIONS = {"tutorial": "Tutorial", "how-to": "How to", "explanation": "Explanation"}


def llms_text(config: Any) -> str:
    """Return llms.txt: what the project is, the skill, a link to the Markdown of every page."""
    text = f"# {config['site_name']}\n\n> {config['site_description']}\n"
    skill = "- [Which command answers what](skill/SKILL.md): begin here; the wheel has it too\n"
    sections: dict[str, list[str]] = {"Skill": [skill], **{name: [] for name in SECTIONS.values()}}
    sections |= {"Reference": [], "Commands": [], "Other pages": []}
    for path in sorted(TEXTS):
        command = command_of(path)
        kind = path.partition("/")[0]
        section = SECTIONS.get(kind, "Reference" if kind == "reference" else "Other pages")
        line = f": {COMMANDS[command].summary}" if command else ""
        sections["Commands" if command else section].append(
            f"- [{TEXTS[path][0].replace('`', '')}]({path}){line}\n"
        )
    for title, lines in sections.items():
        text += f"\n## {title}\n\n" + "".join(lines) if lines else ""
    return text
