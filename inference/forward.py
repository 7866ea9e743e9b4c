"""The forward pass, written once for all architectures and backends.

The BlockSpec says what a block does, the hyperparameters give all numbers; nothing here has a
default or compares an architecture's name. The recorder gets the named points (capture.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np

from aprfmt.arch.draft_head import EMBED_NORM, HIDDEN_NORM, JOIN
from aprfmt.arch.spec import ArchSpec
from aprfmt.base.protocols import Value
from aprfmt.base.registry import LazyFunction
from aprfmt.errors import UsageError
from aprfmt.inference.attention import attention
from aprfmt.inference.backends.base import Array, Backend
from aprfmt.inference.capture import WHOLE
from aprfmt.inference.context import Context, Ids, PassFacts, PassState, Recorder
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.point_placement import has_last_norm, has_mlp, mixer_of_layer
from aprfmt.inference.points import adds_unscaled, has_input_norms, norm_placement, norm_role
from aprfmt.inference.rope import RopeKind, all_frequencies
from aprfmt.inference.weights import Weights

LogitRows = Literal["all", "last"] | Sequence[int]

# A part of a layer that few architectures have is loaded by the first layer that has it.
run_experts = LazyFunction("aprfmt.inference.moe:run_experts")


@dataclass(frozen=True)
class Span:
    """Some stages of a pass. Stage 0 embeds, stage i is layer i - 1, the last is the head.

    `stream` is the residual stream [tokens, hidden] that enters stage `start`; None at 0. A pass
    that stops before the head returns the stream that leaves it. For a model whose layers share
    more than the stream (`PassState`) both are a `StageOutput`. `hidden` are the rows [tokens,
    hidden] of another model that a draft head joins with its embedding (arch/draft_head.py).
    """

    start: int = 0
    stop: int | None = None
    stream: "Array | StageOutput | None" = None
    hidden: Array | None = None


@dataclass(frozen=True)
class StageOutput:
    """What one stage of a pass gives to the next: the stream, and what later layers share."""

    stream: Array
    state: PassState


def arrays_between_stages(carried: "Array | StageOutput | None") -> list[Array]:
    """Return the arrays that one stage of a pass gives to the next, in a fixed order.

    They are the stream, per-layer embeddings, the keys and values that later layers use, and the
    mask of chosen keys; the stream alone where `carried` is that, [] before stage 0 (None).
    """
    if not isinstance(carried, StageOutput):
        return [] if carried is None else [carried]
    state = carried.state
    shared = [x for layer in sorted(state.shared) for x in state.shared[layer]]
    extra = (x for x in (state.per_layer, state.chosen) if x is not None)
    return [carried.stream, *shared, *extra]


WHOLE_PASS = Span()


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
    span: Span = WHOLE_PASS,
) -> Array:
    """Return logits [rows, vocab_size] of one sequence, in the backend's array and dtype.

    A model without a head gives the embedding [1, hidden], or the last layer's rows where nothing
    pools them. `span` is a part of the pass: if it stops before the head, the residual stream is
    returned, in a StageOutput if later layers need more than the stream.

    `ids` follow the tokens in `cache`, which is extended by them. `positions` (default: counted
    from the cache's length) are used by rope and learned positions; the mask always counts.
    `logits_rows` are rows of `ids`. Raises UsageError for ids outside the vocabulary, ArchError if
    the model lacks a hyperparameter or tensor that the architecture needs.
    """
    # Check the inputs, and compute the rotary tables of all kinds of layers once.
    hp = _FastHyper(hp)
    facts = _pass_facts(hp, ids, cache, positions, logits_rows)
    if recorder is not None:
        recorder.begin(facts)
    backend.set_position(facts.cached)
    tables = _rope_tables(backend, spec, hp, facts)
    # Enter with the embedding, or with the stream of an earlier stage.
    x, state = span.stream, PassState()
    if isinstance(x, StageOutput):
        x, state = x.stream, x.state.copy()
    c = Context(backend, spec.block, hp, weights, recorder, facts, cache, tables, state)
    count = int(hp["n_layers"])
    stop = count + 2 if span.stop is None else span.stop
    if x is None:
        x = _embed(c)
        state.per_layer = _per_layer_inputs(c, x)
        x = _copy_streams(c, x)
    if span.hidden is not None:
        x = _draft_input(c, x, span.hidden)
    # The layers of the span, then the head unless the span stops before it.
    narrow = _first_layer_of_last_row(c) if stop > count + 1 else None
    for layer in range(max(span.start, 1) - 1, min(stop - 1, count)):
        if layer == narrow:
            c, x = _only_last_row(c, x)
        with weights.using_layer(layer):
            x = _run_layer(c, layer, backend.to_layer_device(layer, count, x))
    if cache is not None:
        cache.commit(len(facts.ids))
    if stop > count + 1:
        return _head(c, x)
    return StageOutput(x, state) if state else x


def _per_layer_inputs(c: Context, x: Array) -> Array | None:
    """Return the per-layer embeddings of all layers; None for a model that has none.

    x [tokens, hidden] are the embedded tokens.
    """
    if not int(c.hp["per_layer_size"]):
        return None
    from aprfmt.inference.per_layer import layer_inputs

    return layer_inputs(c, x)


def _copy_streams(c: Context, x: Array) -> Array:
    """Return the stream that enters layer 0: AltUp's copies of x, its hyper streams, or x."""
    if c.block.streams == "altup":
        from aprfmt.inference.altup import make_copies

        return make_copies(c, x)
    if c.block.streams == "hyper":
        from aprfmt.inference.hyper_connections import copy_streams

        return copy_streams(c, x)
    return x


def _rope_tables(
    backend: Backend, spec: ArchSpec, hp: Mapping[str, Value], facts: PassFacts
) -> dict[RopeKind, tuple[Array, Array]]:
    """Return {kind of layer: (cos, sin)} [tokens, pairs] of a pass; {} without rope."""
    if spec.block.position != "rope":
        return {}
    length = max(facts.cached + len(facts.ids), int(facts.positions.max()) + 1)
    return {
        kind: backend.rope_table(
            facts.positions, rope.inv_freq, factor=rope.factor, cast=spec.block.rope_cast
        )
        for kind, rope in all_frequencies(hp, length).items()
    }


def _first_layer_of_last_row(c: Context) -> int | None:
    """Return the first layer that has to run for the last row alone; None if all run for all rows.

    Where only the last row's logits are wanted, it is the layer after the last one that makes keys
    and values: nothing reads what later layers give for other rows.
    """
    last, count = len(c.facts.ids) - 1, int(c.hp["n_layers"])
    if c.recorder is not None or last == 0 or c.facts.logit_rows != (last,):
        return None
    if c.block.head == "none" or c.hp["pooling"] is not None:
        return None
    makers = [layer for layer, makes in enumerate(c.hp["own_kv_layers"]) if makes]
    first = max(makers, default=count) + 1
    return first if first < count else None


def _only_last_row(c: Context, x: Array) -> tuple[Context, Array]:
    """Return (context, stream [1, hidden]) to continue a pass with its last row alone.

    x is the stream [tokens, hidden] of all rows; the earlier tokens count as cached from here on.
    Everything is cut on the device, so that a recorded pass can do it too.
    """
    facts = c.facts
    last = len(facts.ids) - 1
    facts = PassFacts(facts.ids[last:], facts.positions[last:], facts.cached + last, (0,))
    c.backend.set_position(facts.cached)
    per_token = c.state.per_layer
    state = replace(c.state, per_layer=None if per_token is None else per_token[last:])
    tables = {kind: (cos[last:], sin[last:]) for kind, (cos, sin) in c.ropes.items()}
    return replace(c, facts=facts, ropes=tables, state=state), x[last:]


class _FastHyper(dict[str, Value]):
    """Hyperparameters with fast lookup; a missing one raises the table's own error."""

    def __init__(self, table: Mapping[str, Value]) -> None:
        """Copy the hyperparameters to a dict."""
        super().__init__(table)
        self._table = table

    def __missing__(self, name: str) -> Value:
        """Return the table's value of a name that was not copied; it raises for a missing one."""
        return self._table[name]


def _pass_facts(
    hp: Mapping[str, Value],
    ids: Sequence[int],
    cache: KVCache | None,
    positions: Sequence[int] | None,
    logits_rows: LogitRows,
) -> PassFacts:
    """Return what a recorder learns before the pass: ids, positions, cached tokens, logits rows.

    Raises UsageError for invalid ids, and for positions or logits rows that do not fit them.
    """
    tokens = check_tokens(ids, int(hp["vocab_size"]))
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


def check_tokens(ids: Sequence[int], vocab: int) -> Ids:
    """Return one sequence of token ids as int64 (no copy if it is); UsageError for invalid ids."""
    given = np.asarray(ids)
    if given.ndim != 1 or not len(given):
        raise UsageError(f"token ids have shape {list(given.shape)}; expected one sequence")
    if given.dtype.kind not in "iu":
        raise UsageError(f"token ids are {given.dtype.name}; expected integers")
    tokens: Ids = given.astype(np.int64, copy=False)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab))
        raise UsageError(
            f"token {int(tokens[wrong[0]])} at position {int(wrong[0])}; the vocabulary has "
            f"{vocab} rows; was the text tokenized for another model?"
        )
    return tokens


