"""Check a backend: each operation of the protocol against numpy in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.base import ROWS, Array, Backend, Heads
from aprfmt.inference.masks import causal_mask
from aprfmt.inference.weights import Weight, array_weights
from aprfmt.testing.arch import assert_near

# relL2 of one operation: its own rounding, and that of its inputs to the dtype.
_LIMITS: Mapping[str, float] = {
    "float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3,
}  # fmt: skip
_TOKENS, _WIDTH, _OUT, _HEADS, _KV, _DIM = 7, 64, 40, 4, 2, 16
Op = Callable[[Backend, Mapping[str, Any], Weight], Array]


def _attention_heads(
    b: Backend, x: Mapping[str, Any], *, sinks: bool = False, cap: float | None = None
) -> Heads:
    """Return the attention's mask, scale, soft cap and sinks for the checked operations."""
    mask = causal_mask(0, _TOKENS, _TOKENS, 4)
    return Heads(mask, 0.3, cap, b.array(x["sinks"]) if sinks else None, "float32")


def _rope_operation(style: Any) -> Op:
    """Return a function that rotates queries by rope, with the pairing `style`."""

    def rotate(b: Backend, x: Mapping[str, Any], w: Weight) -> Array:
        """Return the queries x["q"] rotated by the backend's rope, with the pairing `style`.

        The weight `w` is not used.
        """
        table = b.rope_table(
            np.arange(_TOKENS), x["inv_freq"].astype(np.float32), factor=1.1, cast="table"
        )
        return b.rope(b.array(x["q"]), table, style=style, cast="table")

    return rotate


def _activation_operation(kind: str) -> Op:
    """Return a function that applies the activation `kind` to x."""
    return lambda b, x, w: b.activate(b.array(x["x"]), kind, steps=False)


def _attention_operation(sinks: bool, cap: float | None) -> Op:
    """Return a function that computes attention in one call of the backend.

    `sinks` says whether there are sinks, `cap` is the soft cap of scores or None.
    """
    return lambda b, x, w: b.attention(
        b.array(x["q"]),
        b.array(x["k"]),
        b.array(x["v"]),
        _attention_heads(b, x, sinks=sinks, cap=cap),
    )


def _attention_by_steps(b: Backend, x: Mapping[str, Any], w: Weight) -> Array:
    """Return attention computed as scores, probabilities and their product with the values."""
    heads = _attention_heads(b, x, sinks=True, cap=2.0)
    scores = b.scores(b.array(x["q"]), b.array(x["k"]), heads)
    return b.mix(b.probs(scores, heads), b.array(x["v"]))


OPERATIONS: Mapping[str, Op] = {
    "array": lambda b, x, w: b.array(x["x"]),
    "embed": lambda b, x, w: b.embed(w, np.array([3, 0, 39, 3])),
    "linear": lambda b, x, w: b.linear(b.array(x["x"]), w, None),
    "linear with bias": lambda b, x, w: b.linear(b.array(x["x"]), w, b.array(x["bias"])),
    "router": lambda b, x, w: b.router(b.array(x["x"]), w, None, rounded=False),
    "add": lambda b, x, w: b.add(b.array(x["x"]), b.array(x["weight"])),
    "mul": lambda b, x, w: b.mul(b.array(x["x"]), b.array(x["y"])),
    "scale": lambda b, x, w: b.scale(b.array(x["x"]), 1.7),
    "shift": lambda b, x, w: b.shift(b.array(x["x"]), 1.0),
    "clip": lambda b, x, w: b.clip(b.array(x["x"]), 0.75),
    "softcap": lambda b, x, w: b.softcap(b.array(x["x"]), 3.0),
    "sigmoid": lambda b, x, w: b.sigmoid(b.array(x["x"])),
    "swiglu_oai": lambda b, x, w: b.swiglu_oai(b.array(x["x"]), b.array(x["y"]), 0.7, 1.702),
    "xielu": lambda b, x, w: b.xielu(b.array(x["x"]), 0.8, 1.3, 0.5, -1e-6),
    **{
        kind: _activation_operation(kind) for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    },
    "rms_norm": lambda b, x, w: b.rms_norm(
        b.array(x["x"]), b.array(x["weight"]), eps=1e-2, offset=1, cast="after_weight"
    ),
    "layer_norm": lambda b, x, w: b.layer_norm(
        b.array(x["x"]), b.array(x["weight"]), b.array(x["shift"]), eps=1e-2
    ),
    "rope half": _rope_operation("half"),
    "rope interleaved": _rope_operation("interleaved"),
    "attention": _attention_operation(False, None),
    "attention with sinks and cap": _attention_operation(True, 2.0),
    "scores, probs, mix": _attention_by_steps,
    "concat": lambda b, x, w: b.concat([b.array(x["x"]), b.array(x["y"])]),
    "stack": lambda b, x, w: b.stack([b.array(x["x"]), b.array(x["y"])]),
    "repeat_heads": lambda b, x, w: b.repeat_heads(b.array(x["k"])[:, :1], 3),
    "take": lambda b, x, w: b.take(b.array(x["x"]), np.array([4, 1])),
    "add_weighted": lambda b, x, w: b.add_weighted(
        b.array(x["x"]), np.array([5, 2]), b.array(x["y"][:2]), np.array([0.25, 1.5])
    ),
}


