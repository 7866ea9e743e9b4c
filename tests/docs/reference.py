"""The reference pages that are written from tables, commands and schemas.

`python -m tests.docs.reference` says which pages are not current, `--write` writes them. A test
holds every page to what this file makes of the tables now.
"""

import ast
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click

import aprfmt
from aprfmt import errors
from aprfmt.api import RunOptions
from aprfmt.arch import ARCHS
from aprfmt.arch.docs_page import architectures_page as architectures
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.exit_codes import EXIT_CODES
from aprfmt.base.markdown import table
from aprfmt.causes import CAUSES, FOLDERS, causes_of, modules_of
from aprfmt.causes.forward.table import TABLE as OF_A_PASS
from aprfmt.causes.tensor.table import JOINT, TABLE
from aprfmt.causes.training.table import BACKWARDS, GRADIENTS, UPDATES
from aprfmt.checks.gates.running import QaOptions
from aprfmt.checks.table import CHECKS, CheckRow
from aprfmt.cli.commands import COMMANDS, GROUPS
from aprfmt.cli.glossary import GLOSSARY
from aprfmt.cli.main import group
from aprfmt.codecs import CODECS
from aprfmt.conversion.options import ConvertOptions
from aprfmt.formats import FORMATS
from aprfmt.inference.api import TraceOptions
from aprfmt.inference.points_page import render_page as capture_points
from aprfmt.inference.reported_loss import MISTAKES
from aprfmt.measure.verdicts import CERTAINTIES, LEVELS
from aprfmt.schemas import COMMON, schema, schema_names, schema_number
from tests.docs.examples import DOCS, blocks

REFERENCE = DOCS / "reference"
WRITTEN_BY = "Written from the tables by `python -m tests.docs.reference --write`.\n"


def command_page(name: str) -> str:
    """Return the page of one command: what it does, its arguments and its options."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    names = ["-h", "--help"]  # as the group says: click stores the option of whoever asks first
    context = click.Context(command, info_name=f"aprfmt {name}", help_option_names=names)
    usage = " ".join([context.info_name or "", *command.collect_usage_pieces(context)])
    # "\b" marks a paragraph whose lines click does not join; Markdown has no such mark.
    text = "\n\n".join(
        f"```text\n{part.removeprefix(chr(8)).strip(chr(10))}\n```" if part[:1] == "\b" else part
        for part in cleandoc(command.help or "").split("\n\n")
    )
    rows = [
        row
        for option in command.get_params(context)
        if (row := option_row(option, context)) is not None
    ]
    return (
        f"# aprfmt {name}\n\n{COMMANDS[name].summary}\n\n"
        f"An example with its output: [{name}](../examples.md#{name}).\n\n"
        f"## Usage\n\n```text\nUsage: {usage}\n```\n\n{text.strip()}\n\n"
        f"## Options\n\n" + table(("option", "what it does", "default"), rows)
    )


def option_row(option: click.Parameter, context: click.Context) -> tuple[str, str, str] | None:
    """Return an option's spelling, text and default; None for an argument or a hidden option."""
    record = option.get_help_record(context) if isinstance(option, click.Option) else None
    if record is None or not isinstance(option, click.Option):
        return None
    spelled = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    info = option.get_help_extra(context)
    return (
        f"`{spelled}{value}`",
        option.help or "",
        f"`{info['default']}`" if "default" in info else "",
    )


def command_index() -> str:
    """Return the list of commands."""
    page = (
        "# Commands\n\n" + WRITTEN_BY + "\nEvery command has `--json`, `--quiet`, `--debug` and\n"
        "[`--format`](../json.md#the-forms-of-an-answer).\n"
    )
    for title, group_rows in GROUPS.items():
        rows = [(f"[`{name}`]({name}.md)", row.summary) for name, row in group_rows.items()]
        page += f"\n## {title}\n\n" + table(("command", "does"), rows)
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
    head = ("format", "extension", "tensor names", "vectors", "encodings with a code", "others")
    return "# Formats\n\n" + WRITTEN_BY + "\n" + table(head, rows)


def encodings() -> str:
    """Return the encoding table."""
    rows = [
        (
            row.name,
            str(row.block_size or ""),
            str(row.type_size or ""),
            f"{row.bits_per_weight:.4g}" if row.known else "",
            "" if row.ggml is None else str(row.ggml),
            row.safetensors,
            "" if row.apr is None else str(row.apr),
            row.removed or ("yes" if row.name in CODECS else "by its dialect"),
        )
        for row in ENCODINGS.values()
    ]
    head = (
        "name", "elements a block", "bytes a block", "bits a weight", "GGML id", "safetensors",
        "APR code", "decoded",
    )  # fmt: skip
    return "# Encodings\n\n" + WRITTEN_BY + "\n" + table(head, rows)


