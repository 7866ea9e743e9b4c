"""`aprfmt diff A B --adapter DIR`: whether B is the base A with the adapter merged, once."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.adapters import AdapterAnswer
    from aprfmt.model.ledger import Pronounced

_LINES = 10


def compare_adapter(
    a: Path, b: Path, adapter: Path, arch: str | None, accept: Sequence[str] = ()
) -> int:
    """Answer and report. Exit 0: once in every weight, and nothing else differs; else 1."""
    from aprfmt.adapters import answers
    from aprfmt.model import open_model

    with open_model(a, arch=arch) as base, open_model(b, arch=arch) as copy:
        found, report = answers(base, copy, adapter)
        again = _merge_command(a, adapter, copy.format)
    verdict = found.pronounced(accept)
    body = {**report.to_json(), "adapter": found.to_json(), **verdict.to_json()}
    return render.emit(body, verdict.exit, lambda: show_adapter(found, verdict, a, b, again))


def _merge_command(base: Path, adapter: Path, container: str) -> str:
    """Return the command that merges once, into a file or folder of B's kind."""
    from aprfmt.formats import FORMATS

    if FORMATS[container].weights_name is not None:
        return f"aprfmt convert {base} OUT --adapter {adapter} --to {container}"
    return f"aprfmt convert {base} OUT{FORMATS[container].extensions[0]} --adapter {adapter}"


def show_adapter(
    found: "AdapterAnswer", verdict: "Pronounced", a: Path, b: Path, again: str
) -> None:
    """Print the answer, the weights that are not as the rest, what else differs, what to do."""
    style = {0: "good", 1: "bad", 2: "warn"}[verdict.exit]
    names = [render.escape(str(each)) for each in (found.adapter, b, a)]
    render.line(f"{names[0]} is merged into {names[1]}, of the base {names[2]}: "
                f"{found.found} ({len(found.weights)} weights)", style=style)  # fmt: skip
    if verdict.not_compared or verdict.exit != int(not found.yes):
        render.say(f"  {verdict.says}", style=style)
    odd = [each for each in found.weights if each.found != "once"]
    for each in render.first_rows(odd, _LINES, "  "):
        where = f" in {render.escape(each.file)}" if each.file else ""
        render.line(
            f"  {render.escape(each.key)}{where}: {each.found} (the change {each.times:.3f} times, "
            f"{each.rest:.3g} of it unexplained)"
        )
    if found.others:
        shown = ", ".join(render.escape(key) for key in found.others[:_LINES])
        render.line(f"  {len(found.others)} tensors differ that it does not change: {shown}")
    if not found.yes:
        render.line(f"next: {render.escape(again)}")