def _embed(c: Context) -> Array:
    """Return the input of layer 0 [tokens, hidden], with everything the model does before it.

    That is the embedding's rows; then a projection, a scale, token types, learned positions and a
    norm, where the model has them.
    """
    b = c.backend
    x = c.tap("embd", WHOLE, b.embed(c.weights["token_embd.weight"], c.facts.ids))
    if c.weights.get_role(None, "embd_in.weight") is not None:
        x = c.tap("embd_in", WHOLE, c.linear(None, "embd_in", x))
    scale = float(c.hp["embedding_scale"])
    if scale != 1:
        x = b.scale(x, b.rounded(scale))
    types = c.weights.get_role(None, "token_types.weight")
    if types is not None:
        x = b.add(x, c.vector(None, "token_types.weight")[0])
    if c.block.position == "learned":
        x = b.add(x, _learned_positions(c))
    if types is not None or c.block.position == "learned" or scale != 1:
        x = c.tap("embd_scaled", WHOLE, x)
    if c.weights.get_role(None, "token_embd_norm.weight") is not None:
        x = c.tap("embd_norm", WHOLE, c.norm(None, "token_embd_norm", x))
    return x


def _draft_input(c: Context, x: Array, hidden: Array) -> Array:
    """Return the input of a draft head's layer: x and `hidden`, normed, joined and projected.

    x [tokens, hidden] is the embedding, `hidden` the model's rows after its last norm.
    """
    parts = (
        c.tap("draft_embd_norm", WHOLE, c.norm(None, EMBED_NORM, x)),
        c.tap("draft_hidden_norm", WHOLE,
            c.norm(None, HIDDEN_NORM, c.tap("draft_hidden", WHOLE, hidden))),
    )  # fmt: skip
    return c.tap("draft_in", WHOLE, c.linear(None, JOIN, c.backend.concat(parts)))


