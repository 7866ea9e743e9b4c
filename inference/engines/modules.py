"""Finds the capture points among transformers' modules: which module's result is which point.

A *joined result* is one module's output for several projections, as qkv; its *parts* are the
columns of each. A *name* is a row of a point's table: a module's path, and which part of the result
is meant.

A key is a module's path (`model.layers.0.self_attn.q_proj`), `<layer>#in`, `<layer>#out`,
`<layer>#q_rope` with a layer's path or its number, or `logits`. Keys without a point are listed
with the reason.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.spec import BlockSpec
from aprfmt.base.sequences import join_first
from aprfmt.inference.capture import POINTS, WHOLE, find_key, key_name
from aprfmt.inference.engines.node_names import points_of_node_name
from aprfmt.inference.engines.parts import has_vocabulary_axis
from aprfmt.inference.engines.record_collector import (
    HEADED,
    Collector,
    drop_batch_axis,
    pairs_to_halves,
    split_heads,
)
from aprfmt.inference.engines.tiles import MeasuredTiles, Tiles
from aprfmt.inference.points import Name, Point
from aprfmt.model.towers import MODULES as TOWERS

Numbers = NDArray[Any]
# Path prefixes before a layer's number, and before a whole-model module.
_LAYER = re.compile(r"(?:\w+\.)*?(?:layers|layer|h|blocks)\.(\d{1,9})(?:\.([\w.]+))?(#\w+)?")
_NUMBER = re.compile(r"\d{1,9}#\w+")
_UNDERSCORES = re.compile(r"(?:\w+_)??(?:layers|layer|h|blocks)_(\d{1,9})(?:_(\w+))?")
# An entry of the tuple that `output_hidden_states=True` gives: hidden_states.3, hidden_states[-1].
_HIDDEN_STATE = re.compile(r"(?:\w+\.)*?hidden_states?[._/-]?\[?(-?\d{1,9})\]?")
_LAST_STATE = "last_hidden_state"  # the last of them, as transformers' models return it
# The beginnings of a tower's names in which underscores stand for the dots.
_TOWER_FILES = tuple(f"{name}_" for name in TOWERS if name != "connector")
_ABOVE = re.compile(
    r"(?:(?:model|language_model|transformer|base_model|gpt_neox|backbone|decoder|bert|roberta|cls)\.)*([\w.]+(?:#\w+)?)"
)
# Architectures whose code in transformers leaves rotated vectors in adjacent pairs.
ADJACENT = (
    "cohere", "cohere2", "deepseek_v2", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "glm", "glm4",
    "gptj", "llama4",
)  # fmt: skip
# Architectures whose joined q, k and v come by groups of heads, q, k and v of each in turn.
GROUPED = ("bloom", "falcon", "falcon_40b", "falcon_rw", "falcon_rw_40b", "gpt_bigcode", "gpt_neox")
# Rope is applied to [batch, heads, tokens, head_dim]; projections are [batch, tokens, width].
HEADS_FIRST = ("#q_rope", "#k_rope", "#q_attn", "#k_attn", "#v", "#k_cache", "#v_cache")
RANK_WITHOUT_MODULE = 99  # rank of a value that counts only where no module gives the point
PASSING = ("fc1_latent_proj",)  # modules that do nothing in models without such a projection
# Architectures whose projections of delta nets engines join whole, not by key heads.
DELTA_JOINED = ("qwen3_5", "qwen3_5_moe", "olmo_hybrid")
# Architectures whose router gives the experts' weights before the model's factor on them.
UNSCALED = ("minimax_m3_vl",)
# Points whose last two axes are joined in ours: streams or groups of heads (deepseek_v4), and an
# indexer's heads.
STREAMS = ("in", "mid", "out", "attn")
INDEX_HEADS = ("index_q", "index_k")
TURNED = ("#q_rope", "#k_rope", "#q_attn", "#k_attn")
_BY_UNDERSCORES = {
    name.text.replace(".", "_"): name.text
    for point in POINTS.values()
    if point.layered
    for name in point.hf
    if "." in name.text or "_" in name.text
}
# (inside a layer, path below it) -> {point: its names of this path, each with its rank}.
_NAMED: dict[tuple[bool, str], dict[str, list[tuple[int, Name]]]] = {}
for _point in POINTS.values():
    for _rank, _name in enumerate(_point.hf):
        _rows = _NAMED.setdefault((_point.layered, _name.text), {})
        _rows.setdefault(_point.name, []).append((_rank, _name))
_WHOLE_NAMES = frozenset(
    name.text for point in POINTS.values() if not point.layered for name in point.hf
)


@dataclass(frozen=True)
class ModuleReading:
    """One capture point that a module's key may be, with the name in the table of points that fits.

    `name` is that row of the point's table, and `rank` its number there: the first name is
    preferred.
    """

    point: Point
    layer: int
    name: Name
    rank: int


def tower_sentence(names: Sequence[str]) -> str:
    """Return the clause that arrays of a dump are all a vision or audio tower's; "" if not all are.

    `names` are those of all arrays that the dump has.
    """
    if not names or not all(map(is_of_tower, names)):
        return ""
    return (
        f"arrays of a vision or audio tower alone ({join_first(names, 2)}), of which no forward "
        "pass is known; `aprfmt diagnose` compares two dumps of it by their names"
    )


def parse_module(key: str) -> tuple[int, str] | None:
    """Return (layer, path below it) of a module's key; None for any other key.

    The layer of a module outside the layers is WHOLE. None too for a module of a vision or audio
    tower: its layers are not those of the language model.
    """
    if is_of_tower(key):
        return None
    match = _LAYER.fullmatch(f"layers.{key}" if _NUMBER.fullmatch(key) else key)
    if match:
        return int(match[1]), f"{match[2] or ''}{match[3] or ''}"
    # A file's name may have underscores in place of the dots.
    match = _UNDERSCORES.fullmatch(key)
    if match and (match[2] is None or match[2] in _BY_UNDERSCORES):
        return int(match[1]), _BY_UNDERSCORES[match[2]] if match[2] else ""
    above = _ABOVE.fullmatch(key)
    return (WHOLE, above[1]) if above and above[1] in _WHOLE_NAMES else None


def is_of_tower(key: str) -> bool:
    """Return whether a module's key names one of a vision or audio tower, such as `visual.merger`.

    A file's name may have underscores in place of the dots.
    """
    parts = key.partition("#")[0].split(".")
    return not TOWERS.isdisjoint(parts) or key.startswith(_TOWER_FILES)


def points_named(key: str) -> tuple[Point, ...]:
    """Return the points that a key may be: by our name, by a module's path, or by a node's name.

    () for any other key, such as a parameter's.
    """
    own = find_key(key)
    if own is not None:
        return (POINTS[own[0]],)
    if hidden_state_index(key) is not None:
        return (POINTS["out"],)
    found = parse_module(key)
    named = {} if found is None else _NAMED.get((found[0] != WHOLE, found[1]), {})
    return tuple(POINTS[name] for name in named) or points_of_node_name(key)


# Modules whose output is the rows of a table of positions.
_POSITIONS = ("wpe", "embed_positions", "position_embeddings", "pos_embed")


OF_TOWER = "of a vision or audio tower, of which no forward pass is known"


def _no_point_text(key: str) -> str:
    """Return why a module's output is no point."""
    if key.rpartition(".")[2] in _POSITIONS:
        return "rows of the position table, no point of their own: embd_scaled is the sum with them"
    if is_of_tower(key):
        return OF_TOWER
    return "not a capture point"


