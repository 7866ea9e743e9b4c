"""The text of models that also see, by their whole folders: transformers' logits.

Seen red: mistral3's head taken for missing, because its text's configuration says it is not tied
and the whole model's, which transformers goes by, that it is.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.drawn import fill
from tests.inference.judge import backend, everything_float64, rel
from tests.model_values import YARN
from tests.models import IDS

_TEXT = {
    "vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 72, "max_position_embeddings": 64,
    "rms_norm_eps": 3e-4, "head_dim": 16,
}  # fmt: skip
_SEES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_PIXTRAL = {**_SEES, "model_type": "pixtral"}
# name -> (model type, configuration, our architecture)
CASES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "mistral3": ("mistral3", {
        "vision_config": _PIXTRAL, "text_config": {
            **_TEXT, "model_type": "mistral", "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    }, "ministral3"),
    "mistral3-ministral3": ("mistral3", {
        "vision_config": _PIXTRAL, "text_config": {
            **_TEXT, "model_type": "ministral3",
            "rope_parameters": {
                **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
            },
        },
    }, "ministral3"),
    "gemma3": ("gemma3", {
        "vision_config": {**_SEES, "vision_use_head": False},
        "text_config": {**_TEXT, "sliding_window": 7},
        "image_token_index": 100, "boi_token_index": 98, "eoi_token_index": 99,
    }, "gemma3"),
}  # fmt: skip


@pytest.mark.parametrize("tied", [None, False])
@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_whole_folder_runs(name: str, tied: bool | None, tmp_path: Path) -> None:
    import transformers

    auto: Any = transformers
    kind, values, arch = CASES[name]
    whole = deepcopy(dict(values)) | ({} if tied is None else {"tie_word_embeddings": tied})
    config = auto.AutoConfig.for_model(kind, **whole)
    loader = auto.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = loader.from_config(config, attn_implementation="eager")
    fill(model, 0)
    model.save_pretrained(tmp_path)
    ids, model = torch.tensor([IDS]), model.double().eval()
    with torch.no_grad():
        model(ids)  # settles frequencies in float32
        with everything_float64(model):
            expected = model(ids).logits[0].numpy()
    with open_model(tmp_path) as opened:
        assert opened.spec.name == arch
        assert opened.resolution.report.unknown == ()
        with Session.of(opened, backend("numpy:float64")) as session:
            assert rel(session.logits(IDS), expected) < 1e-12
