"""T5's encoders, as diffusers' pipelines hold them, pass without a warning on what is usual there.

Seen red: the standard deviation of the embedding, which transformers begins with 1, and a key on a
head that an encoder has not.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from tests.cli.run import aprfmt

SIZES = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "t5": (T5Config, T5EncoderModel, {}),
    "t5-gated": (T5Config, T5EncoderModel, {"feed_forward_proj": "gated-gelu"}),
    "t5-untied": (T5Config, T5EncoderModel, {"tie_word_embeddings": False}),
    "umt5": (UMT5Config, UMT5EncoderModel, {}),
}


@pytest.mark.parametrize("case", KINDS)
def test_an_honest_encoder_is_not_warned_of(case: str, tmp_path: Path) -> None:
    config, model, more = KINDS[case]
    torch.manual_seed(0)
    model(config(**SIZES | more)).save_pretrained(tmp_path)
    said = aprfmt("validate", tmp_path)
    assert said.code == 0
    assert "standard deviation" not in said.out and "tie_word_embeddings" not in said.out
