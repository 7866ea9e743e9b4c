"""Hypotheses at work where the table's faults do not lead: large means, far positions, masks."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.causes.forward.rounding import round_to_type
from aprfmt.causes.forward.routing_rules import wrong_routing_rules
from aprfmt.causes.forward.usual_mistakes import usual_mistakes
from aprfmt.diagnosis import Diagnosis, diagnose
from aprfmt.diagnosis.attention_rows import FAR
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.shadow import record_points
from aprfmt.inference.trace import Trace
from aprfmt.inference.trace_file import load_trace, save_trace
from aprfmt.model import open_model
from tests.diagnosis import dumps, files
from tests.diagnosis.engine_changes import heads, left_out
from tests.diagnosis.engines import COARSE, LONG, broken, broken_here, place, tiny_folder, trace
from tests.diagnosis.faults_packed import INT4
from tests.diagnosis.faults_undecoded import ALONE, PLAIN4, SIXTEEN, of_scale, one_is, undecoded
from tests.models import IDS


def confirmed(folder: Path, run: Path) -> Diagnosis:
    """Return what is said of a run, which has one confirmed cause."""
    found = diagnose(str(folder), str(run))
    assert (found.verdict, found.confidence) == ("bug", "confirmed"), found.sentence
    assert len(found.findings) == 1
    return found


def test_the_eps_of_a_layer_norm_is_solved_whatever_the_mean_of_its_rows() -> None:
    """A layer norm takes the mean away: embeddings around 3 are those around 0 to it."""
    folder = files.copy(
        tiny_folder("gpt2"), "means", tensors=files.edit("transformer.wte.weight", lambda x: x + 3)
    )
    found = confirmed(folder, trace(folder, "means-eps", hp={"norm_eps": 2.5e-3}))
    assert found.cause == "norm_eps" and "add eps 0.0025 where" in found.sentence
    calls = iter(range(1 << 30))

    def third(op: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
        return op(x, w, bias, eps=2.5e-3 if next(calls) == 2 else eps)

    found = confirmed(folder, trace(folder, "one-eps", backend=lambda: broken("layer_norm", third)))
    assert (
        found.cause == "norm_eps"
        and "the norm at attn_norm alone adds eps 0.0025" in found.sentence
    )


@pytest.mark.parametrize(
    ("base", "off"), [("llama", 0.0), ("gemma2", 0.0), ("gpt_neox", 0.0), ("gemma2", 1e-7)]
)
def test_a_float64_run_has_the_float32_operations_of_transformers(base: str, off: float) -> None:
    """Norms, softmax and rope are float32 there in every run; products are not."""

    def doubled(model: Any, stack: Any) -> None:
        model.double()
        layer = next(each for name, each in model.named_modules() if name.endswith("layers.1.mlp"))
        [*_, last] = [each for each in layer.modules() if hasattr(each, "weight")]
        last.weight.data *= 1 + off

    folder, run = dumps.dump(base, f"{base}-{off}", {}, doubled, dumps.everything, dumps.as_npy)
    found = diagnose(str(folder), str(run))
    assert found.verdict == ("bug" if off else "precision"), found.sentence


def test_positions_far_behind_the_first_are_found() -> None:
    """An engine whose rope goes on where its cache was full, and whose rows are counted anew."""
    folder = tiny_folder("llama")
    run = place("counted.safetensors")
    rows = tuple(range(len(IDS)))
    with load_trace(trace(folder, "far", positions=range(1060, 1060 + len(IDS)))) as far:
        records = {key: replace(record, positions=rows) for key, record in far.records.items()}
        save_trace(run, Trace(far.run, records, far.aliases, far.recorded_values))
    found = confirmed(folder, run)
    assert found.cause == "positions" and "counted from 1060 instead of 0" in found.sentence


def test_the_farthest_step_of_positions_that_is_tried() -> None:
    """A cache of 40 rows that goes on behind itself, seen in the output of attention alone."""
    folder, behind = tiny_folder("llama"), len(IDS) - 2
    positions = [*range(behind), behind + FAR, behind + 1 + FAR]
    found = confirmed(folder, trace(folder, "stepped", points=COARSE, positions=positions))
    assert found.cause == "positions"


def test_queries_that_miss_their_own_token_are_named() -> None:
    """The first one has no other; it sees itself."""

    def earlier(own: Any) -> Any:
        mask = own.mask & ~np.eye(*own.mask.shape[-2:], dtype=np.bool_)
        mask[..., 0, 0] = True
        return mask

    folder = tiny_folder("llama")
    run = trace(
        folder,
        "own",
        points=COARSE,
        backend=lambda: broken("probs", heads(mask=earlier, causal=None)),
    )
    found = confirmed(folder, run)
    assert found.cause == "mask" and "queries do not see their own token" in found.sentence


@pytest.mark.parametrize(
    ("base", "values", "cause"),
    [
        ("mixtral", {"norm_topk": False}, "moe_routing"),
        ("gpt_neox", {"parallel_residual": False}, "residual"),
        ("falcon_h1", {"ssm_out_scale": 1.0}, "multiplier"),
        ("granite", {"residual_scale": 1.0}, "multiplier"),
    ],
)
def test_a_number_of_one_layer_is_said_of_this_layer(
    base: str, values: dict[str, Any], cause: str
) -> None:
    folder = tiny_folder(base)
    with open_model(folder) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        made = record_points(patched.with_hyper(frozenset({1}), **values))
    run = trace(
        folder,
        f"{base}-one-layer",
        points=COARSE,
        rename=lambda own: {key: made[key] for key in own},
    )
    found = confirmed(folder, run)
    assert found.cause == cause
    assert found.findings[0].where == tuple(f"L1.{name}" for name in values)


@pytest.mark.parametrize("gone", [frozenset({"embd_scaled"}), frozenset()])
def test_another_size_of_the_stream_is_no_factor_of_what_is_added(gone: frozenset[str]) -> None:
    """Norms hide it up to the first sum; a recorded embedding may be as the model says."""
    folder = tiny_folder("granite")
    with open_model(folder) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        twice = float(patched.hp["embedding_scale"]) ** 2
        right = record_points(patched)
        made = record_points(patched.with_hyper(None, embedding_scale=twice))
    made = {**made, "embd_scaled": right["embd_scaled"]}
    run = trace(
        folder,
        f"twice-{len(gone)}",
        points=frozenset({"embd", "embd_scaled", "attn_out", "ffn_norm", "out"}) - gone,
        rename=lambda own: {key: made[key] for key in own},
    )
    found = confirmed(folder, run)
    assert found.findings[0].where == ("embedding_scale",)
    assert "applied twice" in found.sentence and len(found.findings) == 1


Factors = Mapping[tuple[int, str], float]  # (layer, the point after a sum) -> a factor of a part


def with_factors(patched: PatchedModel, factors: Factors) -> PatchedModel:
    """Return the model in which what is added before some points is multiplied.

    Of the point "entering" the stream that enters the layer is.
    """
    for (layer, point), factor in factors.items():

        def tap(_: Any, at: int, x: Any, held: Any, point: str = point, by: float = factor) -> Any:
            if point == "entering":
                return np.float32(by) * x
            stream = held["stream" if point == "mid" else "mid"]
            return stream + np.float32(by) * (x - stream)

        where = frozenset({layer - (point == "entering")})
        patched = patched.with_tap("out" if point == "entering" else point, tap, where)
    return patched


@pytest.mark.parametrize(
    ("base", "factors", "says"),
    [
        ("granite", {(0, "mid"): 1.5}, ["L0: attention computed is multiplied by 0.9;"]),
        ("llama", {(1, "out"): 0.5}, ["L1: the MLP computed is multiplied by 0.5;"]),
        ("llama", {(1, "mid"): 2.0}, ["L1: attention computed is added twice"]),
        (
            "granite",
            {(0, "mid"): 1.5, (1, "mid"): 2.0},
            [
                "L0: attention computed is multiplied by 0.9;",
                "L1: attention computed is multiplied by 1.2;",
            ],
        ),
        (
            "granite",
            {(0, "mid"): 2.0, (0, "out"): 0.5},
            [
                "L0: attention computed is multiplied by 1.2;",
                "L0: the MLP computed is multiplied by 0.3;",
            ],
        ),
        ("granite", {(1, "entering"): 3.0}, ["L0: the stream in layer 1 is 3 times"]),
        ("olmo2", {(1, "entering"): 1.7}, ["L0: the stream in layer 1 is 1.7 times"]),
    ],
)
def test_a_factor_is_said_of_its_layer_and_its_sublayer(
    base: str, factors: Factors, says: list[str]
) -> None:
    """No factor of another part or layer is said, nor that one is undone behind it.

    Seen red: three factors confirmed for one of attention in one layer; one of each product that
    read a larger stream, which norms hide.
    """
    folder = tiny_folder(base)
    with open_model(folder) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        made = dict(record_points(with_factors(patched, factors)))
    for layer, point in factors:
        if point == "entering":
            made[f"L{layer - 1}.out"] = made[f"L{layer - 1}.out"] / factors[layer, point]
    points = {"embd", "attn_norm", "q", "k", "v", "attn_out", "attn_contrib", "ffn_norm", "ffn_out"}
    run = trace(
        folder,
        f"factors-{base}-{len(factors)}-{min(factors)}",
        points=frozenset({*points, "ffn_contrib", "out"}),
        rename=lambda own: {key: made[key] for key in own},
    )
    found = diagnose(str(folder), str(run))
    assert found.complete and found.confidence == "confirmed", found.sentence
    told = [f"{one.where[0][:2]}: {one.says}" for one in found.findings]
    assert len(told) == len(says)
    for one, wanted in zip(told, says, strict=True):
        assert one.replace("what ", "").startswith(wanted) and one.startswith("L"), told


@pytest.mark.parametrize(
    ("layers", "where"), [({0, 1}, ["L0", "L1"]), ({0, 1, 2}, ["re"]), ({1}, ["L1"])]
)
def test_a_factor_is_said_of_the_layers_that_have_it(layers: set[int], where: list[str]) -> None:
    """Of all, where all have it. Seen red: undone in the layer behind them, as a second cause."""
    folder = tiny_folder("granite")
    with open_model(folder) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        assert patched.n_layers == 3
        made = record_points(patched.with_hyper(frozenset(layers), residual_scale=0.3))
    run = trace(
        folder,
        f"layers-{len(layers)}",
        points=COARSE,
        rename=lambda own: {key: made[key] for key in own},
    )
    found = confirmed(folder, run)
    assert [name[:2] for name in found.findings[0].where] == where, found.sentence
    assert "residual_scale is 0.3; the model says 0.6" in found.findings[0].says


def reading(names: tuple[str, ...], chosen: int | None, after: bool, weighed: bool) -> Any:
    """Return what makes modules read a layer's stream, normed with attention's weight or none."""

    def wrong(model: Any, stack: ExitStack) -> None:
        import torch

        for layer, one in enumerate(model.model.layers):
            held: dict[str, Any] = {}

            def stream(module: Any, given: Any, held: dict[str, Any] = held) -> None:
                held["x"] = given[0]

            def attention(module: Any, given: Any, made: Any, held: Any = held) -> None:
                held["x"] = held["x"] + made[0] if after else held["x"]

            def read(module: Any, given: Any, one: Any = one, held: Any = held) -> Any:
                norm, x = one.input_layernorm, held["x"]
                if weighed:
                    return (
                        torch.nn.functional.layer_norm(
                            x, x.shape[-1:], norm.weight, norm.bias, norm.eps
                        ),
                    )
                return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon),)

            one.register_forward_pre_hook(stream)
            one.self_attn.register_forward_hook(attention)
            for name in names if chosen in (None, layer) else ():
                one.get_submodule(name).register_forward_pre_hook(read)

    return wrong


def router_before_norm(model: Any, stack: ExitStack) -> None:
    """Let each router read what the norm before the experts reads."""
    for one in model.model.layers:
        held: dict[str, Any] = {}

        def stream(module: Any, given: Any, held: dict[str, Any] = held) -> None:
            held["x"] = given[0]

        def read(module: Any, given: Any, held: dict[str, Any] = held) -> Any:
            return (held["x"].reshape(given[0].shape),)

        one.post_attention_layernorm.register_forward_pre_hook(stream)
        one.mlp.gate.register_forward_pre_hook(read)


@pytest.mark.parametrize(
    ("base", "wrong", "cause", "says"),
    [
        ("phi2", reading(("mlp",), None, True, True), "residual", "the MLP reads the stream after"),
        (
            "llama",
            reading(tuple(f"self_attn.{x}_proj" for x in "qkv"), 1, False, False),
            "norm_skipped",
            "attention reads the layer's input, normed without a weight",
        ),
        (
            "mixtral",
            router_before_norm,
            "residual",
            "the router reads the stream after attention, without a norm",
        ),
    ],
)
def test_no_weight_is_accused_where_its_product_is_of_another_input(
    base: str, wrong: Any, cause: str, says: str
) -> None:
    folder, run = dumps.dump(base, f"{base}-reads", {}, wrong, dumps.everything, dumps.as_npz)
    found = confirmed(folder, run)
    assert found.cause == cause and says in found.sentence


def test_a_query_and_its_gate_that_are_cut_from_halves_of_their_rows() -> None:
    """The product is recorded as it is, so that the points of its parts are read by the model."""
    order: list[Any] = []

    def wrong(model: Any, stack: ExitStack) -> None:
        for name, module in model.named_modules():
            if name.endswith("self_attn.q_proj"):
                rows = np.arange(module.weight.shape[0])
                heads = model.config.num_attention_heads
                order[:] = [rows.reshape(2, heads, -1).transpose(1, 0, 2).reshape(-1)]
                module.weight.data = module.weight.data[order[0]].clone()

    values = dumps.outputs("qwen3_next", {}, wrong)
    for key in values:
        if key.endswith("self_attn.q_proj"):
            values[key] = values[key][..., np.argsort(order[0])]
    found = confirmed(tiny_folder("qwen3_next"), dumps.as_npz(values, "halves"))
    assert found.cause == "fused_order" and "in halves, not head by head" in found.sentence


@pytest.mark.parametrize("passes", [(20,), (9, 15)])
def test_masks_that_count_a_later_passs_tokens_from_0(passes: tuple[int, ...]) -> None:
    """A causal mask without the tokens in the cache, and single steps that have the right one."""
    at = np.arange(len(LONG))
    begun = np.searchsorted(passes, at, side="right")
    starts = np.array([0, *passes])[begun] * (at < 30)

    def early(own: Any) -> Any:
        return own.mask & (at[None] <= (at - starts)[:, None])

    folder = tiny_folder("llama")
    run = trace(
        folder,
        f"passes-{len(passes)}",
        ids=LONG,
        points=COARSE,
        backend=lambda: broken("probs", heads(mask=early, causal=None)),
    )
    found = confirmed(folder, run)
    assert found.cause == "mask" and found.findings[0].values == {"passes": [*passes]}


def at_norm(point: str, change: Any) -> dict[str, Any]:
    """Return how a run is made whose norms after a point of layer 1 are `change(op, x, ...)`."""

    def norm(here: Any, op: Any, x: Any, *rest: Any, **how: Any) -> Any:
        chosen = (here.point, here.layer) == (point, 1)
        return change(op, x, *rest, **how) if chosen else op(x, *rest, **how)

    return dict(broken_here(rms_norm=norm, layer_norm=norm))


def outside(op: Any, x: Any, w: Any, *, eps: float, **how: Any) -> Any:
    root = np.sqrt(np.mean(np.square(x), -1, keepdims=True))
    return op(x, w, eps=0.0, **how) * (root / (root + eps))


def before_weight(op: Any, x: Any, w: Any, **how: Any) -> Any:
    return round_to_type(op(x, np.ones_like(w), **how), "float16") * w


def in_turn(first: str, second: str) -> Any:
    """Return a renaming that exchanges two points."""
    names = {first: second, second: first}
    return lambda values: {
        ".".join([*key.split(".")[:-1], names.get(key.split(".")[-1], key.split(".")[-1])]): value
        for key, value in values.items()
    }


def weights_in_turn(first: str, second: str) -> Any:
    """Return an overlay that exchanges two weights in every layer."""
    return lambda w: {
        key: w[key.replace(a, b)].numpy()
        for a, b in ((first, second), (second, first))
        for key in w
        if f".{a}." in key
    }


def cached(dtype: str, *, keys: bool = True) -> Any:
    return lambda: broken(
        "attention",
        lambda op, q, k, v, own: op(
            q, round_to_type(k, dtype) if keys else k, round_to_type(v, dtype), own
        ),
    )


def cached_in_bytes() -> Any:
    """Keys and values are integers of 8 bits on a scale of each head of each token."""

    def short(x: Any) -> Any:
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        return np.rint(x / scale) * scale

    return broken("attention", lambda op, q, k, v, own: op(q, short(k), short(v), own))


def product_in_bytes(here: Any, op: Any, x: Any, w: Any, *rest: Any) -> Any:
    """A product of integers of 8 bits: a scale for each row of a matrix, and for each token."""

    def short(values: Any) -> Any:
        scale = np.abs(values).max(-1, keepdims=True) / np.float32(127)
        return np.rint(values / scale) * scale

    if not w.key.startswith("L"):
        return op(x, w, *rest)
    return (short(x) @ short(np.asarray(w.numpy(), np.float32)).T).astype(np.float32)


def keys_otherwise(turn: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """Rope whose keys are turned by turn(operation, keys, table, its options), queries as usual."""
    calls = count()  # queries come first in each layer

    def rope(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
        return turn(op, x, table, how) if next(calls) % 2 else op(x, table, **how)

    return rope


def base_of_the_first() -> Callable[[Any, Any, Any, Any], Any]:
    """Turn by the table of the first layer in every layer."""
    first: list[Any] = []

    def turn(op: Any, x: Any, table: Any, how: Any) -> Any:
        first[:] = first or [table]
        return op(x, first[0], **how)

    return turn


def one_further(op: Any, q: Any, k: Any, v: Any, own: Any) -> Any:
    """Attention whose queries are turned by the angles of one more position."""
    half = q.shape[-1] // 2
    angles = 5000.0 ** (-np.arange(half) / half)  # the base of the tiny llama
    x, y, c, s = q[..., :half], q[..., half:], np.cos(angles), np.sin(angles)
    return op(np.concatenate([x * c - y * s, y * c + x * s], -1).astype(q.dtype), k, v, own)


EXCHANGED = {"weights": weights_in_turn("ffn_gate", "ffn_up"),
             "rename": in_turn("ffn_gate", "ffn_up")}  # fmt: skip
MODULES = COARSE | {"embd", "attn_norm", "ffn_norm", "q", "k", "v", "ffn_gate", "ffn_up", "ffn_act"}
# A run -> (model, how it is made, cause, what is said).
ENGINES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "eps outside": ("llama", {"backend": lambda: broken("rms_norm", outside)}, "norm_eps",
                    "add eps to the root"),
    "norm twice": ("llama", at_norm("out", lambda op, x, *a, **k: op(op(x, *a, **k), *a, **k)),
                   "norm_skipped", "the norm at attn_norm is applied twice"),
    "one norm's mean": ("gpt_neox", at_norm("out", lambda op, x, w, b, eps: x / np.sqrt(
        np.mean(np.square(x), -1, keepdims=True) + eps) * w + b), "norm_kind",
        "the norm at attn_norm keeps the mean"),
    "norm in float16": ("llama", {"backend": lambda: broken("rms_norm", before_weight)},
                        "rounding", "rounded to float16 before their weight"),
    "next token": ("gpt2", {"backend": lambda: broken("probs", heads(
        mask=lambda own: own.mask | np.eye(own.mask.shape[-2], own.mask.shape[-1], 1, np.bool_),
        causal=None))}, "mask", "see the token after their own"),
    "gate and up": ("llama", EXCHANGED, "swapped_tensors", "activation is taken of up"),
    "keys and values": ("llama", {"backend": lambda: broken(
        "attention", lambda op, q, k, v, own: op(q, v, k, own))}, "swapped_tensors",
        "values for keys"),
    "no sigmoid": ("qwen3_5", dict(broken_here(
        sigmoid=lambda here, op, x: x if here.point == "attn_mixed" else op(x))),
        "attention_gate", "without its sigmoid"),
    "keys in pages": ("llama", dict(broken_here(rope=keys_otherwise(
        lambda op, x, table, how: op(x, tuple(t[np.arange(len(t)) % 4] for t in table), **how)))),
        "positions", "keys are rotated by positions that begin again at every 4, queries are not"),
    "keys in pairs": ("llama", dict(broken_here(rope=keys_otherwise(
        lambda op, x, table, how: op(x, table, **how | {"style": "interleaved"})))),
        "rope_pairing", "of keys alone, not of queries: rope pairs elements 2i with 2i + 1"),
    "keys backwards": ("llama", dict(broken_here(rope=keys_otherwise(
        lambda op, x, table, how: op(x, (table[0], -table[1]), **how)))),
        "rope_pairing", "of keys alone, not of queries: rope turns backwards"),
    "keys of other layers": ("gemma3", dict(broken_here(rope=keys_otherwise(base_of_the_first()))),
        "rope_layers", "of keys alone, not of queries: layers rotate with base"),
    "sinks of others": ("gpt_oss", {"backend": lambda: broken("probs", heads(
        sinks=lambda own: np.roll(own.sinks, 1)))}, "softmax_reduction",
        "the attention sinks are those of the head before"),
    "experts' weights": ("mixtral", {"alter": lambda: lambda point, layer, x: (
        np.take_along_axis(np.sort(x)[:, ::-1], np.argsort(np.argsort(x)), -1)
        if point == "expert_w" else x)}, "moe_routing",
        "have each other's weights, the largest that of the smallest"),
    "queries further": ("llama", {"backend": lambda: broken("attention", one_further)},
                        "positions", "queries are rotated one position further than keys"),
    "other layers' window": ("gemma2", {"ids": LONG[:24], "hp": lambda hp: {
        "window_layers": tuple(not own for own in hp["window_layers"])}}, "sliding_window",
        "the window is in layers 1, 3; the model says 0, 2"),
    "cache in fp8": ("llama", {"backend": cached("float8_e4m3fn")}, "rounding",
                     "keys and values, as a cache holds them, are rounded to float8_e4m3fn"),
    "values in fp8": ("llama", {"backend": cached("float8_e4m3fn", keys=False)}, "rounding",
                      "values alone, as a cache holds them, are rounded to float8_e4m3fn"),
    "cache in int8": ("llama", {"backend": cached_in_bytes}, "rounding",
                      "are rounded to int8, on a scale of each head of each token"),
    "products in int8": ("llama", dict(broken_here(linear=product_in_bytes)), "quantisation",
                         "is a copy in int8, a scale for each row, whose input is rounded to it"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_what_an_engine_did_otherwise_is_named(name: str) -> None:
    """On the outputs of modules, with nothing else beside it."""
    base, how, cause, says = ENGINES[name]
    folder = tiny_folder(base)
    found = diagnose(str(folder), str(trace(folder, name.replace(" ", "-"), points=MODULES, **how)))
    harmless = cause in ("rounding", "quantisation")
    assert found.verdict == ("precision" if harmless else "bug"), found.sentence
    assert found.confidence == "confirmed" and len(found.findings) == 1
    assert found.cause == cause and says in found.sentence


@pytest.mark.parametrize("off", [1.0, 1.2])
def test_a_head_in_16_bits_is_rounding_and_one_wrong_column_is_not(off: float) -> None:
    def short(values: dict[str, Any]) -> dict[str, Any]:
        logits = np.array(values["logits"])
        logits[:, 5] *= np.float32(off)
        return {**values, "logits": round_to_type(logits, "bfloat16")}

    folder = tiny_folder("llama")
    run = trace(folder, f"short-{off}", points=COARSE, rename=short)
    found = diagnose(str(folder), str(run))
    assert found.verdict == ("precision" if off == 1 else "bug"), found.sentence


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_tied_head_that_is_another_matrix_is_told_from_a_stale_one(share: float) -> None:
    """There are more tokens than columns, so that the head can be solved."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    folder = tiny_folder("llama", tie_word_embeddings=True, **sizes)

    def head(op: Any, x: Any, w: Any, *rest: Any) -> Any:
        if w.key != "token_embd.weight":
            return op(x, w, *rest)
        own = np.asarray(w.numpy(), np.float32)
        other = np.random.default_rng(4).standard_normal(own.shape) * own.std()
        return (x @ (share * own + (1 - share) * other).T).astype(x.dtype)

    run = trace(folder, f"head-{share}", points=COARSE, backend=lambda: broken("linear", head))
    found = confirmed(folder, run)
    assert found.cause == ("stale_tensor" if share else "tied_embedding"), found.sentence


