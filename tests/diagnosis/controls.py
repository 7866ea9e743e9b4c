"""Pairs with nothing wrong, or with nothing to compare."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.diagnosis import files
from tests.diagnosis.engines import COARSE, stats_only, tiny_folder, trace
from tests.diagnosis.fault import Fault, Pair
from tests.diagnosis.making import DEMO
from tests.models import IDS


def runs(base: str, *names: str) -> Callable[[], Pair]:
    """Return a maker of runs of one model; "" is the model itself."""

    def make() -> Pair:
        folder = DEMO if base == "demo" else tiny_folder(base)
        a, b = (f"{folder}@{name}" if name else folder for name in names)
        return a, b

    return make


def converted(name: str, **options: Any) -> Callable[[], Pair]:
    """Return a maker of the demo model and a copy in another container or encoding."""
    return lambda: (DEMO, files.converted(DEMO, name, **options))


def quantized(name: str, scheme: str) -> Callable[[], Pair]:
    return lambda: (DEMO, files.quantized(DEMO, name, scheme))


def two_traces(first: Mapping[str, Any], second: Mapping[str, Any]) -> Callable[[], Pair]:
    """Return a maker of two traces of one model."""

    def make() -> Pair:
        folder = tiny_folder("llama")
        tag = "-".join(map(str, (*first, *second)))
        return trace(folder, f"pair-a-{tag}", **first), trace(folder, f"pair-b-{tag}", **second)

    return make


def finer_weights() -> Pair:
    """A trace of the float model against its Q8_0 copy."""
    return files.quantized(DEMO, "demo-q8.gguf", "Q8_0"), trace(DEMO, "finer", points=COARSE)


def zero_trace() -> Pair:
    """A model, and a trace of it whose buffers were never filled."""
    folder = tiny_folder("llama")
    return folder, trace(
        folder,
        "zeros",
        points=COARSE,
        rename=lambda values: {key: np.zeros_like(value) for key, value in values.items()},
    )


ROUNDING, QUANTISED = ("rounding",), ("quantisation",)
PAIRS: tuple[Fault, ...] = (
    Fault("gguf-copy", "demo", "as GGUF", converted("demo.gguf"), (), verdict="same"),
    Fault("apr-copy", "demo", "as APR", converted("demo.apr"), (), verdict="same"),
    Fault("shards", "demo", "in shards", converted("shards", to="safetensors",
          max_shard_size=1 << 20), (), verdict="same"),
    Fault("f16-copy", "demo", "as F16", converted("demo-f16.gguf", encoding="F16"), ROUNDING,
          verdict="precision"),
    Fault("q8-copy", "demo", "as Q8_0", quantized("demo-q8.gguf", "Q8_0"), QUANTISED,
          ("L0.attn_q.weight",), "precision"),
    Fault("q4k-copy", "demo", "as Q4_K_M", quantized("demo-q4k.gguf", "Q4_K_M"), QUANTISED,
          (), "precision"),
    Fault("torch", "demo", "torch in float32", runs("demo", "", "torch:cpu:float32"), ROUNDING,
          verdict="precision"),
    Fault("torch-bf16", "demo", "torch in bfloat16", runs("demo", "", "torch:cpu:bfloat16"),
          ROUNDING, verdict="precision"),
    Fault("float64-arbiter", "gemma3", "bfloat16 against float64",
          runs("gemma3", "torch:cpu:bfloat16", "numpy:float64"), ROUNDING,
          verdict="precision", upstream=(28,)),
    Fault("experts-bf16", "mixtral", "a mixture of experts in bfloat16",
          runs("mixtral", "", "torch:cpu:bfloat16"), ROUNDING, verdict="precision"),
    Fault("latent-bf16", "deepseek_v3", "latent attention in bfloat16",
          runs("deepseek_v3", "", "torch:cpu:bfloat16"), ROUNDING, verdict="precision"),
    Fault("transformers", "gpt_oss", "transformers", runs("gpt_oss", "", "transformers"),
          ROUNDING, verdict="precision"),
    Fault("one-token", "qwen2", "one token only", runs("qwen2", "", "torch:cpu:bfloat16"),
          ROUNDING, verdict="precision", upstream=(27,), options={"ids": (3,)}),
    Fault("finer-trace", "demo", "a float trace against a Q8_0 copy", finer_weights, QUANTISED,
          (), "precision", "unconfirmed"),
    Fault("other-rows", "llama", "two traces of other rows",
          two_traces({"rows": "all"}, {"rows": (3, 7, 9)}), ("capture_rows",), ("L0.q",), "same"),
    Fault("other-ids", "llama", "two traces of other tokens",
          two_traces({}, {"ids": IDS[:-1]}), (), verdict="not_comparable", upstream=(30,)),
    Fault("no-values", "llama", "a trace of statistics only",
          lambda: (tiny_folder("llama"), stats_only(tiny_folder("llama"), "statistics")), (),
          verdict="not_comparable", upstream=(31, 32, 34)),
    Fault("zero-trace", "llama", "a trace of zeros", zero_trace, (), verdict="not_comparable",
          upstream=(31,)),
    Fault("other-checkpoint", "llama", "the same sizes, trained elsewhere",
          lambda: (tiny_folder("llama"), tiny_folder("llama", seed=5)), (),
          verdict="not_comparable", upstream=(31,)),
    Fault("other-architecture", "gemma", "another architecture",
          lambda: (tiny_folder("llama"), tiny_folder("gemma", seed=5)), (),
          verdict="not_comparable"),
    Fault("two-traces-blind", "llama", "two traces without the model", two_traces(
          {"points": None}, {"hp": {"rope_theta": 1e4}}), ("rope_theta",), ("L0.q_rope",),
          confidence="unconfirmed"),
)  # fmt: skip
