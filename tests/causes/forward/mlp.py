"""Seeded faults of `aprfmt/causes/forward/mlp.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.changed_encoders import encoder
from tests.diagnosis.dumps import as_npz, everything
from tests.diagnosis.engine_changes import FIVE, LAYERS, LOGITS, How, dumped, placed
from tests.diagnosis.engines import COARSE, broken, broken_here
from tests.diagnosis.making import engine


def without_beta(op: Any, x: Any, up: float, down: float, beta: float, eps: float) -> Any:
    """Compute xIELU with the second alpha as its softplus gives it."""
    return op(x, up, down - beta, beta, eps)


def only_third() -> Callable[..., Any]:
    """Return an activation that is another function from the third call on."""
    calls = iter(range(1 << 30))

    def change(op: Any, x: Any, kind: str, **how: Any) -> Any:
        return op(x, "gelu" if next(calls) == 2 else kind, **how)

    return change


def sampled(op: Any, x: Any, factor: float) -> Any:
    """Cut by a standard deviation over one less than the values."""
    return op(x, factor * (x.shape[-1] / (x.shape[-1] - 1)) ** 0.5)


def act(change: Callable[[Any, Any], Any]) -> How:
    """Take another function than the activation."""
    return broken_here(
        activate=lambda here, op, x, kind, **how: np.asarray(
            change(lambda y: op(y, kind, **how), x), np.float32
        )
    )


def up(change: Callable[[Any], Any]) -> How:
    """Multiply by another thing than up."""
    return broken_here(
        mul=lambda here, op, a, b: op(a, change(b) if here.point == "ffn_act" else b)
    )


def act_of_product() -> How:
    """Take the activation of gate times up."""
    held: list[Any] = []

    def activate(here: Any, op: Any, x: Any, kind: str, **how: Any) -> Any:
        held[:] = [op(x, kind, **how), x, lambda z: op(z, kind, **how)]
        return held[0]

    def mul(here: Any, op: Any, a: Any, b: Any) -> Any:
        if not held or not (here.point == "ffn_act" or a is held[0]):
            return op(a, b)
        return held[2](held[1] * b)

    return broken_here(activate=activate, mul=mul)


def without_one(here: Any, op: Any, gate: Any, u: Any, limit: float, alpha: float) -> Any:
    """Leave gpt-oss's 1 + up out."""
    gate = np.minimum(gate, limit)
    return (gate / (1 + np.exp(-alpha * gate)) * np.clip(u, -limit, limit)).astype(np.float32)


ENGINE_FAULTS = (
    engine("activation", "llama", "gelu for silu", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("activation-erf", "gpt2", "gelu with erf for tanh", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("activation-squared", "arcee", "relu for its square", "activation", "activation",
           hp={"activation": "relu"}),
    engine("clamp", "gpt_oss", "gate and up clamped at 7 for 1.5", "activation", "swiglu_limit",
           hp={"swiglu_limit": 7.0}),
    engine("alpha-beta", "apertus", "beta not added to the activation's second alpha", "activation",
           "activation", backend=lambda: broken("xielu", without_beta)),
    engine("one-layer-only", "qwen3", "only the last layer has another activation", "activation",
           "L2.activation", upstream=(29,), backend=lambda: broken("activate", only_third())),
    engine("internlm3-gelu", "internlm3", "gelu for silu", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("starcoder2-erf", "starcoder2", "gelu with erf for tanh", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("jais2-relu", "jais2", "relu for its square", "activation", "activation",
           hp={"activation": "relu"}),
    engine("falcon-40b-tanh", "falcon_40b", "the tanh form of gelu", "activation", "activation",
           hp={"activation": "gelu_tanh"}),
    engine("bert-causal-tanh", "bert_causal", "the tanh form of gelu", "activation", "activation",
           fine=True, hp={"activation": "gelu_tanh"}),
    engine("opt-350m-gelu", "opt_350m", "gelu for relu", "activation", "activation", fine=True,
           hp={"activation": "gelu"}),
    engine("nemotron-h-silu", "nemotron_h", "silu for the square of relu", "activation",
           "activation", hp={"activation": "silu"}),
    engine("gemma3n-whole-gate", "gemma3n", "gates are not cut", "activation", "ffn_sparsity",
           fine=True, backend=lambda: broken("gaussian_topk", lambda op, x, factor: x)),
    engine("gemma3n-sample", "gemma3n", "gates cut by the variance of a sample", "activation",
           "ffn_sparsity", fine=True, backend=lambda: broken("gaussian_topk", sampled)),
    dumped("hf-quick-gelu", "llama", "x sigmoid(1.702 x) for silu", ["activation"],
           ["activation"], everything, as_npz, FIVE,
           wrong=wrong.forwards("SiLUActivation", wrong.quick_gelu)),
    placed("act-clamped", "llama", "the activation's input clamped at 1", "activation",
           "activation", act(lambda op, x: op(np.clip(x, -1, 1))), COARSE),
    placed("act-clamped-odd", "llama", "the activation's input clamped at 0.7 from above",
           "activation", "activation", act(lambda op, x: op(np.minimum(x, 0.7))), COARSE),
    placed("act-result", "gpt2", "the activation's result clamped at 0.5, from logits alone",
           "activation", "activation", act(lambda op, x: np.minimum(op(x), 0.5)), LOGITS),
    placed("act-result-points", "phi2", "the activation's result clamped at 0.5, every point",
           "activation", "activation", act(lambda op, x: np.minimum(op(x), 0.5)), None),
    placed("act-offset", "nemotron", "0.1 added to the activation's result", "activation",
           "activation", act(lambda op, x: op(x) + np.float32(0.1)), COARSE),
    placed("act-gain", "llama", "silu of 1.3 x", "activation", "activation",
           act(lambda op, x: op(x * np.float32(1.3)) / 1.3), None),
    placed("act-up", "qwen3", "1 added to up, from logits alone", "activation", "activation",
           up(lambda b: b + 1), LOGITS),
    placed("act-up-clamped", "llama", "up clamped at 0.8", "activation", "activation",
           up(lambda b: np.clip(b, -0.8, 0.8)), COARSE),
    placed("act-product", "qwen3", "silu(gate * up), from logits alone", "activation",
           "activation", act_of_product(), LOGITS),
    placed("act-product-gelu", "gemma2", "gelu(gate * up)", "activation", "activation",
           act_of_product(), COARSE),
    placed("act-product-experts", "mixtral", "silu(gate * up) of experts, outputs of layers",
           "activation", "activation", act_of_product(), LAYERS),
    placed("act-up-points", "llama", "1 added to up, gate and up recorded", "activation",
           "activation", up(lambda b: b + 1), frozenset({"ffn_gate", "ffn_up", "ffn_out"})),
    placed("act-oss", "gpt_oss", "up without its 1", "activation", "activation",
           broken_here(swiglu_oai=without_one), COARSE),
    encoder("tanh"),
    encoder("jina"),
)  # fmt: skip
