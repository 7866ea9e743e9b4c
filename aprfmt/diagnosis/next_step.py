"""What to record next, where the points at hand do not lead to a cause."""

from collections.abc import Mapping, Sequence

from aprfmt.diagnosis.shadow import View
from aprfmt.inference.points import POINTS

MOST = 12  # points that are asked for


def missing_points(view: View, views: Mapping[str, View]) -> list[str]:
    """Return the keys that the trace lacks between the last good points and a divergence.

    Of several layers it is their outputs: with these, one layer is left.
    """
    keys = list(views)
    start = max((keys.index(key) for key in view.after if key in views), default=-1)
    between = keys[start + 1 : keys.index(view.key)] if view.key in views else []
    lacking = [key for key in between if views[key].seen is None and not views[key].base]
    layers = {views[key].layer for key in lacking if views[key].layer >= 0}
    if len(layers) > 1:
        return [key for key in lacking if key.endswith(".out")]
    return lacking


def next_step(view: View, views: Mapping[str, View], ids: Sequence[int], model: str) -> str:
    """Return the command that records what is missing, with the engine's names; "" for none."""
    lacking = missing_points(view, views)
    if not lacking:
        return ""
    points = list(dict.fromkeys(key.rpartition(".")[2] for key in lacking))[:MOST]
    layers = sorted({views[key].layer for key in lacking if views[key].layer >= 0})
    chosen = f" --layers {','.join(map(str, layers))}" if layers else ""
    modules = [name.text for point in points for name in POINTS[point].hf[:1]]
    there = f"; transformers calls them {', '.join(modules)}" if modules else ""
    given = ",".join(map(str, ids))
    return (
        f"next: dump {', '.join(points)} of the engine{_of(layers)}{there}; what the model has "
        f"there: aprfmt trace {model} --payload --points {','.join(points)}{chosen} --ids {given} "
        "--save right.safetensors; the engine's arrays become a trace with aprfmt trace "
        f"{model} --map DUMPS -o engine.safetensors"
    )


def _of(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    return f" in layer {layers[0]}" if len(layers) == 1 else f" in layers {layers[0]}-{layers[-1]}"