def _learned_positions(c: Context) -> Array:
    """Return the rows [tokens, hidden] of the learned positions; UsageError past the last row.

    With `skipped` padding, padding tokens have the row before the first position and do not count.
    """
    table, offset = c.weights["position_embd.weight"], int(c.hp["position_offset"])
    # Positions as they are, where they can be: a recorded pass has these on the device.
    rows = c.facts.positions + offset if offset else c.facts.positions
    if c.block.padding == "skipped":
        padding = c.facts.ids == offset - 1
        rows = np.where(padding, offset - 1, rows - np.cumsum(padding))
    highest = int(rows.max())
    if highest >= table.n_rows:
        raise UsageError(
            f"position {highest - offset}; the model has {table.n_rows - offset} learned positions"
        )
    return c.backend.embed(table, rows)


def _run_layer(c: Context, layer: int, x: Array) -> Array:
    """Return the residual stream after a layer that reads the stream x.

    The result and x hold all copies of AltUp, or all streams of hyper-connections, where a model
    has them.
    """
    if c.block.streams == "hyper":
        return _run_hyper_layer(c, layer, x)
    if c.block.halves == "one":
        return _run_single_block_layer(c, layer, x)
    b = c.backend
    copies = None
    if c.block.streams == "altup":
        from aprfmt.inference import altup

        copies, x = altup.predict_copies(c, layer, x)
    h = x
    if has_input_norms(c.block, c.hp, layer) and c.hp["attn_norm_layers"][layer]:
        h = c.tap("attn_norm", layer, c.norm(layer, "attn_norm", x))
    if c.hp["parallel_residual"]:  # attention and MLP read the same stream
        mix, half = _MIXERS[mixer_of_layer(c.block, c.hp, layer)]
        mixed = mix(c, layer, h)
        if c.block.parallel_norm == "two":
            h = c.norm(layer, "ffn_norm", x)
        x = b.add(x, _contribution(c, layer, half.multiply_output(c, layer, mixed), half))
        if c.block.parallel_norm == "two":
            h = c.tap("ffn_norm", layer, h)
        fed = run_experts(c, layer, h) if c.hp["moe_layers"][layer] else _dense_mlp(c, layer, h)
        return c.tap("out", layer, b.add(x, _contribution(c, layer, fed, _MLP)))
    # Attention or another mixer, then the MLP, each added to the stream.
    short = None if copies is None else altup.add_low_rank(c, layer, h)
    x = _norm_after_residual(
        c, layer, _add_mixer(c, layer, _residual_input(c, layer, x, h, _ATTENTION), h), _ATTENTION
    )
    if short is not None:
        x = b.narrow(b.wide(b.add(x, short)) / 2.0**0.5)
    x = c.tap("mid", layer, x)
    h = x
    if has_input_norms(c.block, c.hp, layer):
        h = c.tap("ffn_norm", layer, c.norm(layer, "ffn_norm", x))
    x = _add_mlp(c, layer, _residual_input(c, layer, x, h, _MLP), h)
    return c.tap(
        "out", layer, _finish_layer(c, layer, _norm_after_residual(c, layer, x, _MLP), copies)
    )


