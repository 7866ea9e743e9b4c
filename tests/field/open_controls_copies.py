"""Correct copies in every encoding and container, written by other tools."""

from tests.field import packed
from tests.field.converter import converted, decoded
from tests.field.hf import saved
from tests.field.packed import encoded
from tests.field.row import Row, control

ROWS: tuple[Row, ...] = (
    control("gguf-f32", "llama", "as GGUF in F32", converted("llama", "gguf-f32",
            num_attention_heads=5, num_key_value_heads=5, head_dim=12, hidden_size=60), (),
            verdicts="same"),
    control("gguf-bf16-of-bf16", "qwen2", "as GGUF in BF16", converted("qwen2", "gguf-bf16-of-bf16",
            "BF16", weights="bfloat16", use_sliding_window=False, sliding_window=None), (),
            verdicts="same"),
    control("gguf-f16", "llama", "as GGUF in F16", converted("llama", "gguf-f16", "F16",
            num_attention_heads=6, num_key_value_heads=2, head_dim=10), ("rounding",
            "quantisation"),
            verdicts="precision"),
    control("gguf-bf16-of-f32", "qwen3", "float32 as GGUF in BF16", converted(
            "qwen3", "gguf-bf16-of-f32", "BF16"), ("rounding", "quantisation"),
            verdicts="precision"),
    control("gguf-q8_0", "llama", "Q8_0 by gguf-py", converted("llama", "gguf-q8_0", "Q8_0",
            hidden_size=96, intermediate_size=160), ("quantisation", "rounding"),
            verdicts="precision"),
    control("gguf-q4_0", "llama", "Q4_0 by gguf-py", converted("llama", "gguf-q4_0", "Q4_0",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("gguf-q4_1", "qwen3", "Q4_1 by gguf-py", converted("qwen3", "gguf-q4_1", "Q4_1",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("gguf-q5_0", "llama", "Q5_0 by gguf-py", converted("llama", "gguf-q5_0", "Q5_0",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("gguf-q5_1", "granite", "Q5_1 by gguf-py", converted("granite", "gguf-q5_1", "Q5_1",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("gguf-mxfp4", "llama", "MXFP4 by gguf-py", converted("llama", "gguf-mxfp4", "MXFP4",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("gguf-q4_k", "qwen3", "Q4_K by ggml's own code", converted("qwen3", "gguf-q4_k", "Q4_K",
            hidden_size=256, intermediate_size=256, num_hidden_layers=2),
            ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-q3_k", "qwen3", "Q3_K by ggml's own code", converted("qwen3", "gguf-q3_k", "Q3_K",
            hidden_size=256, intermediate_size=256, num_hidden_layers=2),
            ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-demo", "demo", "the trained model with its tokenizer", converted(
            "demo", "gguf-demo", "BF16"), (), verdicts="same"),
    control("gguf-demo-q8_0", "demo", "the trained model in Q8_0", converted(
            "demo", "gguf-demo-q8_0", "Q8_0"), ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-demo-q4_k", "demo", "the trained model in Q4_K", converted(
            "demo", "gguf-demo-q4_k", "Q4_K"), ("quantisation", "rounding"), verdicts="precision"),
    control("gguf-gemma-f32", "gemma", "1 added to float32 norms: their last bits go", converted(
            "gemma", "gguf-gemma-f32"), ("rounding",), verdicts=("precision", "same")),
    control("gguf-gemma2", "gemma2", "gemma2 whose scale is the derived one", converted(
            "gemma2", "gguf-gemma2", weights="bfloat16", query_pre_attn_scalar=16), ("rounding",),
            verdicts=("same", "precision")),
    control("gguf-gemma3", "gemma3", "gemma3 with two ropes and its window", converted(
            "gemma3", "gguf-gemma3", weights="bfloat16", query_pre_attn_scalar=16), ("rounding",),
            verdicts=("same", "precision")),
    control("gguf-granite", "granite", "granite with its factors", converted(
            "granite", "gguf-granite", num_attention_heads=3, num_key_value_heads=1), (),
            verdicts="same"),
    control("gguf-experts", "qwen3_moe", "experts stacked", converted(
            "qwen3_moe", "gguf-experts"), (), verdicts="same"),
    control("gguf-phi3", "phi3-plain", "joined products stay joined", converted(
            "phi3-plain", "gguf-phi3"), (), verdicts="same"),
    control("gguf-olmo2", "olmo2", "norms behind the blocks", converted("olmo2", "gguf-olmo2"), (),
            verdicts="same"),
    control("gguf-llama-3.1", "llama-llama3", "scaling as rope_freqs.weight", converted(
            "llama-llama3", "gguf-llama-3.1"), ("rope_freqs", "rounding"),
            verdicts=("same", "precision"),
            thread="https://github.com/vllm-project/vllm/issues/7268"),
    control("gguf-llama-3.1-q8_0", "llama-llama3", "the same in Q8_0", converted(
            "llama-llama3", "gguf-llama-3.1-q8_0", "Q8_0", hidden_size=64, intermediate_size=96),
            ("quantisation", "rounding"), verdicts="precision",
            thread="https://github.com/vllm-project/vllm/issues/7268"),
    control("gguf-linear", "llama-linear", "linear scaling as its keys", converted(
            "llama-linear", "gguf-linear"), (), verdicts="same"),
    control("gguf-biases", "llama-bias", "permuted biases", converted("llama-bias", "gguf-biases"),
            (), verdicts="same"),
    control("q4_0-decoded", "qwen3", "Q4_0 decoded to BF16", decoded("qwen3", "q4_0-decoded",
            "Q4_0",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("q5_1-decoded", "llama", "Q5_1 decoded to float32", decoded("llama", "q5_1-decoded",
            "Q5_1", "float32", hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("fp8-block", "llama", "FP8 in blocks, the last ones cut", encoded("fp8-block",
            "fp8-block", hidden_size=192, intermediate_size=320, num_hidden_layers=2),
            ("quantisation", "rounding"), verdicts="precision"),
    control("fp8-tensor", "qwen3", "FP8 with a scale a tensor", encoded("fp8-tensor", "fp8-tensor",
            arch="qwen3"), ("quantisation", "rounding"), verdicts="precision"),
    control("gptq", "llama", "GPTQ of the first format", encoded("gptq", "gptq", hidden_size=64,
            intermediate_size=96), ("quantisation", "rounding"), verdicts="precision"),
    control("gptq-v2", "qwen3", "GPTQ of the second format", encoded("gptq-v2", "gptq-v2",
            arch="qwen3", hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("awq-with-biases", "qwen2", "AWQ beside biases", encoded("awq", "awq-with-biases",
            arch="qwen2", hidden_size=96, intermediate_size=160), ("quantisation", "rounding"),
            verdicts="precision"),
    control("awq-decoded", "llama", "AWQ decoded to BF16", packed.decoded("awq", "awq-decoded",
            hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("mlx", "llama", "MLX affine", encoded("mlx", "mlx", hidden_size=64,
            intermediate_size=96), ("quantisation", "rounding"), verdicts="precision"),
    control("nf4", "llama", "NF4 by bitsandbytes", encoded("nf4", "nf4", hidden_size=64,
            intermediate_size=96), ("quantisation", "rounding"), verdicts="precision"),
    control("nf4-nested", "qwen3", "NF4 with nested scales", encoded("nf4-nested", "nf4-nested",
            arch="qwen3", hidden_size=64, intermediate_size=96), ("quantisation", "rounding"),
            verdicts="precision"),
    control("packed-by-library", "llama", "packed by compressed-tensors", encoded("packed",
            "packed-by-library", hidden_size=64, intermediate_size=96), ("quantisation",
            "rounding"),
            verdicts="precision"),
    control("saved-in-shards", "llama", "saved by transformers in shards", saved(
            "llama", "saved-in-shards", max_shard_size="40KB"), (), verdicts="same"),
)  # fmt: skip