def architecture_names() -> str:
    """Return what the architectures are called in each format, and what a GGUF can lose."""
    rows = [
        (
            name,
            *(", ".join(ARCHS[name].called.get(style, ())) for style in ("hf", "gguf", "apr")),
            str(len(ARCHS[name].tensors)),
            ", ".join(sorted({loss.name for loss in ARCHS[name].lost})),
        )
        for name in ARCHS.own
    ]
    head = (
        "architecture", "Hugging Face", "GGUF", "APR", "roles", "hyperparameters a GGUF can lose",
    )  # fmt: skip
    return "# Names of architectures\n\n" + WRITTEN_BY + "\n" + table(head, rows)


def exit_codes() -> str:
    """Return the exit-code table."""
    rows = [(str(code), text) for code, text in EXIT_CODES.items()]
    return "# Exit codes\n\n" + WRITTEN_BY + "\n" + table(("code", "means"), rows)


# What judges a cause that a folder's modules find, so that it may be called confirmed.
MEASURED = ("-", "nothing: the cause is measured and never made again, so it is `located` at most")
# {folder of the causes: what the page calls the data that confirm them, and what that means}
JUDGED: Mapping[str, tuple[str, str]] = {
    "": ("files", "what both files say; no number is fitted"),
    "tokenizer": (
        "probes",
        "probe texts, conversations and ends of texts; the difference was read in the files",
    ),
    "tensor": (
        "values",
        "every value that the change concerns: at least twice as many as the numbers that were "
        "read from them, with digits enough that no other guess fits by chance",
    ),
    "training": (
        "halves",
        "every element of the parameter: numbers are fitted on one half and judged on the other",
    ),
    "forward": (
        "other rows",
        "rows of the point to which no number was fitted, with twice as many digits as the "
        "numbers have; or other points that differed before",
    ),
}
FINDS: Mapping[str, set[str]] = {
    "tensor": {cause for row in TABLE for cause in row.causes}
    | {cause for row in JOINT for cause in row.causes},
    "training": {cause for row in UPDATES for cause in row.causes}
    | {cause for row in GRADIENTS for cause in row.causes}
    | {cause for row in BACKWARDS for cause in row.causes},
    "forward": {row.cause for row in OF_A_PASS},
}


def judging_data(name: str) -> tuple[str, ...]:
    """Return words of JUDGED for what confirms a cause, one for each folder that finds it."""
    if CAUSES[name].most == "located":
        return (MEASURED[0],)
    return tuple(
        JUDGED[folder][0]
        for folder in FOLDERS
        if name in FINDS.get(folder, ())
        or any(row.name == name for module in modules_of(folder) for row in causes_of(module))
    )


def causes() -> str:
    """Return every cause by its level: the verdict, what it means, what shows it."""
    page = (
        "# Causes\n\n" + WRITTEN_BY + "\n`diff`, `diagnose` and `step` name these. `aprfmt explain "
        "CAUSE` prints one. Each answer says how sure it\nis "
        "([how a cause is confirmed](../explanation/diagnosis.md#what-confirmed-means)):\n\n"
    )
    page += table(
        ("certainty", "means"), [(f"`{name}`", text) for name, text in CERTAINTIES.items()]
    )
    page += "\nThe last column of the tables says what confirms a cause:\n\n"
    page += table(("judged on", "means"), [*JUDGED.values(), MEASURED])
    for level, sentence in LEVELS.items():
        rows = [
            (
                f"`{name}`",
                row.verdict,
                row.means,
                row.signature,
                row.confirms,
                ", ".join(judging_data(name)),
            )
            for name in sorted(CAUSES.own)
            if (row := CAUSES[name]).level == level
        ]
        if rows:
            head = ("cause", "verdict", "what happened", "seen by", "confirmed when", "judged on")
            page += f"\n## Level `{level}`: {sentence}\n\n" + table(head, rows)
    return page


def checks() -> str:
    """Return every check of `validate` and every gate of `qa`."""

    def rows(wanted: Callable[[CheckRow], bool]) -> list[tuple[str, str, str, str]]:
        return [
            (
                f"`{row.name}`",
                row.proves,
                ", ".join(row.formats) or "all",
                "every byte" if row.reads_all_bytes else row.needs,
            )
            for row in CHECKS
            if wanted(row)
        ]

    head = ("name", "what a PASS proves", "formats", "reads")
    files = rows(lambda row: row.of_file)
    gates = rows(lambda row: not row.of_file)
    return (
        "# Checks and gates\n\n"
        + WRITTEN_BY
        + "\n## Checks of `aprfmt validate`\n\n"
        + table(head, files)
        + "\n## Gates of `aprfmt qa`\n\n[Gates](gates.md) says how they are used.\n\n"
        + table((*head[:3], "needs"), gates)
    )