def test_two_rules_of_eps_that_fit_alike_are_both_said() -> None:
    """Rows of one size: eps outside the root is another eps below it."""

    def alike(x: Any) -> Any:
        return np.asarray(x / np.sqrt(np.mean(np.square(x), -1, keepdims=True)) / 50, np.float32)

    folder = files.copy(
        tiny_folder("llama"), "alike", tensors=files.edit("model.embed_tokens.weight", alike)
    )
    first = ("embd", "L0.attn_norm")
    run = trace(
        folder,
        "alike-outside",
        points=None,
        backend=lambda: broken("rms_norm", outside),
        rename=lambda values: {key: values[key] for key in first},
    )
    lead = diagnose(str(folder), str(run)).lead
    assert lead is not None and lead.cause == "norm_eps" and "norm_eps" in lead.also
    assert lead.certainty == "explained"


def test_positions_are_shown_from_where_they_part() -> None:
    folder, n = tiny_folder("llama"), len(IDS)
    run = trace(folder, "late", points=COARSE, positions=[*range(20), *range(21, n + 1)])
    assert "from token 20 on tokens have positions 21, 22" in confirmed(folder, run).sentence


def test_another_factor_on_positions_is_held_against_the_scaling_that_the_model_states() -> None:
    """phi3 of this size states longrope; qwen2 states no scaling."""
    said = {}
    for name in ("phi3", "qwen2"):
        with open_model(tiny_folder(name)) as model:
            changes = [
                row.change for row in usual_mistakes(PatchedModel.unpatched(model, IDS, "float32"))
            ]
        said[name] = {row.says for row in changes if row.says.startswith("positions are divided")}
    assert said["phi3"] and all(row.endswith("; the model says longrope") for row in said["phi3"])
    assert said["qwen2"] and all(row.endswith("model does not say") for row in said["qwen2"])


