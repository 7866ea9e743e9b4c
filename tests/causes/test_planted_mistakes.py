"""A mistake that is planted in a pass is proposed again by the hypotheses, and removes itself.

The pass of a tiny model with a mistake in it is taken for a run's: the hypotheses see arrays and
nothing else, of every point or of those around operations alone. Usual mistakes are the first of
each kind (what differs first, and why) in models that together have most blocks; the others have
numbers, orders and values that no list has, so that they must be solved.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.causes import CAUSES
from aprfmt.causes.forward.mismatch import Change, Mismatch
from aprfmt.causes.forward.table import TABLE
from aprfmt.causes.forward.usual_mistakes import usual_mistakes
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import record_points, run_shadow_pass
from aprfmt.inference.session import Session
from aprfmt.inference.trace import Trace
from aprfmt.model import open_model
from tests.causes.test_usual_mistakes import SHORT
from tests.diagnosis.engines import NUMPY, tiny_folder

Plant = Callable[[PatchedModel], PatchedModel]
Array = np.ndarray


def hyper(**values: Any) -> Plant:
    """Plant other hyperparameters."""
    return lambda patched: patched.with_hyper(**values)


def block(**fields: Any) -> Plant:
    """Plant another description of the block."""
    return lambda patched: patched.with_block(**fields)


def weight(key: str, change: Callable[[Array], Array], source: str = "") -> Plant:
    """Plant other values of a weight, made of its own or of another weight's."""

    def make(patched: PatchedModel) -> PatchedModel:
        old = np.array(patched.weights[source or key].numpy())
        return patched.with_weights({key: change(old)})

    return make


def with_value(values: Array, at: tuple[int, ...], added: float) -> Array:
    values[at] += added
    return values


def positions(numbers: list[int]) -> Plant:
    return lambda patched: patched.with_positions(numbers)


def cached(rows: list[int]) -> Plant:
    """Plant attention that reads the keys and values of other tokens."""
    return lambda patched: patched.with_keys_and_values(lambda kind, layer, x: x[rows])


def dropped(point: str) -> Plant:
    """Plant dropout of a quarter in the first layer."""

    def tap(patched: PatchedModel, layer: int, x: Array, held: Mapping[str, Any]) -> Array:
        lost = np.random.default_rng(1).random(x.shape) < 0.25
        return np.where(lost, 0, x / np.float32(0.75)).astype(x.dtype)

    return lambda patched: patched.with_tap(point, tap, frozenset({0}))


def without_expert(lost: int) -> Plant:
    """Plant a sum over experts that never got what one of them gave."""

    def tap(patched: PatchedModel, layer: int, x: Array, held: Mapping[str, Any]) -> Array:
        return np.where(np.asarray(held["experts"]) == lost, np.zeros_like(x), x)

    return lambda patched: patched.with_tap("expert_w", tap, None)


def embedded(token: int, other: int) -> Plant:
    """Plant the embedding of another token of the text."""

    def read(op: Any, at: Any, *args: Any) -> Array:
        rows = np.array(op(*args))
        rows[token] = rows[other]
        return rows

    return lambda patched: patched.with_op("embed", read, None)


def tied_backwards(op: Any, at: Any, x: Array, w: Any, *rest: Any) -> Array:
    """Return a product; that of a tied head has its columns in the other order."""
    made = np.array(op(x, w, *rest))
    return made[..., ::-1].copy() if w.key == "token_embd.weight" else made


def scores_times(factor: float) -> Plant:
    return lambda patched: patched.with_op(
        "scores", lambda op, at, *args: op(*args) * np.float32(factor), None
    )


Q, K, V = (f"L0.attn_{letter}.weight" for letter in "qkv")
RESTART = [*range(6), *range(6)]
SHIFTED = [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]