def _random_inputs(seed: int) -> dict[str, Any]:
    """Return {name: random float64 array} of the operations' inputs."""
    rng = np.random.default_rng(seed)
    shapes = {
        "x": (_TOKENS, _WIDTH), "y": (_TOKENS, _WIDTH), "w": (_OUT, _WIDTH), "bias": (_OUT,),
        "weight": (_WIDTH,), "shift": (_WIDTH,), "q": (_TOKENS, _HEADS, _DIM),
        "k": (_TOKENS, _KV, _DIM), "v": (_TOKENS, _KV, _DIM), "sinks": (_HEADS,),
    }  # fmt: skip
    found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return found | {"inv_freq": rng.random(_DIM // 2)}


def check_backend(
    name: str, device: str = "cpu", dtype: str = "float32", seed: int = 0
) -> tuple[str, ...]:
    """Compare every operation of a backend with numpy's float64; return the names of the checks.

    `seed` is that of the random inputs. It is checked too that equal input gives equal bits, and in
    deterministic mode a row's bits do not depend on the rows next to it. Raises AssertionError for
    the first check that fails.
    """
    backend, judge = BACKENDS[name](device, dtype), BACKENDS["numpy"]("cpu", "float64")
    inputs = _random_inputs(seed)
    rounded = {
        key: judge.array(backend.to_numpy(backend.array(value)))
        for key, value in inputs.items()
        if key != "inv_freq"
    }
    rounded["inv_freq"] = inputs["inv_freq"].astype(np.float32)
    for op, run in OPERATIONS.items():
        weights = [array_weights({"w": rounded["w"].astype(np.float32)})["w"] for _ in range(2)]
        found = [backend.to_numpy(run(backend, rounded, weights[0])) for _ in range(2)]
        assert found[0].tobytes() == found[1].tobytes(), f"{name}: {op} gave other bits again"
        expected = judge.to_numpy(run(judge, rounded, weights[1]))
        assert_near(found[0], expected, _LIMITS[dtype], f"{name}:{device}:{dtype} {op}")
    steady = BACKENDS[name](device, dtype, deterministic=True)
    x = np.random.default_rng(seed).standard_normal((ROWS + 9, _WIDTH))
    w = array_weights({"w": inputs["w"].astype(np.float32)})["w"]
    whole = steady.to_numpy(steady.linear(steady.array(x), w, None))
    alone = steady.to_numpy(steady.linear(steady.array(x[:3]), w, None))
    same = whole[:3].tobytes() == alone.tobytes()
    assert same, f"{name}: deterministic, and a row's bits depend on the rows after it"
    return (*OPERATIONS, "repeatable", "deterministic")
