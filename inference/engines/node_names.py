"""Arrays that have llama.cpp's names of graph nodes: `l_out-3`, `ffn_inp-0`, `result_norm`.

llama.cpp calls several nodes by one name (a query before and after rope), of which a dump by name
keeps one. A name is read where one of its nodes is a point, or where shape and model settle it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aprfmt.inference.capture import WHOLE, key_name
from aprfmt.inference.engines.graph import GraphNode, GraphReader
from aprfmt.inference.engines.record_collector import Collector
from aprfmt.inference.points import POINTS, Point
from aprfmt.model import Model

_LAYERED = re.compile(r"([A-Za-z_]+)-(\d{1,6})")
# Names of one node each, by its operation; "" where the name alone says the point.
_ONE: Mapping[str, str] = {
    "ffn_inp": "ADD", "l_out": "", "kqv_out": "", "kq_soft_max": "SOFT_MAX",
    "ffn_silu": "", "ffn_gelu": "", "ffn_relu": "", "ffn_swiglu": "", "ffn_geglu": "",
    "ffn_gate_par": "", "ffn_moe_out": "", "result_output": "",
}  # fmt: skip
# Names of the last node that reads a weight: its bias where there is one.
_OF_WEIGHT: Mapping[str, str] = {
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "Vcur": "attn_v", "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_up", "ffn_out": "ffn_down", "result_norm": "output_norm",
}  # fmt: skip
_ROTATED: Mapping[str, str] = {"Qcur": "q", "Kcur": "k"}
_OPEN: Mapping[str, str] = {
    "attn_out": "the output product or the sum with the stream, by the build of llama.cpp",
    "kq": "scores before their scale, which the softmax has",
    "norm": "a norm before its weight, of attention, of the MLP or of a head",
    "inp_embd": "the embedding before or after its factor, by the model",
}
_UNLAYERED = ("inp_embd", "result_norm", "result_output")


@dataclass(frozen=True)
class NodeName:
    """The name of a graph node: its text, and its layer, WHOLE for a node outside of layers."""

    text: str
    layer: int


def parse_node_name(name: str) -> NodeName | None:
    """Return (text, layer) of a graph node's name; None if it is no point's in any model."""
    match = _LAYERED.fullmatch(name)
    text, layer = (match[1], int(match[2])) if match else (name, WHOLE)
    if (layer == WHOLE) != (text in _UNLAYERED):
        return None
    known = text in _ONE or text in _OF_WEIGHT or text in _ROTATED or text in _OPEN
    return NodeName(text, layer) if known else None


def points_of_node_name(name: str) -> tuple[Point, ...]:
    """Return the points that a graph node of this name may be; () for any other name."""
    node = parse_node_name(name)
    if node is None:
        return ()
    role = _OF_WEIGHT.get(node.text) or f"attn_{_ROTATED.get(node.text)}"
    return tuple(
        point
        for point in POINTS.values()
        if any(
            (one.text == node.text and node.text in (*_ONE, *_ROTATED))
            or one.role.rpartition(".")[0] == role
            for one in point.llama_cpp
        )
    )


def node_of_name(
    node: NodeName, shape: Sequence[int], model: Model | None, scaled: bool
) -> GraphNode | str:
    """Return the graph node that an array of this name and shape is, or why that is not known.

    `model` is the model that ran, None if not given; `scaled` says whether it scales its
    embedding.
    """
    text, layer = node.text, node.layer
    name = text if layer == WHOLE else f"{text}-{layer}"
    sizes = tuple(shape)
    while len(sizes) > 2 and sizes[0] == 1:
        sizes = sizes[1:]

    def of_weight(role: str) -> GraphNode | str:
        """Return the graph node that applies a role: its bias added, or else its weight.

        Without the model, which says whether the role has a bias, a sentence says that the node
        is not known.
        """
        if model is None:
            return f"whether a bias follows is not known without the model ({role})"
        has = (f"{role}.bias" if layer == WHOLE else f"L{layer}.{role}.bias") in model.roles
        place = "" if layer == WHOLE else f"blk.{layer}."
        kind = "MUL" if role.endswith("norm") else "MUL_MAT"
        return (
            GraphNode(name, "ADD", sizes, (name, f"{place}{role}.bias"))
            if has
            else GraphNode(name, kind, sizes, (f"{place}{role}.weight",))
        )

    if text in _ONE:
        return GraphNode(name, _ONE[text], sizes, ())
    if text in _OF_WEIGHT:
        return of_weight(_OF_WEIGHT[text])
    if text == "inp_embd" and model is not None and not scaled:
        return GraphNode(name, "GET_ROWS", sizes, ("token_embd.weight",))
    if text not in _ROTATED:
        return f"llama.cpp's name says one of several: {_OPEN[text]}"
    # Queries and keys: two axes before rope, three after it.
    part = _ROTATED[text]
    if model is None or model.format != "gguf":
        return (
            "llama.cpp's rows of queries and keys may be in pairs, and be before or after rope: "
            "compare with the GGUF that ran"
        )
    if len(sizes) == 2:
        return of_weight(f"attn_{part}")
    if f"L{layer}.attn_{part}_norm.weight" in model.roles:
        return f"llama.cpp calls it {text} before its norm and after rope, both of three axes"
    return GraphNode(name, "ROPE", sizes, (name,))


def node_adder(
    model: Model | None, tokens: int | None
) -> Callable[[str, Sequence[int], Callable[[], NDArray[Any]], Collector], None]:
    """Return a function that adds an array under a node's name to a collector.

    The function takes (name, shape, function that reads the values, collector), and notes in the
    collector's `unknown` why an array is not read. `model` is the model that ran, `tokens` the
    length of the pass.
    """

    def add(
        name: str, shape: Sequence[int], read: Callable[[], NDArray[Any]], into: Collector
    ) -> None:
        """Add an array to the collector `into` at the capture points of its llama.cpp node name.

        Its values are read only if there are such points; else why is put into `into.unknown`.
        """
        node = parse_node_name(name)
        assert node is not None
        known = into.known.get("embd_scaled")
        scaled = known is not None and not known.alias_of and not known.absent
        found = node_of_name(node, shape, model, scaled)
        if isinstance(found, str):
            into.unknown[name] = found
            return
        reader = GraphReader(into, model, tokens or (shape[0] if shape else 1))
        before = set(into.unknown)
        places = [
            place for place in reader.points_of_node(found)
            if into.record_key(key_name(place.point, place.layer)) is not None
        ]  # fmt: skip
        if not places:
            into.unknown[name] = "the model has no such point"
            return
        values = read()
        try:
            for place in places:
                into.refuse_unlike(place.point, values, None)
        except ValueError as error:
            into.unknown[name] = str(error)
            into.lost.add(name)
            return
        reader.add(found, values)
        for said in sorted(set(into.unknown) - before):
            into.unknown[name] = into.unknown.pop(said)
            into.lost.add(name)

    return add
