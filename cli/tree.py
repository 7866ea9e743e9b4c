"""`aprfmt tree`: tensors as a tree of name components."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render
from aprfmt.cli.damage import told

if TYPE_CHECKING:
    from aprfmt.tensors.view import View


@click.command("tree")
@options.model()
@options.patterns
@click.option("--depth", type=click.IntRange(min=1), help="Show at most this many levels.")
@options.common
def command(
    model: Path, patterns: tuple[str, ...], depth: int | None, as_json: bool, quiet: bool
) -> int:
    """Show tensors as a tree of name components, with sizes."""
    from aprfmt.model import open_model
    from aprfmt.model.patterns import select
    from aprfmt.model.resolve import spellings_by_name

    with open_model(model, damaged=True) as opened:
        names = list(opened)
        if patterns:
            every = list(spellings_by_name(opened).values())
            names = [names[i] for i in select(every, patterns, str(opened.path))]
        root = build([(name, opened[name]) for name in names])
        body: dict[str, Any] = {"model": str(opened.path), "tree": root}
        if not as_json:
            render.line(render.escape(str(opened.path)), style="head")
            show(root, depth)
        body["damage"], code = told(opened.damage)
    return render.emit("tree", code, body, as_json)


def build(tensors: "list[tuple[str, View]]") -> dict[str, Any]:
    """Return nested nodes {name, nbytes, tensors, children}; leaves have shape and encoding."""
    root: dict[str, Any] = {"name": "", "nbytes": 0, "tensors": 0, "children": {}}
    for name, tensor in tensors:
        node = root
        parts = name.split(".")
        for i, part in enumerate(parts):
            node["nbytes"] += tensor.nbytes
            node["tensors"] += 1
            # A leaf and a branch may share a name (a.b and a.b.c): leaves get a key of their own.
            key = (part, i == len(parts) - 1)
            if key not in node["children"]:
                node["children"][key] = {
                    "name": part, "nbytes": 0, "tensors": 0, "children": {},
                }  # fmt: skip
            node = node["children"][key]
        node.update(
            nbytes=tensor.nbytes, tensors=1, shape=list(tensor.shape), encoding=tensor.encoding
        )
    return _lists(root)


def _lists(root: dict[str, Any]) -> dict[str, Any]:
    """Turn the children maps into lists, without recursion (names may have any depth)."""
    stack = [root]
    while stack:
        node = stack.pop()
        node["children"] = list(node["children"].values())
        stack += node["children"]
    return root


def show(root: dict[str, Any], depth: int | None) -> None:
    """Print the tree with lines, numbers in their own order."""
    stack: list[tuple[dict[str, Any], str, bool, int]] = []

    def push(node: dict[str, Any], indent: str, level: int) -> None:
        children = sorted(
            node["children"],
            key=lambda c: (len(c["name"]), c["name"]) if c["name"].isdigit() else (0, c["name"]),
        )
        for i, child in enumerate(reversed(children)):
            stack.append((child, indent, i == 0, level))

    push(root, "", 1)
    while stack:
        node, indent, last, level = stack.pop()
        text = render.escape(node["name"])
        if "encoding" in node:
            text += f"  {render.shape_text(node['shape'])} {node['encoding']}"
        else:
            text += f"  ({node['tensors']} tensors, {render.size_text(node['nbytes'])})"
        render.line(f"{indent}{'└── ' if last else '├── '}{text}")
        if depth is None or level < depth:
            push(node, indent + ("    " if last else "│   "), level + 1)