# Model -> what is planted beside usual mistakes.
OTHERS: Mapping[str, Mapping[str, Plant]] = {
    "mixtral": {
        "a window": hyper(sliding_window=5, window_layers=(True,) * 4),
        "a base": hyper(rope_theta=777.0),
        "a factor of scores": scores_times(1.7),
        "a factor of experts": hyper(routed_scale=2.5),
        "experts": hyper(n_experts_used=3),
        "a lost expert": without_expert(4),
        "dropout": dropped("attn_out"),
        "dropout after the sum": dropped("ffn_norm"),
        "a shift": positions(list(range(3, 15))),
        "two texts": positions(RESTART),
        "a factor of sums": hyper(residual_scale=0.5),
        "a factor of logits": hyper(logit_scale=1.7),
        "a cap": hyper(attn_softcap=20.0),
        "a layer without rope": hyper(rope_layers=(True, False, True, True)),
        "an eps": hyper(norm_eps=0.01),
        "another token": embedded(4, 9),
        "one old key": cached([0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 10, 11]),
        "the keys before": cached(SHIFTED),
        "a factor of a matrix": weight(Q, lambda w: w * np.float32(1.5)),
        "the other sign": weight(V, np.negative),
        "a factor of a row": weight(V, lambda w: w * (1 + 2 * (np.arange(len(w)) == 2)[:, None])),
        "a transposed matrix": weight("L0.attn_output.weight", lambda w: w.T.copy()),
        "another layer's": weight(Q, np.array, Q.replace("L0", "L1")),
        "another norm's": weight("L0.attn_norm.weight", np.array, "L0.ffn_norm.weight"),
        "a norm of ones": weight("L0.attn_norm.weight", np.ones_like),
        "one value": weight(Q, lambda w: with_value(w, (3, 5), 2.0)),
        "heads": weight(Q, lambda w: np.roll(w, 12, axis=0)),
        "rows of the head": weight("output.weight", lambda w: w[::-1].copy()),
    },
    "gemma3": {
        "a window": hyper(sliding_window=5),
        "a cap": hyper(attn_softcap=25.0),
        "a factor": hyper(embedding_scale=3.0),
    },
    "gemma2": {
        "a cap of logits": hyper(final_softcap=20.0),
        "a cap": hyper(attn_softcap=25.0),
        "no cap": hyper(attn_softcap=None),
        "an eps": hyper(norm_eps=1e-3),
        "a base": hyper(rope_theta=123.0),
    },
    "gpt2": {
        "a shift": positions(list(range(1, 13))),
        "two texts": positions(RESTART),
        "no positions": weight("position_embd.weight", np.zeros_like),
        "no bias": weight("L0.attn_q.bias", np.zeros_like),
        "a bias twice": weight("L0.ffn_up.bias", lambda b: 2 * b),
        "rows of a tied head": lambda patched: patched.with_op("linear", tied_backwards, None),
        "half twice": weight("L0.ffn_up.weight", lambda w: np.tile(w[: len(w) // 2], (2, 1))),
        "an offset": hyper(position_offset=1),
    },
    "llama4": {
        "chunks": hyper(sliding_window=5),
        "no chunks": hyper(sliding_window=None),
        "a window": block(window="sliding"),
        "a temperature": hyper(temperature_scale=0.3),
        "no temperature": hyper(temperature_scale=None),
        "a base": hyper(rope_theta=700.0),
    },
    "qwen3": {
        "norms": weight("L0.attn_q_norm.weight", np.array, "L0.attn_k_norm.weight"),
        "an eps": hyper(norm_eps=1e-2),
        "rotated elements": hyper(rope_dim=6),
    },
    "falcon_h1": {
        "taps": weight("L0.ssm_conv1d.weight", lambda w: w[..., ::-1].copy()),
        "a factor": hyper(embedding_scale=0.7),
        "two factors": hyper(ssm_scales=(0.8, 1.2, 1.3, 0.7, 0.6)),
    },
}  # fmt: skip

OWN, ALONE = "in its own words", "by the search alone"
# Model -> what is planted, by how its sentence begins -> how the sentence begins that is proposed
# for it: with every point, and with few where that is another one ("": not asked).
TOLD: Mapping[str, Mapping[str, str | tuple[str, str]]] = {
    "mixtral": {
        "rope's base is 10000; the model says 5000": OWN,
        "positions are divided by 2, which the model does not say": OWN,
        "rope pairs elements 2i with 2i + 1;": OWN,
        "the activation is gelu; the model says silu": OWN,
        "scores are multiplied by 1; the model says 0.288675135": OWN,
        "the norms add eps 1e-05 where the model says 0.0003": OWN,
        "embedding_scale is 6.92820323; the model says 1": (
            "the norms add eps 6.25e-06 where the",
            "",
        ),
        "the head is the embedding; the model has a separate head": OWN,
        "attention and MLP read one input and are added together": OWN,
        "the norms multiply by 1 + w, where w is meant": OWN,
        "the chosen experts' weights are not renormalised to sum 1": OWN,
        "attention is not causal:": OWN,
        "query heads read key and value heads 0, 1, 0, 1; they should read 0, 0, 1, 1": OWN,
        "6 elements of each head are rotated; the model says 12": OWN,
        "nothing is rotated": "layer 0 does not rotate; it should",
        "the softmax sums over the first tile of 8 keys only": OWN,
        "rope is not applied, or every token has position 0": OWN,
        "keys and values are not the tokens' own:": OWN,
        "the stream is added to itself instead of what": (OWN, ""),
        "keys are not rotated": (OWN, ""),
        "the stream is added to itself instead of what the MLP computed": (OWN, ""),
        "a token takes 1 experts; the model says 2": OWN,
        "values are rotated as the keys": (ALONE, ""),
        "heads and tokens are not exchanged back before attention's result is reshaped": OWN,
        "attention and MLP read one stream, each by its own norm, and are added together": OWN,
        "a window": "attention reaches 5 tokens; the",
        "a base": ("rope's base is 777; the model", ""),
        "a factor of scores": "scores are multiplied by 0.4907",
        "a factor of experts": ("routed experts are weighted by", ""),
        "experts": "a token takes 3 experts; the",
        "a lost expert": ("", "expert 4 of 6, the share of rank"),
        "dropout": "dropout is on: 0.242 of the",
        "dropout after the sum": ("dropout is on: 0.247 of the", ""),
        "a shift": ("positions are counted from 3", ""),
        "two texts": ("from token 6 on tokens have positions 0", ""),
        "a factor of sums": "what attention computed is",
        "a factor of logits": ALONE,  # a sampler's temperature as well: no weight is accused
        "a cap": ("scores are capped at 20; the", ""),
        "a layer without rope": "layer 1 does not rotate; it should",
        "an eps": "the norms add eps 0.01 where the",
        "another token": "token 4 is 5 in the records, and",
        "one old key": ("keys are not the tokens' own:", "keys and values are not the"),
        "the keys before": ("keys are not the tokens' own:", "keys and values are not the"),
        "a factor of a matrix": "L0.attn_q.weight is multiplied by",
        "the other sign": "L0.attn_v.weight is multiplied by",
        "a factor of a row": "1 rows of L0.attn_v.weight are",
        "a transposed matrix": "L0.attn_output.weight is read",
        "another layer's": ("layer 0 runs the tensors of layer", ""),
        "another norm's": ("L0.attn_norm.weight and", ""),
        "a norm of ones": ("L0.attn_norm.weight has other", ""),
        "one value": "L0.attn_q.weight[3, 5] is 1.76496",
        "heads": "L0.attn_q.weight: heads stand in",
        "rows of the head": "output.weight: rows are in",
    },
    "gemma3": {
        "the activation is silu; the model says gelu_tanh": OWN,
        "attention reaches all earlier tokens; the model": OWN,
        "q and k are not normalised": (ALONE, ""),
        "embedding_scale is 6.9375; the model says 6.92820323": (OWN, ""),
        "every layer has the window; the model says only": ("layer 5 rotates with base 300,", ""),
        "the norm after attention and the MLP is applied to the sum with the stream": (ALONE, ""),
        "1 is added to up": OWN,
        "a window": "attention reaches 5 tokens; the",
        "a cap": ("scores are capped at 25; the", ""),
        "a factor": "embedding_scale is 3; the model",
    },
    "deepseek_v32": {
        "rope's base is 10000; the model says 5000": OWN,
        "positions are divided by 2, which the model does not say": OWN,
        "rope pairs element i with i + d/2;": OWN,
        "no bias is added": ALONE,
        "attention and MLP read one input and are added together": OWN,
        "4 elements of each head are rotated; the model says 8": OWN,
        "keys have their rotated part first, queries have it last": ALONE,
        "nothing is rotated": "layer 0 does not rotate; it should",
        "rope is not applied, or every token has position 0": OWN,
        "keys are not rotated": "layer 0 does not rotate; it should",
        "the norm of the latent keys and values is taken over their whole row": ALONE,
        "an indexer chooses 4 keys; the model says 5": OWN,
        "rope turns backwards: the sine has the other sign": OWN,
        "the router is softmax; the model says sigmoid_bias": OWN,
        "an indexer's heads all weigh one": OWN,
        "an indexer's queries and keys are not rotated": OWN,
    },
    "lfm2_moe": {
        "no bias is added": (
            "the router is softmax; the model",
            "the router is sigmoid; the model",
        ),
        "the kernels are reversed: the first tap is the token's own": OWN,
        "no state is carried: every token sees itself only": OWN,
        "the gate before the convolution is left out": OWN,
        "the gate after the convolution is left out": OWN,
        "the gates before and after the convolution are exchanged": OWN,
    },
    "falcon_h1": {
        "the activation is gelu; the model says silu": OWN,
        "no bias is added": "the bias of the convolution is not",
        "the bias of the convolution is added twice": OWN,
        "the head is the embedding; the model has a separate head": OWN,
        "attention and MLP read one input and are added together": OWN,
        "no dt_bias is added before the time step's softplus": OWN,
        "A is not negated: states grow where they should decay": OWN,
        "logit_scale is 1; the model says 0.6": OWN,
        "B and C are exchanged": OWN,
        "all time steps are 1": OWN,
        "the norm stands on the other side of the gate": OWN,
        "no state is carried: every token sees itself only": OWN,
        "taps": "the kernels are reversed: the",
        "a factor": "embedding_scale is 0.7; the model",
        "two factors": "ssm_scales of B and C are",
    },
    "qwen3_next": {
        "no bias is added": "no dt_bias is added before the",
        "in the delta net dt_bias is subtracted": OWN,
        "values are rotated as the keys": ALONE,
        "in the delta net keys are not normalised": OWN,
        "in the delta net beta has no sigmoid": OWN,
        "in the delta net the output gate is left out": OWN,
        "in the delta net the activation after the convolution is left out": OWN,
    },
    "gemma2": {
        "a cap of logits": "the logits are capped at 20; the",
        "a cap": "scores are capped at 25; the",
        "no cap": "scores are not capped; the model",
        "an eps": ("the norms add eps 0.001 where the", "embedding_scale is 3.8; the model"),
        "a base": ("rope's base is 123; the model", ""),
    },
    "gpt2": {
        "a shift": "positions are counted from 1",
        "two texts": "from token 6 on tokens have positions 0",
        "no positions": ("no position is added to the", "what the sublayer computed is not"),
        "no bias": "L0.attn_q.bias is not added",
        "a bias twice": "L0.ffn_up.bias is added twice",
        "rows of a tied head": ("token_embd.weight: rows are in", ""),
        "half twice": ("L0.ffn_up.weight: the rows are those of shards 0, 0 of 2", ""),
        "an offset": "positions are counted from 1",
    },
    "llama4": {
        "chunks": "attention reaches the tokens of a",
        "no chunks": "attention reaches all earlier",
        "a window": "attention reaches 8 tokens; the",
        "a temperature": "queries grow by 0.3 times a",
        "no temperature": "queries have no factor that grows",
        "a base": ("rope's base is 700; the model", ""),
    },
    "cohere-qk-norm": {
        "of q and k every head has the first one's norm weight": OWN,
        "of k the norm's weights are read with heads and elements exchanged": OWN,
    },
    "qwen3": {
        "norms": "L0.attn_q_norm.weight and",
        "an eps": "the norms add eps 0.01 where the",
        "rotated elements": "6 elements of each head are",
    },
}


# The points of single operations, which few engines record.
INNER = {
    "attn_norm", "beta", "conv_x", "decay", "embd_scaled", "expert_w", "experts", "ffn_act",
    "ffn_gate", "ffn_norm", "ffn_up", "index_k_rope", "index_q_rope", "index_scores", "k_pe_rope",
    "k_rope", "probs", "q_rope", "router", "scores", "ssm_gated", "ssm_step",
}  # fmt: skip


def planted(
    base: str, wanted: Collection[str], hidden: Collection[str]
) -> Iterator[tuple[str, str, Mismatch]]:
    """Give (what is planted, its own sentence, the first point in which that run differs)."""
    with open_model(tiny_folder(base)) as model:
        with Session.open(model, NUMPY("cpu", "float32")) as session:
            whole = session.trace(SHORT, tuple(session.points), positions="all")
        patched = PatchedModel.unpatched(model, SHORT, "float32", None)
        plain = record_points(patched)
        shapes = {key: value.shape for key, value in plain.items()}
        usual = {one.change.says: one for one in reversed(usual_mistakes(patched))}
        for name in wanted:
            if name in OTHERS.get(base, {}):
                says, made = "", record_points(OTHERS[base][name](patched))
            else:
                says = name if name in usual else next(s for s in usual if s.startswith(name))
                made = record_points(usual[says].change.make(patched, usual[says].layers))
            records = {
                key: record
                for key, record in whole.records.items()
                if key in made and made[key].shape == shapes[key]
                if key.rpartition(".")[2] not in hidden
            }
            trace = Trace(whole.run, records, whole.aliases, made.get)
            recorded = RecordedTrace(trace, SHORT, dict(shapes))
            found = run_shadow_pass(patched, recorded)
            view = next(iter(found.flagged), None)
            assert view is not None, name
            yield name, says, Mismatch(patched, recorded, view, found, plain, fitting=not says)
        patched.weights.close()


def check_words(change: Change, hp: Mapping[str, Any]) -> None:
    """Hold that a change names a cause, says a sentence, and is none of what the model says."""
    assert change.cause in CAUSES and " " in change.says and change.says not in CAUSES
    assert change.where and not any(" " in part for part in change.where), change.where
    if len(change.values) == 1:
        ((name, value),) = change.values.items()
        if name in hp and name not in ("sliding_window", "rope_style"):
            assert value != hp[name], change.says


# Models whose inner points are hidden, too: together they have most of what is solved then.
FEW = ("mixtral", "gemma3", "gemma2", "gpt2", "llama4", "lfm2_moe", "qwen3")


@pytest.mark.parametrize(
    ("base", "few"), [*((base, False) for base in TOLD), *((base, True) for base in FEW)]
)
def test_a_planted_mistake_is_proposed_and_removes_itself(base: str, few: bool) -> None:
    wanted = {}
    for name, said in TOLD[base].items():
        here = said[few] if isinstance(said, tuple) else said
        if here:
            wanted[name] = here
    told = {}
    for name, says, case in planted(base, wanted, INNER if few else ()):
        changes = [change for row in TABLE for change in row.propose(case)]
        for change in changes:
            check_words(change, case.patched.hp)
        changes.sort(key=lambda change: (change.says != says, change.general))
        right = (change.says for change in changes if case.trial(change) <= case.view.tolerance)
        answer = next(right, ALONE)
        told[name] = OWN if answer == says else answer
    short = {name: said[: len(wanted[name])] for name, said in told.items()}
    assert short == wanted