def _add_mlp_and_experts(c: Context, layer: int, x: Array, h: Array) -> Array:
    """Return a dense MLP's output for h plus that of experts for the stream x, each normalised."""
    dense = c.tap("ffn_mlp", layer, c.norm(layer, "post_ffw_norm_1", _dense_mlp(c, layer, h)))
    given = c.tap("moe_norm", layer, c.norm(layer, "pre_ffw_norm_2", x))
    routed = run_experts(c, layer, given, _router_input(c, layer, x))
    routed = c.tap("ffn_moe", layer, c.norm(layer, "post_ffw_norm_2", routed))
    return c.tap("ffn_combined", layer, c.backend.add(dense, routed))


def _router_input(c: Context, layer: int, x: Array) -> Array:
    """Return the router's input where it differs from the MLP's: x normed and scaled (gemma4)."""
    b = c.backend
    normed = b.mul(c.plain_norm(x), c.vector(layer, "ffn_gate_inp.scale"))
    return c.tap("router_in", layer, b.scale(normed, float(c.hp["hidden_size"]) ** -0.5))


def _finish_layer(c: Context, layer: int, x: Array, copies: Array | None) -> Array:
    """Return the stream that leaves a layer, given the stream x after its MLP.

    Where a model has them: AltUp's `copies` are corrected by x, the per-layer embedding is added,
    and the layer's scale is applied.
    """
    b, given = c.backend, c.state.per_layer
    if given is not None or c.block.layer_scale:
        x = c.tap("ffn_stream", layer, x)
    if copies is not None:
        from aprfmt.inference import altup

        copies = altup.correct_copies(c, layer, copies, x)
        x = altup.scale_first_copy(c, layer, copies)
    if given is not None:
        from aprfmt.inference.per_layer import layer_input_contribution

        added = layer_input_contribution(c, layer, x, given)
        x = b.add(x, added) if copies is None else altup.add_to_others(c, copies, added)
    return b.mul(x, c.vector(layer, "layer_output_scale.weight")) if c.block.layer_scale else x


