"""The HTML page of `aprfmt inspect --html`: byte map, tensors, metadata, tokenizer, checks.

What `inspect --json` says, every tensor, the tokenizer and the checks of `validate`; nothing that
grows with the size of the weights. The vocabulary is in it only where it is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render
from aprfmt.cli.options import check_new
from aprfmt.errors import AprfmtError, UsageError

if TYPE_CHECKING:
    from aprfmt.cli.inspect.records import InspectBody
    from aprfmt.model import Model
    from aprfmt.tensors.view import View
    from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer

LONGEST = 2000  # characters of a metadata value
SAMPLE = 60  # ordinary tokens shown of a vocabulary that was not asked for
SPECIALS = 200  # special tokens shown
LINES = 400  # lines of a template


@dataclass(frozen=True)
class PageRequest:
    """The page options of `inspect`: path, contents, and whether a file may be replaced."""

    html: Path | None
    stats: bool
    vocabulary: bool
    force: bool

    def check(self) -> None:
        """Raise UsageError for page options without --html, OutputError if the page exists."""
        given = {"--stats": self.stats, "--vocabulary": self.vocabulary}
        if self.html is None and any(given.values()):
            names = " and ".join(name for name, is_given in given.items() if is_given)
            raise UsageError(f"inspect: {names} goes into a page; add --html FILE")
        check_new(self.force, self.html)


def write_inspect_page(opened: "Model", body: "InspectBody", paged: PageRequest) -> None:
    """Write the HTML page of an open model, and add its path to `body` as "html".

    `body` is what `inspect --json` prints, `paged` says where the page goes and what it shows.
    """
    from aprfmt.cli.html_page import write_page

    assert paged.html is not None
    with render.ProgressLine("inspect") as progress:
        text = render_page(opened, body, paged, progress)
    write_page(paged.html, text, paged.force)
    body["html"] = str(paged.html)


def render_page(
    opened: "Model", body: "InspectBody", paged: PageRequest, progress: "render.ProgressLine"
) -> str:
    """Return the HTML page of an open model; a damaged tensor has its damage in place of values.

    `body` is the JSON of `inspect`, `paged` says whether values and vocabulary are shown.
    """
    from aprfmt.checks import validate_model
    from aprfmt.cli import html_page

    report = validate_model(opened, whole=paged.stats, progress=progress)
    data = {
        "found": {key: value for key, value in body.items() if key != "metadata"},
        "tensors": tensor_rows(opened, paged.stats, progress),
        "metadata": metadata_rows(opened),
        "tokenizer": tokenizer_facts(opened, paged.vocabulary),
        "report": report.to_json(),
        "stats": paged.stats,
    }
    name = opened.metadata.get("general.name")
    known = name if isinstance(name, str) and name else _model_title(opened.path)
    facts = {
        "file": body["path"],
        "format": f"{body['format']} {body['version']}".strip(),
        "architecture": body["architecture"] or body.get("architecture_error"),
        "config": body["config"],
    }
    return html_page.render_html(known, facts, data, html_page.MODEL)


def _model_title(path: Path) -> str:
    """Return the file's name, or its folder's where the file is just called "model"."""
    return path.resolve().parent.name if path.stem == "model" else path.name


def tensor_rows(
    opened: "Model", stats: bool, progress: "render.ProgressLine"
) -> list[dict[str, object]]:
    """Return a JSON row for every tensor, with statistics and a histogram if `stats`."""
    from aprfmt.cli.tensors import tensor_row
    from aprfmt.tensors.companions import all_bytes

    roles, rows = opened.roles_of, []
    for done, (name, tensor) in enumerate(opened.items()):
        row: dict[str, object] = {**tensor_row(name, tensor, roles.get(name, ()), stats=False)}
        row |= {"nbytes": all_bytes(tensor), "damage": tensor.damage}
        if stats:
            row |= _statistics_row(tensor)
            progress(done + 1, len(opened))
        rows.append(row)
    return rows


def _statistics_row(tensor: "View") -> dict[str, object]:
    """Return {"stats", "histogram"} of a tensor.

    If it cannot be decoded, both are None and "unread" says why.
    """
    from aprfmt.cli.histograms import tensor_histogram
    from aprfmt.tensors.stats import tensor_stats

    try:
        found = tensor_stats(tensor.stored[0])
        return {"stats": found.to_json(), "histogram": tensor_histogram(tensor, found)}
    except AprfmtError as error:
        return {"stats": None, "histogram": None, "unread": str(error)}


def metadata_rows(opened: "Model") -> list[list[str]]:
    """Return [key, value as text] of every metadata key; long values are cut."""
    return [[key, _metadata_text(value)] for key, value in opened.metadata.items()]


def _metadata_text(value: object) -> str:
    """Return a metadata value as text: at most LONGEST characters, or an array's first 8 items."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value)} characters)"
    if isinstance(value, Sequence):
        shown = ", ".join(_metadata_text(one)[:40] for one in value[:8])
        return f"[{shown}]" if len(value) <= 8 else f"{len(value)}: [{shown}, ...]"
    return str(value)


