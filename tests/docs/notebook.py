"""The example notebook: its cells run from an empty folder, and what they show is what it holds.

`python -m tests.docs.notebook` runs it and writes what its cells show now.
"""

import ast
import contextlib
import io
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.examples import DOCS, ROOT, environment

NOTEBOOK = DOCS / "tutorial" / "notebook.ipynb"


def cells() -> list[dict[str, Any]]:
    """Return the code cells in order."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def run(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Run every cell in one namespace, from `folder`; yield the outputs of each.

    As in a notebook a line that begins with `!` is a command of the shell, and the value of the
    last expression is shown: as HTML where it has a form for that, else by `repr`.
    """
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(), 1):
        with contextlib.chdir(folder):
            yield list(_run("".join(cell["source"]), number, space))


def _run(source: str, number: int, space: dict[str, Any]) -> Iterator[dict[str, Any]]:
    printed = io.StringIO()
    lines = source.splitlines()
    for command in (line[1:] for line in lines if line.startswith("!")):
        done = subprocess.run(
            command,
            shell=True,
            capture_output=True,
            text=True,
            check=True,
            env=environment(Path.cwd()),
        )
        printed.write(done.stdout)
    code = "\n".join("" if line.startswith("!") else line for line in lines)
    parsed = ast.parse(code, f"cell {number}")
    last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(parsed, f"cell {number}", "exec"), space)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space)
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        yield {"name": "stdout", "output_type": "stream", "text": text}
    if value is not None:
        form = getattr(value, "_repr_html_", None)
        data = {"text/html": form()} if form else {}
        data["text/plain"] = repr(value) if form is None else f"<{type(value).__name__}>"
        shown = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
        yield {
            "data": shown,
            "execution_count": number,
            "metadata": {},
            "output_type": "execute_result",
        }


def main() -> None:
    """Write the outputs of all cells into the notebook."""
    whole = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in whole["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder:
        for number, (cell, outputs) in enumerate(zip(code, run(Path(folder)), strict=True), 1):
            cell |= {"execution_count": number, "outputs": outputs}
    NOTEBOOK.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)
    main()
