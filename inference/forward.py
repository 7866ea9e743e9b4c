"""The forward pass, written once for all architectures and backends.

What a block does is its BlockSpec's, every number is a hyperparameter's; nothing here has a
default or knows an architecture's name. Named points (capture.py) go past the recorder.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from aprfmt.arch.spec import ArchSpec
from aprfmt.errors import UsageError
from aprfmt.inference.attention import attention
from aprfmt.inference.backends.base import Array, Backend
from aprfmt.inference.capture import WHOLE
from aprfmt.inference.context import Context, Ids, PassFacts, Recorder
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.moe import moe
from aprfmt.inference.rope import ropes
from aprfmt.inference.weights import Weights
from aprfmt.tensor import Value

LogitRows = Literal["last", "all"] | Sequence[int]


def forward(
    backend: Backend,
    spec: ArchSpec,
    hp: Mapping[str, Value],
    weights: Weights,
    ids: Sequence[int],
    cache: KVCache | None = None,
    recorder: Recorder | None = None,
    positions: Sequence[int] | None = None,
    logits_rows: LogitRows = "last",
) -> Array:
    """Return logits [rows, vocab_size] of one sequence, in the backend's array and dtype.

    `ids` follow what `cache` holds; the cache is extended by them. `positions` (default: counted
    from the cache's length) are what rope and learned positions see; the mask always counts.
    `logits_rows` are rows of `ids`. Raises UsageError for ids outside the vocabulary, ArchError
    for a hyperparameter or tensor the architecture needs and the model lacks.
    """
    hp = _Values(hp)
    facts = _facts(hp, ids, cache, positions, logits_rows)
    if recorder is not None:
        recorder.begin(facts)
    backend.at(facts.cached)
    length = max(facts.cached + len(facts.ids), int(facts.positions.max()) + 1)
    tables = {}
    if spec.block.position == "rope":
        for kind, rope in ropes(hp, length).items():
            tables[kind] = backend.rope_table(
                facts.positions, rope.inv_freq, factor=rope.factor, cast=spec.block.rope_cast
            )
    c = Context(backend, spec.block, hp, weights, recorder, facts, cache, tables)
    x = _embed(c)
    for layer in range(int(hp["n_layers"])):
        with weights.layer(layer):
            x = _block(c, layer, x)
    if cache is not None:
        cache.commit(len(facts.ids))
    return _head(c, x)


class _Values(dict[str, Value]):
    """Hyperparameters looked up quickly; the table itself says what it thinks of a missing one."""

    def __init__(self, table: Mapping[str, Value]) -> None:
        super().__init__(table)
        self._table = table

    def __missing__(self, name: str) -> Value:
        return self._table[name]


def _facts(
    hp: Mapping[str, Value],
    ids: Sequence[int],
    cache: KVCache | None,
    positions: Sequence[int] | None,
    logits_rows: LogitRows,
) -> PassFacts:
    tokens: Ids = np.asarray(ids, np.int64)
    vocab = int(hp["vocab_size"])
    if tokens.ndim != 1 or not len(tokens):
        raise UsageError(f"token ids have shape {list(tokens.shape)}; expected one sequence")
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab))
    if len(wrong):
        raise UsageError(
            f"token {int(tokens[wrong[0]])} at position {int(wrong[0])}; the vocabulary has "
            f"{vocab} rows; was the text tokenized for another model?"
        )
    cached = 0 if cache is None else cache.length
    counted = np.arange(cached, cached + len(tokens), dtype=np.int64)
    places = counted if positions is None else np.asarray(positions, np.int64)
    if places.shape != tokens.shape or (places < 0).any():
        raise UsageError(
            f"{places.size} positions for {len(tokens)} tokens; expected one not negative each"
        )
    if isinstance(logits_rows, str):
        rows = range(len(tokens)) if logits_rows == "all" else [len(tokens) - 1]
    else:
        rows = [int(row) for row in logits_rows]
        if not rows or any(not 0 <= row < len(tokens) for row in rows):
            raise UsageError(f"logits of rows {rows}; the pass has {len(tokens)} tokens")
    return PassFacts(tokens, places, cached, tuple(rows))


def _embed(c: Context) -> Array:
    """Return the input of layer 0: scaled rows, or rows plus learned positions."""
    b = c.backend
    x = c.tap("embd", WHOLE, b.embed(c.weights["token_embd.weight"], c.facts.ids))
    scale = float(c.hp["embedding_scale"])
    if scale != 1:
        x = b.scale(x, b.rounded(scale))
    if c.block.position == "learned":
        table = c.weights["position_embd.weight"]
        highest = int(c.facts.positions.max())
        if highest >= table.n_rows:
            raise UsageError(f"position {highest}; the model has {table.n_rows} learned positions")
        x = b.add(x, b.embed(table, c.facts.positions))
    elif scale == 1:
        return x
    return c.tap("embd_scaled", WHOLE, x)


def _block(c: Context, layer: int, x: Array) -> Array:
    """Return the stream leaving a layer."""
    b = c.backend
    h = x
    if c.block.placement != "post":
        h = c.tap("attn_norm", layer, c.norm(layer, "attn_norm", x))
    attended = _contribution(
        c, layer, attention(c, layer, h), "post_attention_norm", "attn_contrib"
    )
    if c.hp["parallel_residual"]:
        fed = _contribution(c, layer, _ffn(c, layer, h), "post_ffw_norm", "ffn_contrib")
        return c.tap("out", layer, b.add(b.add(x, attended), fed))
    x = c.tap("mid", layer, b.add(x, attended))
    h = x
    if c.block.placement != "post":
        h = c.tap("ffn_norm", layer, c.norm(layer, "ffn_norm", x))
    fed = _contribution(c, layer, _ffn(c, layer, h), "post_ffw_norm", "ffn_contrib")
    return c.tap("out", layer, b.add(x, fed))


def _contribution(c: Context, layer: int, x: Array, norm: str, point: str) -> Array:
    """Return what is added to the stream: after the post-norm and the residual factor."""
    scale = float(c.hp["residual_scale"])
    if c.block.placement == "pre" and scale == 1:
        return x
    if c.block.placement != "pre":
        x = c.norm(layer, norm, x)
    if scale != 1:
        x = c.backend.scale(x, scale)
    return c.tap(point, layer, x)


def _ffn(c: Context, layer: int, x: Array) -> Array:
    if c.hp["moe_layers"][layer]:
        return moe(c, layer, x)
    if c.block.mlp == "plain":
        up = c.tap("ffn_up", layer, c.linear(layer, "ffn_up", x))
        inner = c.tap("ffn_act", layer, c.activate(up))
    else:
        gate = c.tap("ffn_gate", layer, c.linear(layer, "ffn_gate", x))
        up = c.tap("ffn_up", layer, c.linear(layer, "ffn_up", x))
        act = c.tap("ffn_act", layer, c.activate(gate))
        inner = c.tap("ffn_mul", layer, c.backend.mul(act, up))
    return c.tap("ffn_out", layer, c.linear(layer, "ffn_down", inner))


def _head(c: Context, x: Array) -> Array:
    """Return the logits of the wanted rows."""
    b = c.backend
    x = c.tap("final_norm", WHOLE, c.norm(None, "output_norm", x))
    stored = c.weights.get_role(None, "output.weight")
    w = c.weights["token_embd.weight"] if stored is None else stored
    bias = c.bias(None, "output")
    parts = []
    for start, stop in _runs(c.facts.logit_rows):
        b.at(c.facts.cached + start)
        parts.append(b.linear(x[start:stop], w, bias))
    logits = parts[0] if len(parts) == 1 else b.stack(parts)
    scale, cap = float(c.hp["logit_scale"]), c.hp["final_softcap"]
    if scale == 1 and cap is None:
        return c.tap("logits", WHOLE, logits)
    logits = c.tap("logits_raw", WHOLE, logits)
    if scale != 1:
        logits = b.scale(logits, scale)
    if cap is not None:
        logits = b.softcap(logits, float(cap))
    return c.tap("logits", WHOLE, logits)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows as [start, stop) runs of neighbours, in order."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
