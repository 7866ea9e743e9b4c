"""Reports as one self-contained page: no network, no file beside it, nothing of a file executed.

What comes out of a file reaches the page in two ways only: as escaped text in the markup, and as
JSON in a script element of a type that is not run, read by our script, which writes text nodes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt.cli.render import plain
from aprfmt.text import escape_html

# Nothing may be loaded or sent, whatever the page holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --line: #8885; --bad: #d33; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.2rem; max-width: 110rem; }
h1 { font-size: 1.25rem; margin: 0 0 .6rem; } h2 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .5rem; text-align: right; white-space: nowrap; }
th.l, td.l { text-align: left; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.scroll { overflow: auto; max-height: 75vh; border: 1px solid var(--line); }
.scroll thead th { position: sticky; top: 0; background: Canvas; }
button, select { font: inherit; }
.dim { opacity: .7; } .bad { color: var(--bad); font-weight: 600; }
"""

# Colours of a heat map, for the scripts of its pages: `colour(share)` is [r, g, b].
COLOURS = """
// Dark to bright, as in viridis.
const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
  return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * part));
}
"""


def page(title: str, body: str, data: Mapping[str, Any], style: str, script: str) -> str:
    """Return a whole page; `body` is markup of ours, `title` and `data` may hold a file's text.

    `data` stands in the page as JSON under the id `data`; numbers that are not finite become
    strings.
    """
    text = json.dumps(plain(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape_html(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape_html(title)}</h1>\n{body}\n"
        f'<script type="application/json" id="data">{in_script(text)}</script>\n'
        f'<script>"use strict";\n{script}</script>\n</body>\n</html>\n'
    )


def in_script(text: str) -> str:
    """Return JSON that cannot end, or open anything in, the script element it stands in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def facts(rows: Mapping[str, object]) -> str:
    """Return a table of two columns."""
    cells = "".join(
        f"<tr><th class=l>{escape_html(name)}</th><td>{escape_html(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f'<table class="facts">{cells}</table>'


def write_page(path: Path, text: str, force: bool) -> None:
    """Publish a page; OutputError where the file is there already, unless `force`."""
    from aprfmt.formats.atomic import FileSet

    with FileSet(force=force) as files:
        files.create(path).write(text.encode())