def glossary() -> str:
    """Return the words by section, with what other tools call the same thing."""
    parts = [
        "# Glossary\n",
        WRITTEN_BY,
        "One word for one thing, here and in the code; `aprfmt explain WORD` prints its line. Each "
        "line has the meaning,\nand what llama.cpp, transformers and `apr` call the same thing. A "
        "dash means that the tool has no name for it.\nCapture points have [their own table]"
        "(capture_points.md). Causes are listed in\n[causes](causes.md), and encodings in "
        "[encodings](encodings.md).\n",
    ]
    head = ("word", "meaning", "llama.cpp", "transformers", "apr")
    for section, rows in GLOSSARY.items():
        parts.append(f"## {section}\n")
        parts.append(table(head, [(name, *entry) for name, entry in rows.items()]))
    return "\n".join(parts)


def loss_mistakes() -> str:
    """Return the mistakes that give a reported loss, and what to do about each."""
    rows = [(f"`{row.name}`", row.says, row.todo) for row in MISTAKES.values()]
    return (
        "# Mistakes of a reported loss\n\n" + WRITTEN_BY + "\n`aprfmt eval MODEL --batch FILE "
        "--reported LOSS` names these. `aprfmt explain MISTAKE` prints one.\n"
        "[Check a training step](../how-to/training_step.md#is-the-loss-right) has an example.\n\n"
        + table(("mistake", "what happened", "what to do"), rows)
    )


def schemas() -> str:
    """Return the keys of every command's JSON, from the schemas that ship with the package."""
    page = (
        "# Keys of the JSON output\n\n" + WRITTEN_BY + "\n`aprfmt explain --schema COMMAND` prints "
        "the JSON Schema itself. [JSON output](json.md) has\nwhat all commands share. `[]` is an "
        "entry of a list, `{}` the value of any key.\n"
    )
    common = schema(schema_names()[0])["$defs"][COMMON]["$defs"]
    for name in COMMANDS:
        found = schema(name)
        local = {key: row for key, row in found.get("$defs", {}).items() if key != COMMON}
        page += f"\n## {name}\n\n`aprfmt.{name}/{schema_number(name)}`\n\n" + keys_table(found)
        for key, row in local.items():
            if "properties" in row:
                page += f"\n### {name}: {key}\n\n" + keys_table(row)
    page += "\n## Records that several commands share\n"
    for key, row in common.items():
        if "properties" in row:
            page += f"\n### {key}\n\n" + keys_table(row)
    return page


def functions() -> str:
    """Return the signature and docstring of every public function and of what it takes and gives.

    The last part has what the pages on extending import: the promise covers it because it is used.
    """
    page = (
        "# Python functions\n\n" + WRITTEN_BY + "\n[Python](api.md) has examples, and says what is "
        "promised about these names.\n"
    )
    for name in sorted(set(aprfmt.__all__) - {"__version__"}):
        page += f"\n## aprfmt.{name}\n\n" + described(getattr(aprfmt, name), name)
    page += "\n## Options\n"
    for kind in (ConvertOptions, QaOptions, RunOptions, TraceOptions):
        rows = [(f"`{key}`", f"`{spelled(row)}`") for key, row in kind.__annotations__.items()]
        text = cleandoc(kind.__doc__ or "")
        page += f"\n### {kind.__name__}\n\n{text}\n\n" + table(("argument", "type"), rows)
    page += "\n## Errors\n\n" + table(
        ("class", "also a", "when"),
        [
            (
                f"`{name}`",
                ", ".join(f"`{base.__name__}`" for base in kind.__bases__),
                cleandoc(kind.__doc__ or "").splitlines()[0],
            )
            for name, kind in sorted(vars(errors).items())
            if isinstance(kind, type) and issubclass(kind, errors.AprfmtError)
        ],
    )
    page += "\n## What extensions import\n\nThe pages on extending aprfmt use these names.\n\n"
    rows = [(f"`{name}`", f"[{path.stem}]({link})") for name, path, link in extension_imports()]
    return page + table(("name", "used in"), rows)


def described(function: Any, name: str) -> str:
    """Return a function's signature as a code block, and its docstring."""
    found = inspect.signature(function)
    parts: list[str] = []
    marked = False
    for part in found.parameters.values():
        if part.kind is part.KEYWORD_ONLY and not marked:
            parts, marked = [*parts, "*"], True
        stars = "**" if part.kind is part.VAR_KEYWORD else ""
        default = "" if part.default is part.empty else f" = {part.default!r}"
        parts.append(f"{stars}{part.name}: {spelled(part.annotation)}{default}")
    lines = "".join(f"    {each},\n" for each in parts)
    returned = spelled(found.return_annotation)
    return f"```text\n{name}(\n{lines}) -> {returned}\n```\n\n{cleandoc(function.__doc__ or '')}\n"