def hidden_state_index(key: str) -> int | None:
    """Return N of a key such as `hidden_states.N` or `hidden_states[N]`; None for other keys.

    -1 for `last_hidden_state`.
    """
    if key.rpartition(".")[2] == _LAST_STATE:
        return -1
    match = _HIDDEN_STATE.fullmatch(key)
    return None if match is None else int(match[1])


def hidden_state_points(keys: Iterable[str], n_layers: int | None) -> dict[str, tuple[str, int]]:
    """Return {key: (point, layer)} of the entries of transformers' tuple `hidden_states`.

    Entry 0 is what enters layer 0, entry N the output of layer N - 1. The last one comes after the
    final norm (modeling_llama.LlamaModel and its kin return it so). Where `n_layers` is None, entry
    0 is taken for the embedding. Entries 0 to N without a gap are then the whole tuple; otherwise
    the largest is left out, as it may be the last.
    """
    first = ("embd", WHOLE) if n_layers is None else ("in", 0)
    entries = {key: n for key in keys if (n := hidden_state_index(key)) is not None}
    found: dict[str, tuple[str, int]] = {}
    counted = {number for number in entries.values() if number >= 0}
    if n_layers is None and counted and counted == {*range(len(counted))}:
        n_layers = len(counted) - 1
    for key, number in entries.items():
        if number == -1 or (number == n_layers and number > 0):
            found[key] = ("final_norm", WHOLE)
        elif n_layers is None and number == max(entries.values()):
            continue
        elif number < 0 and n_layers is not None and number >= -n_layers:
            found[key] = ("out", n_layers + number)
        elif number == 0:
            found[key] = first
        elif number > 0 and (n_layers is None or number < n_layers):
            found[key] = ("out", number - 1)
    return found


