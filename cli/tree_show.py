"""The tree of `aprfmt tree`: nodes as plain data, and how they are printed."""

from typing import TYPE_CHECKING, Any

from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.tensors.view import View


def build(tensors: "list[tuple[str, View]]") -> dict[str, object]:
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


def _lists(root: dict[str, Any]) -> dict[str, object]:
    """Turn the children maps into lists, without recursion (names may have any depth)."""
    stack = [root]
    while stack:
        node = stack.pop()
        node["children"] = list(node["children"].values())
        stack += node["children"]
    return root


def show(root: dict[str, object], depth: int | None, title: str) -> None:
    """Print the tree with lines, numbers in their own order."""
    render.line(render.escape(title), style="head")
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