def spelled(annotation: Any) -> str:
    """Return an annotation as a reader writes it: class names without their modules."""
    text = (
        annotation
        if isinstance(annotation, str)
        else str(getattr(annotation, "__forward_arg__", ""))
    )
    if not text:
        text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        if isinstance(annotation, types.GenericAlias):
            text = str(annotation)
    text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", text)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text).replace("'", "")


def extension_imports() -> list[tuple[str, Path, str]]:
    """Return (name, page, link) of everything of ours that the pages on extending import."""
    found: dict[str, Path] = {}
    for path in sorted((DOCS / "how-to" / "extending").glob("*.md")):
        for block in blocks(path):
            if block.language != "python":
                continue
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aprfmt"):
                    for alias in node.names:
                        found.setdefault(f"{node.module}.{alias.name}", path)
    link = "../how-to/extending/"
    return [(name, path, f"{link}{path.name}") for name, path in sorted(found.items())]


def keys_table(found: Mapping[str, Any]) -> str:
    """Return a schema object's keys as a table; those of the envelope are left out."""
    rows = [
        (f"`{path}`", kind, "always" if needed else "", text)
        for path, kind, needed, text in keys_of(found)
        if path not in ("schema", "command")
    ]
    return table(("key", "type", "there", "what it is"), rows)


def keys_of(found: Mapping[str, Any], stem: str = "") -> list[tuple[str, str, bool, str]]:
    """Return (path, type, whether it is always there, description) of an object's keys."""
    rows: list[tuple[str, str, bool, str]] = []
    needed = {*found.get("required", ()), *found.get("then", {}).get("required", ())}
    for key, row in found.get("properties", {}).items():
        if not isinstance(row, Mapping):
            continue
        path = f"{stem}{key}"
        rows.append((path, type_of(row), key in needed, str(row.get("description", ""))))
        inner, mark = row, ""
        while isinstance(inner.get("items"), Mapping):
            inner, mark = inner["items"], f"{mark}[]"
        if isinstance(inner.get("additionalProperties"), Mapping) and "properties" not in inner:
            inner, mark = inner["additionalProperties"], f"{mark}{{}}"
        rows += keys_of(inner, f"{path}{mark}.")
    return rows


def type_of(row: Mapping[str, Any]) -> str:
    """Return a schema's type in words: `list of sha256`, `string or null`."""
    if "$ref" in row:
        return str(row["$ref"]).rpartition("/")[2]
    if "const" in row:
        return f"`{row['const']}`"
    if "enum" in row:
        return ", ".join(f"`{value}`" for value in row["enum"])
    for several in ("anyOf", "oneOf"):
        if several in row:
            return " or ".join(dict.fromkeys(type_of(each) for each in row[several]))
    kind = row.get("type", "any")
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        return " or ".join(kind)
    if kind == "array":
        items = row.get("items")
        return f"list of {type_of(items)}" if isinstance(items, Mapping) else "list"
    return str(kind)


PAGES: Mapping[str, Callable[[], str]] = {
    "architecture_names.md": architecture_names,
    "architectures.md": architectures,
    "capture_points.md": capture_points,
    "causes.md": causes,
    "checks.md": checks,
    "commands/index.md": command_index,
    "encodings.md": encodings,
    "exit_codes.md": exit_codes,
    "formats.md": formats,
    "functions.md": functions,
    "glossary.md": glossary,
    "loss_mistakes.md": loss_mistakes,
    "schemas.md": schemas,
    **{f"commands/{name}.md": partial(command_page, name) for name in COMMANDS},
}


def outdated(folder: Path = REFERENCE) -> list[str]:
    """Return the pages below a folder that are missing, not current, or of no command."""
    found = {path.relative_to(folder).as_posix() for path in (folder / "commands").glob("*.md")}
    return sorted(found - PAGES.keys()) + [
        name
        for name, make in PAGES.items()
        if not (folder / name).is_file() or (folder / name).read_text() != make()
    ]


def main(arguments: Sequence[str]) -> int:
    """Print which pages are not current, or write them; return the exit code."""
    names = outdated()
    for name in names:
        print(f"docs/reference/{name}")
        if "--write" not in arguments:
            continue
        path = REFERENCE / name
        if name not in PAGES:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PAGES[name]())
    return int(bool(names) and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
