"""Print docs/reference/capture_points.md: `python -m aprfmt.inference.points_page`."""

from collections.abc import Sequence

from aprfmt.base.markdown import table
from aprfmt.inference.capture import SLOTS
from aprfmt.inference.points import POINTS, Name

_HEAD = """# Capture points

Printed from the table in `inference/points.py` by `python -m aprfmt.inference.points_page`.

A point is a named place in the forward pass. Its key is `L3.attn_out` (layer 3), or only the name
for a point of the whole model. Its value is the tensor as the next operation reads it, with a row
for each token position. If an architecture makes a point always equal to another one (llama's
`attn_contrib` is its `attn_out`), it is an alias. If the architecture has no such tensor, the
point is absent. Absent is never zero.

`aprfmt trace --list-points MODEL` prints the points of one model.

The last columns have the names of other engines:

- **llama.cpp**: a graph node by name and operation (`Qcur ROPE`), or the node that reads a weight,
  whatever its name (`MUL_MAT of attn_q.weight`). If several nodes fit, the last one
- **transformers**: a module's path below the layer. `#in` is the module's input, `(qkv)` a part of
  a joined result, `[pre]` the placement of norms for which the name means this point. `#q_rope`
  and the like are keys of an `.npz`, and names in aprfmt's hooks
- **apr**: the stage of `--save-tensor`. A stage of several points holds them next to each other

"""
_CACHE = """
`k_cache` and `v_cache` are recorded in passes that continue a cache (`trace --behind N`); without
one, attention reads `k_rope` and `v`, and they are aliases of these.

## Slots

Without `--points`, `trace --payload` records these points. `--points` accepts their names in `apr
trace` too. In JSON these names are `slot`. Tables, pages and `--reference` have the points' own
names:

"""


def render_page() -> str:
    """Return the page docs/reference/capture_points.md as Markdown."""
    rows = [
        (
            f"`{point.name}`",
            f"[{point.shape}]",
            point.sentence,
            _format_names(point.llama_cpp),
            f"`{point.apr}`" if point.apr else "",
            _format_names(point.hf),
        )
        for point in POINTS.values()
    ]
    slots = [
        (f"`{slot}`", " ".join(f"`{point}`" for point in points)) for slot, points in SLOTS.items()
    ]
    head = ("point", "shape", "what it is", "llama.cpp", "apr", "transformers")
    return _HEAD + table(head, rows) + _CACHE + table(("slot", "points"), slots)


def _format_names(names: Sequence[Name]) -> str:
    """Return names as Markdown code, joined by commas; "the layer" for the layer's result."""
    return ", ".join(f"`{name}`" if name.text or name.role else "the layer" for name in names)


if __name__ == "__main__":
    print(render_page(), end="")