class ModuleMap:
    """Maps a set of keys to points; `placement` None is derived from the norms of a layer."""

    def __init__(self, keys: Iterable[str], placement: str | None = None) -> None:
        """Parse the keys; left out are those of no module, and those of a vision or audio tower.

        A tower's layers are none of the text model's.
        """
        self._below: dict[int, set[str]] = {}
        self._parsed: dict[str, tuple[int, str]] = {}
        for key in keys:
            parsed = None if is_of_tower(key) else parse_module(key)
            if parsed is not None:
                self._parsed[key] = parsed
                self._below.setdefault(parsed[0], set()).add(parsed[1])
        self._placement = placement

    def read(self, key: str) -> list[ModuleReading]:
        """Return all capture points in the value of a module's key; [] if it has none."""
        if key not in self._parsed:
            return []
        layer, below = self._parsed[key]
        found = []
        # Of each point the first fitting name counts.
        for point, names in _NAMED.get((layer != WHOLE, below), {}).items():
            for rank, name in names:
                if self._is_point(name, layer):
                    found.append(ModuleReading(POINTS[point], layer, name, rank))
                    break
        return found

    def _is_point(self, name: Name, layer: int) -> bool:
        """Return whether a module is the point in this layer, as the layer's other modules show.

        `name` is the row of the table of points that has the module's path, which has another
        meaning in other architectures.
        """
        siblings = self._below[layer]
        if name.text in ("mlp", "feed_forward"):  # a mixture has a router with the same path
            return True
        if name.text == "embeddings":  # where modules are inside, its result is that of a norm
            return not any(path.startswith("embeddings.") for path in siblings)
        if name.text.partition(".")[0] == "shared_mlp":  # of a mixture it is no point
            return not (self.is_mixture(layer) or "block_sparse_moe" in siblings)
        if name.text.endswith(".experts"):  # without a shared expert, which is added outside
            return not any("shared" in path for path in siblings)
        if name.text == "block_sparse_moe":  # a shared MLP at its side is added outside
            return not any(path.partition(".")[0] == "shared_mlp" for path in siblings)
        if name.text == "post_mlp_layernorm" and not name.placement:  # of a result, not of a sum
            return self._placement != "after"
        if not name.placement:
            return True
        if "post_self_attn_layernorm" in siblings:  # glm4's other norm is the one before the MLP
            return name.placement == "pre"
        return name.placement == (self._placement or norm_placement(siblings))

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer has a router among its modules: a mixture of experts."""
        return any(name.text in self._below.get(layer, ()) for name in POINTS["router"].hf)


def norm_placement(siblings: Collection[str]) -> str:
    """Return the block placement ("pre", "post", "sandwich") by the names of a layer's norms.

    "streams": hyper-connections collapse streams for each norm.
    """
    names = {name.partition("#")[0] for name in siblings}
    if "ffn_hc" in names:
        return "streams"
    if "pre_feedforward_layernorm" in names:
        return "sandwich"
    if "post_feedforward_layernorm" in names and "input_layernorm" not in names:
        return "post"
    return "pre"


def stated_placement(block: BlockSpec) -> str | None:
    """Return where a block's norms are: pre, post, sandwich, after or streams; None if it varies.

    It varies where the layer's mixer decides it. "streams" is for hyper-connections.
    """
    if block.streams == "hyper":
        return "streams"
    return None if block.placement == "by_mixer" else block.placement


class ModuleReader:
    """Puts module outputs into a Collector: splits them and converts layouts."""

    def __init__(
        self,
        collector: Collector,
        keys: Iterable[str],
        *,
        block: Any = None,
        architecture: str = "",
        tokens: int | None = None,
        scaled_embedding: bool | None = None,
    ) -> None:
        """Prepare to read values of these keys into `collector`.

        `block` and `architecture` are the model's, which say its layouts; `tokens` is the length of
        the pass. `scaled_embedding`: the embedding module's result is already scaled.
        """
        self._collector = collector
        keys = list(keys)
        self.modules = ModuleMap(keys, None if block is None else stated_placement(block))
        hp = collector.hp
        self._hidden_states = hidden_state_points(keys, None if hp is None else int(hp["n_layers"]))
        self._adjacent = architecture in ADJACENT
        self._grouped = architecture in GROUPED
        self._unscaled = architecture in UNSCALED
        self._delta_joined = architecture in DELTA_JOINED
        self._gated = block is not None and block.attention_gate == "sigmoid"
        self._copied = block is not None and block.streams == "altup"
        self._compressed = block is not None and block.attention == "compressed"
        self._tokens = tokens
        self._scaled = scaled_embedding
        self._like: dict[str, Numbers] = {}
        self._lengths: dict[str, int] = {}  # tokens of q and k before rope, by layer and point

    def for_collector(self, collector: Collector) -> "ModuleReader":
        """Return a copy of this reader that records into another collector."""
        if collector is self._collector:
            return self
        other = copy(self)
        other._collector = collector
        return other

    def add(self, key: str, values: Numbers, rows: Sequence[int] | None = None) -> None:
        """Record one module's array as the value of each capture point that its name means.

        `key` is the module's, `rows` are the token positions of the array's rows, None if their
        number tells. If it cannot be recorded, the collector's `unknown` gets the reason.
        """
        readings = self.modules.read(key)
        if key in self._hidden_states:
            self._add_hidden_state(key, values, rows)
            return
        if not readings:
            self._collector.unknown[key] = (
                _no_point_text(key)
                if hidden_state_index(key) is None
                else "of how many layers it is an entry is not known; give --model"
            )
            return
        try:
            values = drop_batch_axis(self._joined_copies(values), key)
            for point in dict.fromkeys(reading.point.name for reading in readings):
                if "norm" in key.rpartition(".")[2]:  # of heads: it may be given a row for each
                    values = self._collector.join_head_rows(point, values)
                self._collector.refuse_unlike(point, values, rows)
                values = self._collector.cut_to_vocabulary(key, point, values)
            taken = [self._add(reading, values, rows) for reading in readings]
        except ValueError as error:
            self._collector.unknown[key] = str(error)
            self._collector.lost.add(key)
            return
        if not any(taken):
            self._collector.unknown[key] = "the model has no such point"

    def _add_hidden_state(self, key: str, values: Numbers, rows: Sequence[int] | None) -> None:
        """Record an entry of `hidden_states` as its capture point.

        If a module's own output is recorded for that point, it counts before this one. The last
        entry of a model without a final norm is the output of its last layer.
        """
        point, layer = self._hidden_states[key]
        hp = self._collector.hp
        if point == "final_norm" and hp is not None and self._collector.record_key(point) is None:
            point, layer = "out", int(hp["n_layers"]) - 1
        try:
            values = drop_batch_axis(values, key)
            self._collector.refuse_unlike(point, values, rows)
        except ValueError as error:
            self._collector.unknown[key] = str(error)
            self._collector.lost.add(key)
            return
        self._collector.add(point, layer, values, rows=rows, rank=RANK_WITHOUT_MODULE)

    def add_unread(self, key: str, tiles: Tiles, rows: Sequence[int] | None = None) -> bool:
        """Record one key's values without reading them; return whether that was done.

        False, with nothing recorded, where a point is only some columns of the values or has them
        in another order, or where the values must be looked at. The caller then uses `add`, which
        takes the same arguments, with the values in place of `tiles`.
        """
        collector = self._collector
        if rows is None and self._tokens is not None and tiles.rows != self._tokens:
            return False
        found: list[tuple[str, int, tuple[int, ...], int]] = []
        for reading in self.modules.read(key):
            if not self._is_meant(reading):
                continue
            shape = self._plain_shape(reading, tiles)
            if shape is None:
                return False
            found.append((reading.point.name, reading.layer, shape, reading.rank))
        if not found or not collector.takes_unread:
            return False
        measured = MeasuredTiles(tiles)
        for point, layer, shape, rank in found:
            collector.add_unread(point, layer, shape, measured, rows=rows, rank=rank)
            if point in ("q", "k"):
                self._lengths[f"{layer}.{point}"] = tiles.rows
        return True

    def _plain_shape(self, reading: ModuleReading, tiles: Tiles) -> tuple[int, ...] | None:
        """Return the shape of a capture point whose values are just the array's, in its order.

        None if the point is only some columns of the array, or has them in another order.
        """
        point, shape, collector = reading.point.name, (tiles.rows, tiles.width), self._collector
        if self._compressed or reading.name.part not in ("", "scaled"):
            return None
        if point in ("router", "expert_w") or POINTS[point].rows == "scores":
            return None
        if has_vocabulary_axis(point) and collector.hp is not None:
            return shape if tiles.width == int(collector.hp["vocab_size"]) else None
        if point not in HEADED:
            return shape
        heads = collector.heads(point, reading.layer)
        turned = reading.name.text in TURNED and self._adjacent
        if not heads or tiles.width % heads or heads == tiles.rows or turned:
            return None
        return (tiles.rows, heads, tiles.width // heads)

    def _joined_copies(self, values: Numbers) -> Numbers:
        """Return stream copies [n, 1, tokens, hidden] as [tokens, n * hidden]; others unchanged.

        The first is the shape of gemma3n's layer outputs (AltUp).
        """
        if not self._copied or values.ndim != 4 or values.shape[0] == 1:
            return values
        return values[:, 0].swapaxes(0, 1).reshape(values.shape[2], -1)

    def expects(self, key: str) -> bool:
        """Return whether the model has a capture point in the value of a module's key.

        A key with #, and one of a module that does nothing in some models, has to be of a point
        that this model has. Any other key only has to name a point.
        """
        readings = self.modules.read(key)
        always = "#" not in key and not key.endswith(PASSING)
        if always or not self._collector.known:
            return bool(readings)
        names = [key_name(reading.point.name, reading.layer) for reading in readings]
        return any(self._collector.record_key(name) is not None for name in names)

    def _is_meant(self, reading: ModuleReading) -> bool:
        """Return whether the point of a reading exists in the model and is this module's output.

        A path such as `mlp` has several meanings. Without a model only the names of the other
        modules decide.
        """
        point, layer, name = reading.point.name, reading.layer, reading.name
        collector = self._collector
        if point in ("embd", "embd_scaled") and (name.part == "scaled") != bool(self._scaled):
            return False
        parallel = collector.known and collector.record_key(key_name("ssm_out", layer))
        # The mixer is next to attention, whose result is attn_out.
        if name.text in ("mamba.out_proj", "mamba") and parallel:
            return point == "ssm_out"
        # Bloom's adds the stream inside, as no point is; Bloom has a norm on its embedding.
        if name.text == "self_attention":
            return bool(collector.known) and collector.record_key("embd_norm") != "embd_norm"
        mixture = self.modules.is_mixture(layer)
        # Attention, a state space mixer, an MLP and a mixture of experts all have that name.
        if name.text == "mixer" and not collector.known:
            return mixture and point == "moe_out"
        if name.text == "mlp" and not collector.known and (point == "moe_out") != mixture:
            return False
        return not collector.known or collector.record_key(key_name(point, layer)) is not None

    def _add(self, reading: ModuleReading, values: Numbers, rows: Sequence[int] | None) -> bool:
        """Record the columns of a module's values that are one point; return whether it exists.

        Raises ValueError for the values of more than one sequence.
        """
        if not self._is_meant(reading):
            return False
        point, layer, name = reading.point.name, reading.layer, reading.name
        collector = self._collector
        # Cut a joined result to the point's columns.
        part = "gate" if self._gated and point == "q" else name.part
        if part in ("qkv", "halves", "heads", "tail", "gate", "groups", "ssm"):
            share = self._point_columns(point, layer, part, values)
            if share is None:
                if point == "q":
                    collector.add_joined("qkv", layer, values)
                return True
            values = share
        # Bring the value into the point's shape.
        if point in HEADED:
            values = self._split_point_heads(point, layer, name.text, values)
        elif point == "expert_w" and self._unscaled and collector.hp is not None:
            values = values * values.dtype.type(collector.hp["routed_scale"])
        elif point == "per_layer_proj":
            values = values.reshape(len(values), -1)
        elif point == "delta_norm" and collector.hp is not None:  # a norm's rows are heads
            width = int(collector.hp["delta_value_heads"]) * int(collector.hp["delta_value_dim"])
            values = values.reshape(-1, width)
        elif values.ndim == 3 and point in (STREAMS if self._compressed else INDEX_HEADS):
            values = values.reshape(len(values), -1)
        elif values.ndim == 3 and POINTS[point].rows != "scores" and point != "k_pe":
            raise ValueError(f"shape {list(values.shape)}; expected one sequence [tokens, width]")
        if point == "router" and self._has_chosen_alone(values):
            self._add_chosen(layer, values, rows)
            return True
        collector.add(point, layer, values, rows=rows, rank=reading.rank)
        return True

    def _has_chosen_alone(self, values: Numbers) -> bool:
        """Return whether a router's result [tokens, experts] has weights of chosen experts only.

        The entries of all other experts are then 0. llama4's router returns this before the
        logits.
        """
        hp = self._collector.hp
        if hp is None or values.ndim != 2 or not values.size:
            return False
        used = int(hp["n_experts_used"])
        counts = np.count_nonzero(values, axis=1)
        return used < values.shape[1] and bool((counts == used).all() and (values >= 0).all())

    def _add_chosen(self, layer: int, values: Numbers, rows: Sequence[int] | None) -> None:
        """Record the points `experts` and `expert_w` of a layer from a router's weights.

        `values` [tokens, experts] are 0 for experts that are not chosen.
        """
        assert self._collector.hp is not None
        used = int(self._collector.hp["n_experts_used"])
        ids = np.argsort(-values, axis=1, kind="stable")[:, :used]
        weights = np.take_along_axis(values, ids, axis=1)
        for point, found in (("experts", ids), ("expert_w", weights)):
            self._collector.add(point, layer, found, rows=rows, rank=RANK_WITHOUT_MODULE)

    def _point_columns(self, point: str, layer: int, part: str, values: Numbers) -> Numbers | None:
        """Return the columns of a joined result such as qkv that are one capture point.

        None if their number is unknown. `part` says how the projections are joined, by the word of
        the table of points.
        """
        width = values.shape[-1]
        # Each kind of joined result has its own order of columns.
        if part == "halves":
            half = width // 2
            return values[..., :half] if point == "ffn_gate" else values[..., half:]
        if part == "groups":
            return self._delta_net_columns(point, values)
        if part == "ssm":
            return self._mixer_columns(point, values)
        heads, kv = (self._collector.heads(one, layer) for one in "qk")
        if heads is None or kv is None:
            return None
        if part == "gate":  # query and gate of a head side by side
            both = values.reshape(len(values), heads, 2, -1)
            return both[:, :, int(point == "attn_gate")].reshape(len(values), -1)
        if part == "qkv":
            size = width // (heads + 2 * kv)
            if self._grouped:
                each = values.reshape(-1, kv, width // kv)
                query = heads // kv * size
                first = {"q": 0, "k": query, "v": query + size}[point]
                part_ = each[..., first : first + (query if point == "q" else size)]
                return part_.reshape(len(each), -1)
            first = {"q": 0, "k": heads * size, "v": (heads + kv) * size}[point]
            return values[..., first : first + (heads if point == "q" else kv) * size]
        # MLA's joined keys: without position, with position, values.
        assert self._collector.hp is not None
        nope = int(self._collector.hp["qk_nope_head_dim"])
        if part == "tail":
            rank = int(self._collector.hp["kv_lora_rank"])
            return values[..., None, rank:]
        each = values.reshape(values.size // width, heads, -1)
        return each[..., :nope] if point == "k_nope" else each[..., nope:]

    def _mixer_columns(self, point: str, values: Numbers) -> Numbers | None:
        """Return a point's columns of a state space mixer's projection, times its factor.

        mamba's has the values first and no time step, mamba2's the gate first. None if not known.
        """
        hp = self._collector.hp
        if hp is None:
            return None
        width = int(hp["ssm_size"])
        if "ssm_groups" not in hp:
            first = {"ssm_conv_in": 0, "ssm_gate": width}.get(point)
            return None if first is None else values[..., first : first + width]
        shared = int(hp["ssm_groups"]) * int(hp["ssm_state"])
        parts = np.split(values, np.cumsum([width, width, shared, shared]), axis=-1)
        if "ssm_scales" in hp:  # no module has the product with these
            parts = [part * factor for part, factor in zip(parts, hp["ssm_scales"], strict=True)]
        gate, *rows, step = parts
        joined: Numbers = np.concatenate(rows, axis=-1)
        return {"ssm_gate": gate, "ssm_dt": step}.get(point, joined)

    def _delta_net_columns(self, point: str, values: Numbers) -> Numbers | None:
        """Return a point's columns of a gated delta net's joined projection.

        The projection has q, k, v and gate, or beta and alpha, next to each other for each key
        head; in some engines' modules it has them for all heads together. None without the model's
        sizes.
        """
        hp = self._collector.hp
        if hp is None:
            return None
        heads, tokens = int(hp["delta_key_heads"]), len(values)
        groups = 1 if self._delta_joined else heads
        by_group = values.reshape(tokens, groups, -1)
        if point in ("beta_mm", "alpha"):
            wanted = np.split(by_group, 2, axis=-1)[point == "alpha" :][:1]
        else:
            key = heads // groups * int(hp["delta_key_dim"])
            value = int(hp["delta_value_heads"]) // groups * int(hp["delta_value_dim"])
            *joined, gate = np.split(by_group, np.cumsum([key, key, value]), axis=-1)
            wanted = [gate] if point == "delta_gate" else joined
        return np.concatenate([part.reshape(tokens, -1) for part in wanted], axis=-1)

    def _split_point_heads(self, point: str, layer: int, text: str, values: Numbers) -> Numbers:
        """Return q, k or v as [tokens, heads, d], with rotated elements moved to split halves.

        `text` is the module's name in the table of points; some modules have heads first, some have
        adjacent pairs. q and k before rope are remembered: they show which axis is that of heads.
        """
        like = self._like.get(f"{layer}.{point[0]}")
        first = text in HEADS_FIRST
        length = self._lengths.get(f"{layer}.{point[0]}")
        if self._compressed and text in ("#k_rope", "#k_attn") and length is not None:
            values = values[..., :length, :]  # keys of windows come after those of tokens
        heads = self._collector.heads(point, layer)
        # q and k before rope show which axis is that of heads.
        values = split_heads(values, heads, self._tokens, like, first)
        # Only as many tokens as heads leave the axes open: of longer passes no copy is needed.
        if point in ("q", "k") and values.ndim == 3:
            self._lengths[f"{layer}.{point}"] = len(values)
            if values.shape[0] == values.shape[1]:
                self._like[f"{layer}.{point}"] = np.array(values)
        if text in TURNED and self._adjacent and values.ndim == 3:
            start, count = self._rotated_range(layer, values.shape[-1])
            values = pairs_to_halves(values, start, start + count)
        return values

    def _rotated_range(self, layer: int, width: int) -> tuple[int, int]:
        """Return (start, count) of the elements of a head that rope rotates in a layer."""
        hp = self._collector.hp
        if hp is None:
            return 0, width
        if not hp["rope_layers"][layer]:
            return 0, 0
        if self._compressed:
            return width - int(hp["rope_dim"]), int(hp["rope_dim"])
        mla = "L0.kv_a" in self._collector.known and not self._collector.known["L0.kv_a"].absent
        return int(hp["qk_nope_head_dim"]) if mla else 0, int(hp["rope_dim"])
