"""`aprfmt diff A B --adapter DIR`: whether B is the base A with the adapter merged, once."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.adapters import AdapterAnswer
    from aprfmt.adapters.answers import ChangedWeight
    from aprfmt.model.ledger import Pronounced

_LINES = 10
_ALIKE = 3  # weights of one kind that have a line of their own
_LOST = 0.01  # share of the change from which it is said that rounding took it


def run(a: Path, b: Path, adapter: Path, arch: str | None, accept: Sequence[str] = ()) -> int:
    """Answer and report. Exit 0: once in every weight, and nothing else differs; else 1."""
    from aprfmt.adapters import answers
    from aprfmt.model import open_model

    with open_model(a, arch=arch) as base, open_model(b, arch=arch) as copy:
        found, report = answers(base, copy, adapter)
        again = _merge_command(a, adapter, copy.format)
    verdict = found.pronounced(accept)
    body = {**report.to_json(), "adapter": found.to_json(), **verdict.to_json()}
    return render.emit(body, verdict.exit, lambda: show(found, verdict, a, b, again))


def _merge_command(base: Path, adapter: Path, container: str) -> str:
    """Return the command that merges once, into a file or folder of B's kind."""
    from aprfmt.formats import FORMATS

    if FORMATS[container].weights_name is not None:
        return f"aprfmt convert {base} OUT --adapter {adapter} --to {container}"
    return f"aprfmt convert {base} OUT{FORMATS[container].extensions[0]} --adapter {adapter}"


def show(found: "AdapterAnswer", verdict: "Pronounced", a: Path, b: Path, again: str) -> None:
    """Print the answer, the weights that are not as the rest, what else differs, what to do."""
    style = {0: "good", 1: "bad", 2: "warn"}[verdict.exit]
    names = [render.escape(str(each)) for each in (found.adapter, b, a)]
    render.line(f"{names[0]} is merged into {names[1]}, of the base {names[2]}: "
                f"{found.found} ({len(found.weights)} weights)", style=style)  # fmt: skip
    if verdict.not_compared or verdict.exit != int(found.differs):
        render.say(f"  {verdict.says}", style=style)
    odd = [each for each in found.weights if each.found != "once" or each.says]
    for says, group in _alike(odd).items():
        shown = group if len(group) <= _ALIKE + 1 else group[:_ALIKE]
        for each in shown:
            where = f" in {render.escape(each.file)}" if each.file else ""
            render.line(f"  {render.escape(each.key)}{where}: {render.escape(_says(each))}")
        if len(group) > len(shown):
            render.line(f"  {len(group) - len(shown)} more weights: {render.escape(says)}")
    lost = [each for each in found.weights if each.lost >= _LOST]
    if lost:
        most = max(lost, key=lambda each: each.lost)
        render.line(
            f"  rounding takes {most.lost:.0%} of the change in {render.escape(most.key)}, and at "
            f"least {_LOST:.0%} in {len(lost)} of {len(found.weights)} weights"
        )
    for says in found.says:
        render.line(f"  {render.escape(says)}")
    if found.others:
        others = ", ".join(render.escape(key) for key in found.others[:_LINES])
        render.line(f"  {len(found.others)} tensors differ that it does not change: {others}")
    if found.differs:
        render.line(f"next: {render.escape(again)}")


def _says(weight: "ChangedWeight") -> str:
    """Return what was found of a weight: the mistake, or how often the change lies in it."""
    if weight.says:
        return f"{weight.found}: {weight.says}"
    return (
        f"{weight.found} (the change {weight.times:.3f} times, {weight.rest:.3g} of it unexplained)"
    )


def _alike(weights: "Sequence[ChangedWeight]") -> "dict[str, list[ChangedWeight]]":
    """Return the weights by what was found of them, the numbers left out."""
    found: dict[str, list[ChangedWeight]] = {}
    for each in weights:
        found.setdefault(f"{each.found}{': ' * bool(each.says)}{each.says}", []).append(each)
    return found
