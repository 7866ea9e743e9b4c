"""HTML reports as one self-contained page that loads nothing and runs no text of a model.

A *part* of a page is a file of `pages/`: HTML, style or script. What differs from run to run is put
in as JSON. What comes out of a model reaches the page in two ways only: as escaped text in the
title, and in that JSON, which is inside a script element of a type that is not run. The page's own
script writes text nodes of it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from string import Template

from aprfmt.base.text_escape import escape, escape_html
from aprfmt.cli.render import to_plain_json

BASE = ("base.css", "base.js")  # of every page
IDS = 64  # token ids shown
SILENT: tuple[object, ...] = (None, "", (), [])  # facts that are left out
REPORT = ("report.css", "report.html", "raster.css", "raster.js", "report.js")  # of several pages
TRACE = (
    "histogram.css", "raster.css", "trace.css", "trace.html", "histogram.js", "raster.js",
    "trace.js",
)  # fmt: skip
CHECKED = ("checks.css", "checks.html", "checks.js", "checked.js")  # of `validate` and `qa`
MODEL = (
    "checks.css", "histogram.css", "model.css", "model.html", "checks.js", "histogram.js",
    "treemap.js", "model.js",
)  # fmt: skip


def render_html(
    title: str, facts: Mapping[str, object], data: Mapping[str, object], parts: Iterable[str]
) -> str:
    """Return a whole HTML page; `title`, `facts` and `data` may hold text of a model.

    `facts` become a table of two columns, without those that are empty. They and `data` are in the
    page as JSON under the id `data`. Numbers that are not finite become strings there, and unsafe
    characters of every string are spelled out. `parts` are names of files in `pages/`, added to
    BASE.
    """
    shown = [[name, str(value)] for name, value in facts.items() if value not in SILENT]
    found = _escape_strings(to_plain_json({"facts": shown, **data}))
    text = json.dumps(found, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    names = [*BASE, *parts]
    filled = {"title": escape_html(title), "data": script_json(text)} | {
        hole: "".join(_read_part(name) for name in names if name.endswith(suffix))
        for hole, suffix in (("style", ".css"), ("body", ".html"), ("script", ".js"))
    }
    return Template(_read_part("frame.html")).substitute(filled)


def _read_part(name: str) -> str:
    """Return the text of a file in `pages/`."""
    from importlib.resources import files

    return (files("aprfmt.cli.pages") / name).read_text(encoding="utf-8")


def script_json(text: str) -> str:
    """Return JSON text with `<`, `>` and `&` escaped, so that it is safe in a script element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escape_strings(value: object) -> object:
    """Return plain data with every string and key escaped for display."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(name): _escape_strings(item) for name, item in value.items()}
    return [_escape_strings(item) for item in value] if isinstance(value, list) else value


def ids_text(ids: Iterable[int]) -> str:
    """Return token ids as `3: 1 5 9`: their number, then at most the first IDS of them."""
    known = list(ids)
    return f"{len(known)}: {' '.join(map(str, known[:IDS]))}"


def add_page(
    body: dict[str, object], path: Path | None, force: bool, text: Callable[[], str]
) -> None:
    """Write a command's page if --html gave a path, and add the path to `body` as "html".

    `text` returns the page. It is called only if the page is to be written.
    """
    if path is not None:
        write_page(path, text(), force)
        body["html"] = str(path)


def write_page(path: Path, text: str, force: bool) -> None:
    """Write a page as UTF-8; OutputError where the file exists, unless `force`."""
    from aprfmt.formats.atomic import FileSet

    with FileSet(force=force) as published:
        published.create(path).write(text.encode())
