"""Tiny configurations of the texts of models that see, of falcon's forms, of causal berts."""

from tests.arch.tiny_sizes import FALCON, MOE, UNGROUPED, YARN, Tiny

SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 0]}
}  # of heads with two pairs
SEEING: tuple[Tiny, ...] = (
    Tiny("qwen2_vl", "qwen2_vl_text", "plain", SECTIONS),
    Tiny("qwen2_vl", "qwen2_vl_text", "window", {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
        "tie_word_embeddings": True, "rope_parameters": {
            **YARN, "mrope_section": [0, 1, 1],
    }}),
    Tiny("qwen2_5_vl", "qwen2_5_vl_text", "plain", SECTIONS),
    Tiny("qwen3_vl", "qwen3_vl_text", "plain", {"head_dim": 10}),
    Tiny("qwen3_vl", "qwen3_vl_text", "sections", {
        "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [3, 1, 1],
            "mrope_interleaved": True,
    }}),
    Tiny("qwen3_vl_moe", "qwen3_vl_moe_text", "plain", {
        **MOE, "head_dim": 10, "tie_word_embeddings": False,
    }),
    Tiny("qwen3_vl_moe", "qwen3_vl_moe_text", "mixed", {
        **MOE, "head_dim": 10, "mlp_only_layers": [0, 2], "attention_bias": True,
    }),
)  # fmt: skip
_GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40}
FALCONS: tuple[Tiny, ...] = (
    Tiny("falcon", "falcon", "plain", {"ffn_hidden_size": 40}, FALCON),
    Tiny("falcon", "falcon", "heads", {
        "multi_query": False, "bias": True, "tie_word_embeddings": False,
    }, FALCON),
    Tiny("falcon", "falcon", "serial", {"parallel_attn": False, "ffn_hidden_size": 40}, FALCON),
    Tiny("falcon_40b", "falcon", "plain", _GROUPS, FALCON),
    Tiny("falcon_rw", "falcon", "plain", {
        "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    }, FALCON),
    Tiny("falcon_rw", "falcon", "groups", {
        **_GROUPS, "alibi": True, "num_ln_in_parallel_attn": 1,
    }, FALCON),
    Tiny("falcon_rw_40b", "falcon", "plain", {**_GROUPS, "alibi": True}, FALCON),
)  # fmt: skip
_DECODER = {"is_decoder": True, "type_vocab_size": 3}
BERTS: tuple[Tiny, ...] = (
    Tiny("bert_causal", "bert", "plain", _DECODER, UNGROUPED),
    Tiny("roberta_causal", "roberta", "plain", {**_DECODER, "max_position_embeddings": 130},
        UNGROUPED),
)  # fmt: skip
