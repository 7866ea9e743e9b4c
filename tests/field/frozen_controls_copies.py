"""Correct copies in every encoding and container, written by other tools.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field.converter import converted, decoded
from tests.field.hf import edited
from tests.field.packed import encoded
from tests.field.row import Row, control

ROWS: tuple[Row, ...] = (
    control("gguf-q8_0-bf16", "gemma", "gemma's Q8_0 by gguf-py", converted("gemma",
            "gguf-q8_0-bf16",
            "Q8_0", weights="bfloat16", hidden_size=64, intermediate_size=96),
            ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-q5_k", "llama", "Q5_K by ggml's own code", converted("llama", "gguf-q5_k", "Q5_K",
            hidden_size=256, intermediate_size=256, num_hidden_layers=2),
            ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-q6_k", "llama", "Q6_K by ggml's own code", converted("llama", "gguf-q6_k", "Q6_K",
            hidden_size=256, intermediate_size=256, num_hidden_layers=2),
            ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-q2_k", "llama", "Q2_K by ggml's own code", converted("llama", "gguf-q2_k", "Q2_K",
            hidden_size=256, intermediate_size=256, num_hidden_layers=2),
            ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-iq4_nl", "llama", "IQ4_NL by ggml's own code", converted("llama", "gguf-iq4_nl",
            "IQ4_NL", hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("gguf-gemma", "gemma", "1 added to norms, exact from BF16", converted(
            "gemma", "gguf-gemma", weights="bfloat16"), ("rounding",),
            verdicts=("same", "precision")),
    control("gguf-mixtral", "mixtral", "w1, w2, w3 stacked as gate, down, up", converted(
            "mixtral", "gguf-mixtral", "F16", weights="float16"), ("rounding",),
            verdicts=("same", "precision")),
    control("q8_0-decoded", "llama", "Q8_0 decoded to BF16", decoded("llama", "q8_0-decoded",
            "Q8_0",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("q4_k-decoded", "llama", "Q4_K decoded to BF16", decoded("llama", "q4_k-decoded",
            "Q4_K",
            hidden_size=256, intermediate_size=256, num_hidden_layers=2),
            ("quantisation", "rounding"), verdicts="precision"),
    control("fp8-row", "llama", "FP8 with a scale a row", encoded("fp8-row", "fp8-row"),
            ("quantisation", "rounding"), verdicts="precision"),
    control("awq", "llama", "AWQ", encoded("awq", "awq", hidden_size=64, intermediate_size=96),
            ("quantisation", "rounding"), verdicts="precision"),
    control("saved-as-bf16", "qwen2", "loaded and saved in BF16", edited("qwen2", "saved-as-bf16",
            lambda state: {key: x.bfloat16() for key, x in state.items()},
            config={"dtype": "bfloat16"}), ("rounding", "quantisation"), verdicts="precision"),
    control("saved-as-f16", "llama", "saved in float16", edited("llama", "saved-as-f16",
            lambda state: {key: x.half() for key, x in state.items()}, config={"dtype": "float16"}),
            ("rounding", "quantisation"), verdicts="precision"),
)  # fmt: skip
