"""A decoder that embeds: the last token's row, behind an end token that its tokenizer adds.

Judged by transformers as the model's card runs it: texts padded on the left, the last column taken,
lengths made one. Seen red: the end token not stated in a GGUF, the first row taken for the last.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.drawn import fill
from tests.inference.encoders import write_pooling
from tests.inference.judge import backend, rel

QUERY = "Instruct: Given a question, find its answer\nQuery:What wakes before the sun?"
TEXTS = (QUERY, "A harbour town wakes before the sun.", "The compiler rejects a pointer.")
END, PAD, VOCAB = 256, 257, 258


def tokenizer(folder: Path) -> Any:
    """Save a tokenizer of bytes that ends every text, and pads on the left."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    end, alphabet = "<|endoftext|>", sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([end, "<|pad|>"])
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)]),
        ]
    )
    auto: Any = transformers
    fast: Any = auto.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, pad_token="<|pad|>", padding_side="left"
    )
    fast.save_pretrained(folder)
    return fast


@cache
def embedder(folder: Path) -> np.ndarray:
    """Save a tiny Qwen3 embedding model; return transformers' unit vectors of the texts."""
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=96,
        rms_norm_eps=3e-4,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model: Any = transformers.Qwen3Model(config)
    fill(model, 2)
    model.eval().save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(saved | {"architectures": ["Qwen3ForCausalLM"]})  # as it is published
    )
    write_pooling(folder, "last")
    batch = tokenizer(folder)(list(TEXTS), padding=True, return_tensors="pt")
    assert batch["attention_mask"][2, 0] == 0 and (batch["input_ids"][:, -1] == END).all()
    with torch.no_grad():
        rows = model(**{key: batch[key] for key in ("input_ids", "attention_mask")})
    last: np.ndarray = rows.last_hidden_state[:, -1].numpy()
    unit: np.ndarray = last / np.linalg.norm(last, axis=1, keepdims=True)
    return unit


@pytest.mark.parametrize("run", ["numpy:float32", "torch:float32"])
@pytest.mark.parametrize("form", ["folder", "apr", "gguf"])
def test_a_decoders_embeddings_are_those_of_its_card(
    form: str, run: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "qwen3-embedding"
    expected = embedder(folder)
    path = folder
    if form != "folder":
        path = folder.parent / f"{run.partition(':')[0]}.{form}"
        aprfmt.convert(folder, path)
    with open_model(path) as model, Session.open(model, backend(run)) as session:
        assert model.resolution.unbound == ()
        given = [model.tokenizer.encode(text) for text in TEXTS]
        found = np.stack([session.embedding(ids)[0] for ids in given])
    assert [ids[-1] for ids in given] == [END] * 3 and len({len(ids) for ids in given}) == 3
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    assert rel(found, expected) < 5e-6
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=2e-6)