def _run_hyper_layer(c: Context, layer: int, x: Array) -> Array:
    """Return the streams [tokens, n * hidden] after a layer that hyper-connections join to them.

    Attention and experts read one stream each, collapsed from the n streams x.
    """
    from aprfmt.inference import hyper_connections

    h, post, comb = hyper_connections.collapse_streams(c, layer, x, "attn")
    h = c.tap("attn_norm", layer, c.norm(layer, "attn_norm", h))
    mix, half = _COMPRESSED
    mixed = half.multiply_output(c, layer, mix(c, layer, h))
    x = c.tap("mid", layer, hyper_connections.mix_streams(c, x, mixed, post, comb))
    h, post, comb = hyper_connections.collapse_streams(c, layer, x, "ffn")
    h = c.tap("ffn_norm", layer, c.norm(layer, "ffn_norm", h))
    fed = run_experts(c, layer, h)
    return c.tap("out", layer, hyper_connections.mix_streams(c, x, fed, post, comb))


def _run_single_block_layer(c: Context, layer: int, x: Array) -> Array:
    """Return the stream after a layer that has only a mixer, or only an MLP."""
    given = c.backend.narrow(x) if c.hp["wide_stream"] else x
    h = c.tap("attn_norm", layer, c.norm(layer, "attn_norm", given))
    after = _add_mlp if has_mlp(c.block, c.hp, layer) else _add_mixer
    return c.tap("out", layer, after(c, layer, x, h))


def _add_mixer(c: Context, layer: int, x: Array, h: Array) -> Array:
    """Return the stream x with the output of the layer's mixers for h added.

    A mixer is attention or a recurrence; a layer may have both in parallel.
    """
    kind = mixer_of_layer(c.block, c.hp, layer)
    if kind != "none" and c.block.recurrence_place == "parallel":
        return c.backend.add(x, _attention_and_mixer(c, layer, h, kind))
    mix, half = _MIXERS[kind]
    return _add_branch(c, layer, x, mix(c, layer, h), half)


def _attention_and_mixer(c: Context, layer: int, h: Array, kind: str) -> Array:
    """Return the sum of attention and a recurrence that run in parallel on h."""
    b = c.backend
    mix, half = _MIXERS[kind]
    other = c.tap("ssm_out", layer, c.linear(layer, half.role, mix(c, layer, h)))
    mixed = _ATTENTION.multiply_output(c, layer, attention(c, layer, h))
    if c.block.multipliers != "none":
        other = b.scale(other, float(c.hp["ssm_out_scale"]))
        mixed = b.scale(mixed, float(c.hp["attn_out_scale"]))
    return c.tap("attn_contrib", layer, b.add(other, mixed))


def _add_mlp(c: Context, layer: int, x: Array, h: Array) -> Array:
    """Return the stream x with the output of the layer's MLP or experts for h added."""
    if c.hp["moe_layers"][layer]:
        together = c.block.experts == "parallel"
        fed = _add_mlp_and_experts(c, layer, x, h) if together else run_experts(c, layer, h)
        return c.backend.add(x, _contribution(c, layer, fed, _MLP))
    return _add_branch(c, layer, x, _mlp_hidden(c, layer, h), _MLP)


@dataclass(frozen=True)
class _Branch:
    """One branch of a layer, attention (or a recurrence) or the MLP: its roles and points.

    `role` and `point` are of its last product, `norm` and `contrib` of its post-norm; `sum_norm`
    and `sum` are those of the sum with the stream, where that is normalised.
    """

    role: str
    point: str
    norm: str
    contrib: str
    sum_norm: str
    sum: str

    def multiply_output(self, c: Context, layer: int, inner: Array) -> Array:
        """Return the branch's last product for `inner`, captured at its point."""
        return c.tap(self.point, layer, c.linear(layer, self.role, inner))