def test_a_stream_that_is_replaced_is_seen_in_logits_alone() -> None:
    folder = tiny_folder("llama")
    run = trace(folder, "replaced", points=frozenset({"logits"}), alter=left_out("attn_out", "mid"))
    found = confirmed(folder, run)
    assert found.cause == "residual" and "what attention computed replaces" in found.sentence


def test_a_weight_with_two_faults_is_not_right_without_one_of_them() -> None:
    """Beside BF16 weights: groups misclaimed for all, and one scale of one weight is negative."""
    fault = undecoded(
        "twice", "", INT4, PLAIN4, "packing_claim", of_scale(one_is(-1.0), "weight_scale"), SIXTEEN
    )
    a, b = fault.make()
    claim, scale = diagnose(str(a), str(b)).findings
    assert (claim.cause, claim.confirmed) == ("packing_claim", True) and ALONE not in claim.where
    assert (scale.cause, scale.confirmed) == ("scales_invalid", False) and scale.where == (ALONE,)


def test_every_other_ranking_of_groups_of_experts_is_tried() -> None:
    with open_model(tiny_folder("deepseek_v3")) as model:
        made = list(wrong_routing_rules(PatchedModel.unpatched(model, IDS, "float32")))
    ranked = {rule.groups: says for says, rule in made if says.startswith("groups of experts")}
    assert set(ranked) == {"best", "mean", "none"}
    assert all(
        says.endswith("the model says by their two best experts") for says in ranked.values()
    )