def tokenizer_facts(opened: "Model", everything: bool) -> dict[str, object] | None:
    """Return a model's vocabulary, special tokens and chat template for the page, as JSON.

    None without a tokenizer, {"error": text} where it cannot be read. `everything` lists all
    tokens.
    """
    from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts

    try:
        found = read_tokenizer_parts(opened)
        return None if found is None else _tokenizer_json(found, everything)
    except AprfmtError as error:
        return {"error": str(error)}


def _tokenizer_json(found: "StatedTokenizer", everything: bool) -> dict[str, object]:
    """Return the page's JSON of a tokenizer: kind, counts, special tokens, tokens, template.

    `everything` lists all tokens, else about SAMPLE of them evenly spaced.
    """
    from aprfmt.tokenizer.keys import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
    from aprfmt.tokenizer.pieces import readable_piece
    from aprfmt.tokenizer.template import scan_template

    words = found.vocabulary
    named = {
        NORMAL: "", UNKNOWN: "unknown", CONTROL: "control", USER_DEFINED: "added",
        UNUSED: "unused", BYTE: "byte",
    }  # fmt: skip

    def row(i: int) -> list[object]:
        """Return [id, readable text, name of the token's type] of the token with id `i`."""
        return [i, readable_piece(words.tokens[i], words.kind), named.get(words.types[i], "")]

    roles: dict[int, list[str]] = {}
    for role, i in words.ids.items():
        roles.setdefault(i, []).append(role)
    for i in found.stop_ids:
        roles.setdefault(i, []).append("ends a text")
    special = [i for i in words.added if i < len(words.tokens)]
    count = len(words.tokens)
    step = max(1, count // SAMPLE)
    shown = range(count) if everything else range(0, count, step)
    template = found.template
    return {
        "kind": words.kind,
        "count": count,
        "merges": len(words.merges or ()),
        "pre": words.pre,
        "bos": found.adds_bos,
        "eos": found.adds_eos,
        "whole": everything,
        "special": [[*row(i), ", ".join(roles.get(i, []))] for i in special[:SPECIALS]],
        "specials": len(special),
        "tokens": [row(i) for i in shown],
        "template": _split_lines(template),
        "previews": template_previews(found),
        "suspicious": scan_template(template) if template else [],
    }


def _split_lines(text: str | None) -> list[str]:
    """Return a text's lines, at most LINES and then how many more there are; [] for None.

    The page escapes each line; line breaks would be escaped as well.
    """
    lines = [] if text is None else text.split("\n")
    more = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    return [*lines[:LINES], *more]


def template_previews(found: "StatedTokenizer") -> list[dict[str, object]]:
    """Return {name, status, lines} of sample conversations, as the chat template renders them.

    [] without a template, one row with the error where it cannot be compiled.
    """
    from aprfmt.tokenizer.conversations import render_conversations

    if found.template is None:
        return []
    try:
        texts = render_conversations(found.template, found.special_token_texts, found.carried.where)
    except AprfmtError as error:
        return [{"name": "the template", "status": "error", "lines": _split_lines(str(error))}]
    return [
        {"name": name, "status": status, "lines": _split_lines(text)}
        for name, (status, text) in texts.items()
    ]
