"""Values of the tiny berts of tests/models.py that look back only."""

from collections.abc import Mapping
from typing import Any

from tests.model_values import EPS, VOCAB

_VALUES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "layer_norm_eps": EPS,
    "type_vocab_size": 3,
    "is_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert_causal": ("Bert", {**_VALUES, "max_position_embeddings": 64, "pad_token_id": 0}),
    "roberta_causal": ("Roberta", {**_VALUES, "max_position_embeddings": 65, "pad_token_id": 0}),
}