# The 16 upper bits of every float32 with lower ones at, below and above half of a unit.
_UPPER = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
_FLOATS = (_UPPER | np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)).reshape(-1)


def test_values_are_rounded_as_the_shorter_types_round() -> None:
    """Bfloat16 by ml_dtypes; tf32, whose unit from 2 to 4 is 1/512, by quarters of it."""
    values = _FLOATS.view(np.float32)
    values = values[np.isfinite(values)]
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(round_to_type(values, "bfloat16"), expected)
    quarters = np.arange(4096, dtype=np.float32)
    made = round_to_type(2 + quarters / 2048, "tf32")
    np.testing.assert_array_equal(made, 2 + np.rint(quarters / 4) / 512)


@pytest.mark.parametrize(
    ("attention", "mlp", "said"),
    [
        (1.0, 1.0, ["residual_scale is 1; the model says 0.6"]),
        (0.3, 0.3, ["residual_scale is 0.3; the model says 0.6"]),
        (1.0, 0.6, ["what attention computed is multiplied by 1; the model says 0.6"]),
        (
            1.0,
            0.3,
            [
                "what attention computed is multiplied by 1; the model says 0.6",
                "what the MLP computed is multiplied by 0.3; the model says 0.6",
            ],
        ),
    ],
)
def test_a_residual_factor_of_one_layer_is_said_once(
    attention: float, mlp: float, said: list[str]
) -> None:
    """Of both parts where they have one; no cause says what another one denies."""
    factors = {"attn_out": attention / 0.6, "ffn_out": mlp / 0.6}

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        factor = factors.get(here.point.replace("contrib", "out"), 1.0) if here.layer == 1 else 1.0
        return op(a, b * np.float32(factor) if b.ndim == 2 else b)

    folder = tiny_folder("granite")
    run = trace(folder, f"factors-{attention}-{mlp}", points=COARSE, **broken_here(add=add))
    found = diagnose(str(folder), str(run))
    assert found.confidence == "confirmed"
    assert [one.says for one in found.findings] == said
    assert {one.where for one in found.findings} == {("L1.residual_scale",)}