_ATTENTION = _Branch(
    "attn_output", "attn_out", "post_attention_norm", "attn_contrib", "attn_output_norm", "attn_sum"
)
_MIXERS: Mapping[str, tuple[Callable[[Context, int, Array], Array], _Branch]] = {
    "none": (attention, _ATTENTION),
    "gated_delta": (
        LazyFunction("aprfmt.inference.delta_net:run_delta_net"),
        replace(_ATTENTION, role="ssm_out"),
    ),
    "kimi_delta": (LazyFunction("aprfmt.inference.kimi_delta:run_kimi_delta"), _ATTENTION),
    "short_conv": (
        LazyFunction("aprfmt.inference.short_conv:run_short_conv"),
        replace(_ATTENTION, role="shortconv.out_proj"),
    ),
    "mamba": (
        LazyFunction("aprfmt.inference.state_space:run_mamba"),
        replace(_ATTENTION, role="ssm_out"),
    ),
    "mamba2": (
        LazyFunction("aprfmt.inference.state_space:run_mamba2"),
        replace(_ATTENTION, role="ssm_out"),
    ),
    "lightning": (LazyFunction("aprfmt.inference.lightning:run_lightning"), _ATTENTION),
}
_COMPRESSED = (
    LazyFunction("aprfmt.inference.compressed_attention:compressed_attention"),
    replace(_ATTENTION, role="attn_output_b"),
)
_MLP = _Branch(
    "ffn_down", "ffn_out", "post_ffw_norm", "ffn_contrib", "layer_output_norm", "ffn_sum"
)


def _add_branch(c: Context, layer: int, x: Array, inner: Array, branch: _Branch) -> Array:
    """Return the stream x after adding one branch's output, the last product of `inner`.

    `branch` is the branch: a mixer or the MLP. It is one fused operation if no point between is
    wanted.
    """
    if c.block.halves == "one" and c.hp["wide_stream"]:
        return c.backend.add_wide(x, branch.multiply_output(c, layer, inner))
    if adds_unscaled(c.block, c.hp, layer) and not c.wants(branch.point, layer):
        w = c.weights.role(layer, f"{branch.role}.weight")
        return c.backend.add_linear(x, inner, w, c.bias(layer, branch.role))
    return c.backend.add(
        x, _contribution(c, layer, branch.multiply_output(c, layer, inner), branch)
    )


def _residual_factors(c: Context, layer: int, branch: _Branch) -> tuple[float, float]:
    """Return (factor of the stream, factor of the branch's output) in a layer's residual sum.

    `branch` is the branch: a mixer or the MLP.
    """
    at = 4 if branch is _MLP else 0 if mixer_of_layer(c.block, c.hp, layer) == "none" else 2
    kept, added = c.hp["residual_scales"][at : at + 2]
    return float(kept), float(added)


def _residual_input(c: Context, layer: int, x: Array, h: Array, branch: _Branch) -> Array:
    """Return what a branch's output is added to: the stream x, or its norm h times a factor.

    `branch` is the branch: a mixer or the MLP.
    """
    if c.block.residual == "stream":
        return x
    factor, _ = _residual_factors(c, layer, branch)
    return h if factor == 1 else c.backend.scale(h, factor)


def _contribution(c: Context, layer: int, x: Array, branch: _Branch) -> Array:
    """Return what a branch adds to the stream: its output x after post-norm and factor.

    `branch` is the branch: a mixer or the MLP.
    """
    if adds_unscaled(c.block, c.hp, layer):
        return x
    scale = float(c.hp["residual_scale"])
    role = norm_role(c.block, branch.norm)
    there = c.weights.get_role(layer, f"{role}.weight") is not None
    if there and norm_placement(c.block, c.hp, layer) in ("post", "sandwich"):
        x = c.norm(layer, role, x)
    if c.block.multipliers != "none":
        scale = float(c.hp["ffn_down_scale"])  # attention's is applied in _attention_and_mixer
    if c.block.residual == "norm":
        scale = _residual_factors(c, layer, branch)[1]
    if scale != 1:
        x = c.backend.scale(x, scale)
    return c.tap(branch.contrib, layer, x)


def _norm_after_residual(c: Context, layer: int, x: Array, branch: _Branch) -> Array:
    """Return the stream x after the norm that follows a branch's sum; x where there is none.

    `branch` is the branch: a mixer or the MLP.
    """
    if c.block.placement != "after":
        return x
    return c.norm(layer, branch.sum_norm, c.tap(branch.sum, layer, x))


