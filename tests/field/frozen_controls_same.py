"""Sides that differ and are right: equivalences, roundings, captures, derived models.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field import equal
from tests.field.captures import in_other_precision, last_rows, without_residual
from tests.field.foreign import dump, layers_only
from tests.field.hf import edited
from tests.field.row import Row, control

ROWS: tuple[Row, ...] = (
    control("awq-scales-in-norms", "llama", "norms divided, the products behind them multiplied",
            edited("llama", "awq-scales-in-norms", equal.folded_into_norms()),
            ("scales_folded", "norm_folded", "rounding"), verdicts=("same", "precision"),
            thread="https://github.com/mit-han-lab/smoothquant/issues/79"),
    control("smoothed-values", "llama",
            "value rows divided, the output product's columns multiplied",
            edited("llama", "smoothed-values", equal.values_smoothed(), num_attention_heads=5,
                   num_key_value_heads=5, head_dim=10, hidden_size=60),
            ("scales_folded", "rounding"), verdicts=("same", "precision"),
            thread="https://github.com/vllm-project/llm-compressor/issues/2296"),
    control("padded-vocabulary", "llama", "embedding and head padded to a multiple of 64",
            edited("llama", "padded-vocabulary", equal.vocabulary_padded(31),
                   config={"vocab_size": 128}),
            ("padded_vocabulary",), verdicts=("same",),
            thread="https://github.com/NVIDIA/DeepLearningExamples/issues/1275"),
    control("head-stored-twice", "qwen2", "a tied model whose head is stored as well",
            edited("qwen2", "head-stored-twice", lambda state: state.update({
                "lm_head.weight": state["model.embed_tokens.weight"].clone()}), tied=True),
            ("extra_tensor", "tied_embedding"), verdicts="same",
            thread="https://github.com/ml-explore/mlx-lm/pull/1298"),
    control("frequencies-stored", "llama", "inverse frequencies kept by an old writer",
            edited("llama", "frequencies-stored", equal.frequencies_stored),
            ("extra_tensor",), verdicts="same",
            thread="https://github.com/vllm-project/vllm/pull/3344"),
    control("template-with-inner-blanks", "demo", "blanks inside the template's tags: same output",
            edited("demo", "template-with-inner-blanks", dtype="bfloat16", files={
                "chat_template.jinja": lambda text: text.replace(" in messages %}",
                "  in  messages %}")
                .replace("{{ '", "{{  '")}),
            (), verdicts="same"),
    control("engine-f16", "qwen3", "transformers in float16", dump("qwen3", "engine-f16",
            dtype="float16", weights="float16"), ("rounding",), verdicts="precision"),
    control("engine-bf16-coarse", "qwen2", "bfloat16, layer outputs only", dump(
            "qwen2", "engine-bf16-coarse", dtype="bfloat16", weights="bfloat16", keep=layers_only),
            ("rounding",), verdicts="precision", coarse=True),
    control("engine-tf32", "llama", "products of ten-bit mantissas, sums in float32",
            in_other_precision("llama", "engine-tf32", 10), ("rounding",), verdicts="precision",
            thread="https://github.com/pytorch/pytorch/issues/163588"),
    control("layers-without-residual", "llama", "what a layer adds recorded as its output",
            without_residual("llama", "layers-without-residual"), ("capture_point", "rounding"),
            verdicts=("same", "precision"),
            thread="https://github.com/warpfront/hipfire/issues/258"),
    control("last-rows-only", "qwen3", "the last three rows of every module",
            last_rows("qwen3", "last-rows-only", 3), ("capture_rows", "rounding"),
            verdicts=("same", "precision")),
)  # fmt: skip