@pytest.mark.parametrize(
    ("part", "times", "often"), [("attn_out", 2, "twice"), ("ffn_out", 4, "4")]
)
def test_a_stream_that_each_device_adds_is_no_factor_of_what_is_added(
    part: str, times: int, often: str
) -> None:
    """The next norm takes the stream twice for half of what is added; what follows does not."""

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        return op(np.float32(times) * a if here.point == part and b.ndim == 2 else a, b)

    folder = tiny_folder("llama")
    points = frozenset({"embd", "attn_norm", "attn_out", "ffn_norm", "ffn_out"})
    points |= {"out"} if part == "attn_out" else set()
    run = trace(folder, f"added-{part}-{times}", points=points, **broken_here(add=add))
    found = confirmed(folder, run)
    assert [one.cause for one in found.findings] == ["residual"]
    assert f"the stream is counted {often}" in found.sentence


@pytest.mark.parametrize(
    ("base", "read", "own", "at"),
    [
        ("qwen3", "attn_q_norm.weight", "attn_k_norm.weight", ""),
        ("llama", "ffn_up.weight", "ffn_gate.weight", "L1."),
    ],
)
def test_a_weight_that_is_read_for_two_is_not_exchanged(
    base: str, read: str, own: str, at: str
) -> None:
    """One cause for all layers; the weight that is read twice is right where it belongs."""
    folder = tiny_folder(base)

    def weights(held: Any) -> dict[str, Any]:
        keys = [key for key in held if key.endswith(f".{own}") and key.startswith(at)]
        return {key: held[key.replace(own, read)].numpy() for key in keys}

    run = trace(folder, f"read-{read}", points=COARSE | {"q_norm", "k_norm"}, weights=weights)
    (finding,) = confirmed(folder, run).findings
    assert finding.says == f"{read} is read in place of {own}, too"
    assert finding.where == (f"{at}{own}",)