def _dense_mlp(c: Context, layer: int, x: Array) -> Array:
    """Return a dense MLP's output for x."""
    return _MLP.multiply_output(c, layer, _mlp_hidden(c, layer, x))


def _mlp_hidden(c: Context, layer: int, x: Array) -> Array:
    """Return the input of the dense MLP's down product: act(gate) * up, or act(up)."""
    share = float(c.hp["ffn_sparsity"][layer])
    if c.block.mlp == "plain":
        up = c.tap("ffn_up", layer, c.linear(layer, "ffn_up", x))
        return c.tap("ffn_act", layer, c.activate(up, layer))
    factor = float(c.hp["ffn_gate_scale"]) if c.block.multipliers != "none" else 1.0
    inside = any(c.wants(point, layer) for point in ("ffn_gate", "ffn_up", "ffn_act"))
    clamped = c.hp["swiglu_limit"] is not None
    if not inside and not share and factor == 1 and not clamped:
        return c.tap("ffn_mul", layer, c.gated(layer, x))
    gate = c.tap("ffn_gate", layer, c.linear(layer, "ffn_gate", x))
    if clamped:
        up = c.tap("ffn_up", layer, c.linear(layer, "ffn_up", x))
        return c.tap("ffn_mul", layer, c.gate(gate, up))
    if factor != 1:
        gate = c.backend.scale(gate, factor)
    if share:
        kept = c.backend.gaussian_topk(gate, NormalDist().inv_cdf(share))
        gate = c.tap("ffn_topk", layer, kept)
    up = c.tap("ffn_up", layer, c.linear(layer, "ffn_up", x))
    act = c.tap("ffn_act", layer, c.activate(gate))
    return c.tap("ffn_mul", layer, c.backend.mul(act, up))


def _head(c: Context, x: Array) -> Array:
    """Return the logits of the wanted rows; for a model without a head, the pooled rows."""
    b = c.backend
    if c.block.streams == "altup":
        from aprfmt.inference.altup import merge_copies

        x = merge_copies(c, x)
    if c.block.streams == "hyper":
        from aprfmt.inference.hyper_connections import merge_streams

        x = merge_streams(c, x)
    # Norms and projections before the head; a dense head (BERT) has its norm last.
    dense, normed = c.block.head == "dense", has_last_norm(c.block, c.weights)
    if normed and not dense:
        x = c.tap("final_norm", WHOLE, _last_norm(c, x))
    if c.weights.get_role(None, "head_in.weight") is not None:
        x = c.tap("head_in", WHOLE, c.linear(None, "head_in", x))
    if dense:
        x = c.tap("head_act", WHOLE, c.activate(x))
        x = c.tap("final_norm", WHOLE, c.norm(None, "output_norm", x))
    pooled = x
    if c.hp["pooling"] is not None and (c.block.head == "none" or c.wants("pooled", WHOLE)):
        pooled = c.tap("pooled", WHOLE, _pool_rows(b, x, str(c.hp["pooling"])))
    if c.block.head == "none":
        return pooled
    # The product of the wanted rows, with the embedding if it is tied.
    stored = c.weights.get_role(None, "output.weight")
    w = c.weights["token_embd.weight"] if stored is None else stored
    bias = c.bias(None, "output")
    parts = []
    for start, stop in _row_runs(c.facts.logit_rows):
        b.set_position(c.facts.cached + start)
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


def _last_norm(c: Context, x: Array) -> Array:
    """Return the stream x after the model's last norm.

    A float32 stream of a 16-bit run is rounded once, after the weight.
    """
    if c.block.halves == "one" and c.hp["wide_stream"]:
        weight, eps = c.vector(None, "output_norm.weight"), float(c.hp["norm_eps"])
        return c.backend.rms_norm(x, weight, eps=eps, offset=0, cast="after_weight")
    return c.norm(None, "output_norm", x)


def _pool_rows(b: Backend, x: Array, kind: str) -> Array:
    """Return one row [1, hidden] of a sequence's rows: by `kind` their mean, first or last."""
    return b.mean_rows(x) if kind == "mean" else x[:1] if kind == "cls" else x[-1:]


def _row_runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows as (start, stop) runs of consecutive numbers, in order."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
