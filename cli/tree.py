"""`aprfmt tree`: tensors as a tree of name components."""

from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import click

from aprfmt.cli import options, render
from aprfmt.cli.damage_report import report_damage

if TYPE_CHECKING:
    from aprfmt.tensors.view import View


class TreeNode(TypedDict):
    """A component of tensor names; leaves alone have shape and encoding."""

    name: str
    nbytes: int
    tensors: int
    children: list["TreeNode"]
    shape: NotRequired[list[int]]
    encoding: NotRequired[str]


def build_tree(tensors: "list[tuple[str, View]]") -> TreeNode:
    """Return (name, tensor) pairs as a tree by the dotted components of names.

    Each node has the sum of its tensors' bytes and their number; a leaf also shape and encoding.
    """
    root = TreeNode(name="", nbytes=0, tensors=0, children=[])
    known: dict[tuple[int, str, bool], TreeNode] = {}  # by parent, component, and if it is a leaf
    for name, tensor in tensors:
        node = root
        parts = name.split(".")
        for i, part in enumerate(parts):
            node["nbytes"] += tensor.nbytes
            node["tensors"] += 1
            # A leaf and a branch may share a name (a.b and a.b.c): leaves get a key of their own.
            key = (id(node), part, i == len(parts) - 1)
            if key not in known:
                known[key] = TreeNode(name=part, nbytes=0, tensors=0, children=[])
                node["children"].append(known[key])
            node = known[key]
        node["nbytes"], node["tensors"] = tensor.nbytes, 1
        node["shape"], node["encoding"] = list(tensor.shape), tensor.encoding
    return root


def show(root: TreeNode, depth: int | None, title: str) -> None:
    """Print the tree below `title` with numbers sorted as numbers, to a depth (None: all of it)."""
    render.say(title, style="head")
    stack: list[tuple[TreeNode, str, bool, int]] = []

    def push(node: TreeNode, indent: str, level: int) -> None:
        """Put a node's children on the stack of nodes to print, so that they are printed sorted.

        `indent` is what their lines begin with, `level` their depth.
        """
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


@click.command("tree")
@options.model()
@options.patterns
@click.option("--depth", type=options.WholeNumber(1), help="Show at most this many levels.")
@options.common
def command(model: Path, patterns: tuple[str, ...], depth: int | None) -> int:
    """Show tensors as a tree of name components, with sizes."""
    from aprfmt.model import open_model
    from aprfmt.model.resolve import names_matching

    with open_model(model, damaged=True) as opened:
        names = names_matching(opened, patterns) if patterns else list(opened)
        root = build_tree([(name, opened[name]) for name in names])
        damage, code = report_damage(opened.damage)
    body = {"model": str(opened.path), "tree": root, "damage": damage}
    return render.emit(body, code, lambda: show(root, depth, str(opened.path)))
