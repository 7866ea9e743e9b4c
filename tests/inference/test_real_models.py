"""Real models against transformers: the demo, SmolLM2 (llama, Q4_1) and Gemma 3 (a mixture).

transformers gets the weights as gguf-py decodes them, in its own modules, so the reference uses
neither our codecs nor our layout steps nor our hyperparameters. The prompts are longer
than Gemma's window of 512.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.checks.gates.golden import TEXT
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.inference.judge import backend, rel

LONG = 530
NORMS = {"gemma3": 1.0, "llama": 0.0}  # what GGUF adds to gemma's norm weights
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
MORE = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def decoded(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, values) of a GGUF's tensors as gguf-py decodes them, rows outermost."""
    import gguf

    with open_model(path) as model:  # for places and shapes; gguf-py takes 20 s over Gemma's tokens
        for name, tensor in model.source.tensors.items():
            kind = gguf.GGMLQuantizationType[tensor.info.encoding]
            raw = np.frombuffer(bytes(tensor.raw()), np.uint8)
            values = gguf.dequantize(raw.reshape(tensor.info.shape[0], -1), kind)
            yield name, values.reshape(tensor.info.shape).astype(np.float32)


def modules(path: Path, arch: str, config: Any, kind: str) -> Any:
    """Return transformers' model with these weights."""
    import transformers

    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    model = model.to_empty(device="cpu")
    state = {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, values in decoded(path):
        *layer, base, _ = name.split(".")
        if not layer:
            state[f"{WHOLE[base]}.weight"] = torch.from_numpy(values + _added(base, arch))
            continue
        if arch == "llama" and base in heads:  # back to split halves
            rows = values.reshape(heads[base], -1, 2, values.shape[1])
            values = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)
        module = (NAMES | MORE[arch])[base]
        values = values + _added(base, arch)
        state[f"model.layers.{layer[1]}.{module}.weight"] = torch.from_numpy(values)
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # to_empty left it undefined
    if arch == "gemma3":
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    return model.eval()


def _added(base: str, arch: str) -> np.float32:
    return np.float32(-NORMS[arch] if base.endswith("norm") else 0.0)


def smollm2_model(path: Path) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    return modules(path, "llama", config, "LlamaForCausalLM")


def gemma_model(path: Path) -> Any:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
    )
    return modules(path, "gemma3", config, "Gemma3ForCausalLM")


def demo_hf(path: Path) -> Any:
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def windowed_loss(judge: Any, bos: list[int], ids: list[int], size: int) -> float:
    """Return transformers' mean loss in nats over windows that share no token, BOS in each."""
    room = size - len(bos)
    losses = []
    for at in range(0, len(ids), room):
        fed = [*bos, *ids[at : at + room]]
        logits = judge(torch.tensor([fed])).logits[0, :-1].double()
        labels = torch.tensor(fed[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    return float(torch.cat(losses).mean())


BOS = {"gemma": [2]}  # what its tokenizer puts before a text; the others' put nothing there
CASES = {"demo_model": (demo_hf, 300), "smollm2": (smollm2_model, 64), "gemma": (gemma_model, LONG)}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_losses_are_transformers(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    path = request.getfixturevalue(name)
    make, length = CASES[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    with torch.no_grad():
        judge = make(path)
        vocab = judge.config.vocab_size
        ids = [int(i) for i in np.random.default_rng(3).integers(3, vocab, length)]
        expected = judge(torch.tensor([ids]), logits_to_keep=20).logits[0].numpy()
        with open_model(path) as model:
            given = model.tokenizer.encode(TEXT, add_special=False)
        loss = windowed_loss(judge, BOS.get(name, []), given, 40)
    del judge
    done = aprfmt("eval", path, "--text", text, "--max-seq-len", 40, "--json")
    assert done.json["windows"] > 2 and done.json["loss"] == pytest.approx(loss, abs=1e-4)
    rows = range(length - 20, length)
    for run in ("numpy:float32", "torch:float32"):
        with open_model(path) as model, Session.open(model, backend(run)) as session:
            found = session.prefill(ids, rows)
            assert rel(found, expected) < 5e-6, run
            np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
