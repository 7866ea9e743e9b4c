"""What `aprfmt hash` prints."""

from typing import TYPE_CHECKING, NotRequired, TypedDict

from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.model.ledger import Pronounced
    from aprfmt.model.manifest import Failure, TensorRow


class HashResult(TypedDict):
    """What `aprfmt hash` says; `written` and `failures` where it wrote or compared."""

    model: str
    tensors: "list[TensorRow]"
    damage: NotRequired[list[dict[str, object]]]
    written: NotRequired[str]
    failures: NotRequired["list[Failure]"]


def show(body: HashResult, found: "Pronounced | None" = None) -> None:
    """Print the hashes, or the verdict of a check."""
    if found is not None:
        for row in body.get("failures", ()):
            render.say(f"FAIL {row['key']}: {row['what']}", style="bad")
        render.say(found.says, style={0: "good", 1: "bad", 2: "warn"}[found.exit])
        return
    for row in body["tensors"]:
        render.say(
            f"{row.get('decoded') or '-':64}  {(row['raw'] or ['-'])[0][:16]:16}  "
            f"{row['encoding']:8} "
            f"{row['key']}"
        )
    if "written" in body:
        render.line(f"wrote {render.escape(body['written'])}")
