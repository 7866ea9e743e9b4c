"""Values of the tiny falcons of tests/models.py: its four architectures and their forms."""

from collections.abc import Mapping
from typing import Any

from tests.model_values import EPS, VOCAB

FALCON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "layer_norm_epsilon": EPS,
    "ffn_hidden_size": 72,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
# Falcon's groups of heads behind one norm.
ONE_NORM: dict[str, Any] = {
    "new_decoder_architecture": True,
    "num_ln_in_parallel_attn": 1,
    "parallel_attn": True,
}
FALCONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "falcon": ("Falcon", FALCON),
    "falcon_40b": ("Falcon", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon_rw": (
        "Falcon",
        FALCON
        | {
            "num_attention_heads": 6,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "falcon_rw_40b": (
        "Falcon",
        FALCON
        | {
            "num_attention_heads": 6,
            "num_kv_heads": 3,
            "alibi": True,
            "new_decoder_architecture": True,
        },
    ),
}
FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "falcon-heads": ("falcon", {"multi_query": False, "bias": True}),
    "falcon-11b": ("falcon", ONE_NORM | {"num_kv_heads": 2}),
    "falcon-serial": ("falcon", {"parallel_attn": False}),
    "falcon_rw-parallel": ("falcon_rw", {"parallel_attn": True, "multi_query": True}),
    "falcon_rw-groups-parallel": ("falcon_rw", ONE_NORM | {"num_kv_heads": 3, "bias": False}),
}