@pytest.mark.parametrize("base", ["falcon_h1", "bloom", "llama4"])
def test_a_module_that_returns_more_than_its_product_is_no_array_written_over(base: str) -> None:
    """falcon_h1's MLP multiplies, bloom's adds the stream, llama4's router gives the weights."""
    values = dumps.outputs(base, {}, None)
    found = diagnose(str(tiny_folder(base)), str(dumps.as_npz(values, f"more-{base}")))
    assert found.kind == "precision", found.sentence
    # Any other values of such an array are still said.
    name = next(key for key in values if key.endswith(("1.feed_forward", "1.mlp", "1.self_attn")))
    values[name] = values[name] + values[name].mean(1, keepdims=True)
    found = diagnose(str(tiny_folder(base)), str(dumps.as_npz(values, f"other-{base}")))
    assert found.kind == "not_comparable", found.sentence


def test_a_router_that_gives_weights_is_held_to_what_the_model_gives() -> None:
    """Sigmoids of other logits are another fault than none."""

    def softer(model: Any, stack: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith("router"):
                module.weight.data *= 0.5

    values = dumps.outputs("llama4", {}, softer)
    found = diagnose(str(tiny_folder("llama4")), str(dumps.as_npz(values, "softer")))
    assert found.lead is not None and found.lead.says.startswith("L1.expert_w is not what router")
    assert found.verdict == "bug" and "L1.ffn_gate_inp.weight" in found.lead.where


@pytest.mark.parametrize(("factor", "behind"), [(0.7, "multiplier"), (0.9, "scale")])
def test_a_factor_in_another_place_accuses_no_weight(factor: float, behind: str) -> None:
    """A weight is multiplied only by a number that no lost factor is."""

    def scaled(held: Any) -> dict[str, Any]:
        key = "L0.ffn_down.weight"
        return {key: held[key].numpy() * np.float32(factor)}

    folder = tiny_folder("falcon_h1")
    points = frozenset({"ffn_norm", "ffn_gate", "ffn_act", "ffn_mul", "ffn_out"})
    lost = {"ffn_gate_scale": 1.0}
    run = trace(folder, f"moved-{factor}", points=points, hp=lost, weights=scaled)
    found = diagnose(str(folder), str(run))
    assert found.confidence == "confirmed"
    assert [one.cause for one in found.findings] == ["multiplier", behind], found.sentence
    assert found.findings[1].where == (
        ("L0.ffn_down.weight",) if behind == "scale" else ("ffn_gate_scale",)
    )


@pytest.mark.parametrize("point", ["ssm_gate", "ssm_conv_in", "ssm_dt"])
@pytest.mark.parametrize("recorded", ["all", "one"])
def test_what_runs_beside_attention_is_not_recorded_elsewhere(point: str, recorded: str) -> None:
    """Attention agrees, since it is not computed from the mixer beside it.

    Seen red: "what is recorded was taken at another point: ssm_gate is its value times 0.8; ...
    L0.attn_out, which is computed from it, agrees" beside the multiplier that was lost.
    """
    folder = tiny_folder("falcon_h1")
    mixer = {"ssm_gate", "ssm_conv_in", "ssm_dt"} if recorded == "all" else {point}
    points = frozenset({"attn_norm", "q", "k", "v", "attn_out", "ssm_out", "ffn_norm", *mixer})
    lost = {"ssm_in_scale": 1.0}
    found = confirmed(folder, trace(folder, f"beside-{recorded}-{point}", points=points, hp=lost))
    assert [one.cause for one in found.findings] == ["multiplier"], found.sentence
    assert found.findings[0].where == ("ssm_in_scale",) and not found.left
    assert found.findings[0].first == f"L0.{'ssm_gate' if recorded == 'all' else point}"


@pytest.mark.parametrize("divides", [True, False])
def test_scores_divided_by_the_layers_number_are_told_from_one_factor(divides: bool) -> None:
    """The key says it, and the model's own factor of that layer; a layer's half is a factor."""
    options = {"scale_attn_by_inverse_layer_idx": True} if divides else {}
    folder = tiny_folder("gpt2", **options)
    points = frozenset({"q", "k", "v", "attn_out"})
    run = trace(
        folder, f"by-layer-{divides}", points=points, hp={"attn_scale_by_layer": not divides}
    )
    found = confirmed(folder, run)
    assert found.lead is not None and found.lead.where == ("attn_scale_by_layer",)
    own = float(open_model(folder).hyper["attn_scale"]) / (1 + divides)
    assert f"{own:.9g} in layer 1" in found.sentence

    def halved(here: Any, op: Any, q: Any, k: Any, own: Any, *rest: Any) -> Any:
        return op(q, k, replace(own, scale=own.scale / (1 + (here.layer == 1))), *rest)

    run = trace(folder, f"halved-{divides}", points=points, **broken_here(scores=halved))
    found = confirmed(folder, run)
    assert found.lead is not None and found.lead.where == ("L1.attn_scale",), found.sentence


def rounded_here(points: tuple[str, ...], dtype: str, *ops: str) -> dict[str, Any]:
    """Return how a run is made whose operations after some points read and give a short type."""

    def short(here: Any, op: Any, *args: Any, **how: Any) -> Any:
        if here.point not in points:
            return op(*args, **how)
        given = [round_to_type(x, dtype) if isinstance(x, np.ndarray) else x for x in args]
        return round_to_type(op(*given, **how), dtype)

    return dict(broken_here(**dict.fromkeys(ops, short)))


@pytest.mark.parametrize(
    ("base", "points", "dtype", "op", "where"),
    [
        ("llama", ("ffn_out",), "float16", "add", "L0.out"),
        ("llama", ("embd", "out"), "bfloat16", "rms_norm", "L0.attn_norm"),
        ("gpt2", ("mid",), "bfloat16", "layer_norm", "L0.ffn_norm"),
        ("qwen3_moe", ("ffn_norm",), "bfloat16", "router", "L0.router"),
    ],
)
def test_points_of_a_run_in_another_type_are_named(
    base: str, points: tuple[str, ...], dtype: str, op: str, where: str
) -> None:
    """Where rounding to it gives what was recorded; equal scores of experts are no fault."""
    folder = tiny_folder(base)

    def gates(held: Any) -> dict[str, Any]:
        keys = [key for key in held if key.endswith("ffn_gate_inp.weight")]
        return {key: round_to_type(held[key].numpy(), dtype) for key in keys}

    how = rounded_here(points, dtype, op)
    run = trace(folder, f"short-{base}-{op}", weights=gates, **how)
    found = diagnose(str(folder), str(run))
    assert found.kind == "precision" and found.lead is not None, found.sentence
    assert found.lead.where[0] == where and f"computed in {dtype}" in found.sentence


def test_of_experts_with_one_score_another_may_be_chosen() -> None:
    """Two rows of the router are equal; which of their experts is taken says nothing."""

    def doubled(x: Any) -> Any:
        return np.concatenate([x[:1], x[:1], x[2:]])

    def second(here: Any, op: Any, *args: Any, **how: Any) -> Any:
        y = op(*args, **how)
        return np.where(np.arange(y.shape[1]) == 1, y + np.float32(1e-6), y)

    def recorded(values: dict[str, Any]) -> dict[str, Any]:
        alike = {key: doubled(x.T).T for key, x in values.items() if key == "L0.router"}
        return {**values, **alike}

    folder = files.copy(
        tiny_folder("qwen3_moe"),
        "one-score",
        tensors=files.edit("model.layers.0.mlp.gate.weight", doubled),
    )
    kept = frozenset({"ffn_norm", "router", "moe_out"})
    run = trace(folder, "one-score", points=kept, rename=recorded, **broken_here(router=second))
    found = diagnose(str(folder), str(run))
    assert found.verdict == "precision", found.sentence
    assert ((found.lead and found.lead.residual_before) or 0) > 1e-3  # other experts were chosen


@pytest.mark.parametrize("points", [("attn", "ffn"), ("attn",)])
def test_a_layer_that_is_left_out_is_one_cause(points: tuple[str, ...]) -> None:
    """Seen red: norms of another kind, and three causes behind them, all confirmed."""

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        return a if here.layer == 1 and here.point.startswith(points) else op(a, b)

    seen = frozenset({"embd", "out", "final_norm", "logits"})
    run = trace(
        tiny_folder("llama"), f"left-out-{len(points)}", points=seen, **broken_here(add=add)
    )
    found = confirmed(tiny_folder("llama"), run)
    assert [one.where for one in found.findings] == [("L1.residual",)]
    assert ("the layer is left out" in found.sentence) == (len(points) == 2), found.sentence
