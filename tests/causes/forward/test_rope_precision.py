"""Rope's angles made in a 16-bit type are the cause, by transformers' own pass with such angles.

Seen red: "no cause of the table fits" of positions cast to bfloat16 (transformers#25681), with a
product behind them named as possibly wrong.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
transformers: Any = pytest.importorskip(
    "transformers", reason="NOT-RUN: transformers is not installed"
)
TOKENS = 400  # bfloat16 has no odd number above 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 in float32, saved by transformers."""
    folder = tmp_path_factory.mktemp("rope") / "model"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def dumped(folder: Path, path: Path, angles: Any = None) -> Path:
    """Run transformers' model with `angles(inv_freq, positions)` -> (cos, sin), and dump it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if angles is not None:
        rotary = model.model.rotary_emb

        def forward(x: Any, position_ids: Any, *more: Any, **rest: Any) -> Any:
            half = angles(rotary.inv_freq, position_ids[:, :, None])
            return tuple(torch.cat((part, part), -1).to(x.dtype) for part in half)

        rotary.forward = forward
    found = {}

    def keep(name: str) -> Any:
        def hook(module: Any, given: Any, made: Any) -> None:
            first = made[0] if isinstance(made, tuple) else made
            found[name] = first[0].float().numpy()

        return hook

    ends = ("_proj", "layernorm", "norm", "self_attn", "mlp", "embed_tokens", "lm_head")
    for name, module in model.named_modules():
        if name.endswith(ends):
            module.register_forward_hook(keep(name))
    ids = np.random.default_rng(5).integers(0, 512, TOKENS)
    with torch.no_grad():
        model(torch.from_numpy(ids)[None])
    np.savez(path, input_ids=ids, **found)
    return path


def in_type(kind: str, *rounded: str) -> Any:
    """Return angles whose `rounded` parts are torch tensors of a type."""
    low = getattr(torch, kind)

    def made(inv_freq: Any, positions: Any) -> Any:
        where, turn = positions.float(), inv_freq.float()
        if "positions" in rounded:
            where = where.to(low).float()
        if "frequencies" in rounded:
            turn = turn.to(low).float()
        product = where * turn
        if "angles" in rounded:
            product = product.to(low).float()
        pair = product.cos(), product.sin()
        return [part.to(low).float() for part in pair] if "cosines" in rounded else pair

    return made


CASES = {
    "bfloat16 all": ("bfloat16", "positions", "frequencies", "angles", "cosines"),
    "bfloat16 angles": ("bfloat16", "angles"),
    "bfloat16 frequencies": ("bfloat16", "frequencies"),
    "bfloat16 positions": ("bfloat16", "positions"),
    "float16 angles": ("float16", "angles"),
}


@pytest.mark.parametrize("name", CASES)
def test_angles_in_a_type_of_few_bits(name: str, model: Path, tmp_path: Path) -> None:
    kind, *rounded = CASES[name]
    right = dumped(model, tmp_path / "a.npz")
    wrong = dumped(model, tmp_path / "b.npz", in_type(kind, *rounded))
    said = aprfmt("diagnose", right, wrong, "--model", model, "--json").json
    cause = said["causes"][0]
    assert (said["verdict"], cause["cause"]) == ("bug", "rope_precision"), cause
    assert cause["level"] == "confirmed" and f"made in {kind}" in cause["says"]
    assert all(part in cause["says"] for part in rounded)


def test_other_faults_of_rope_and_right_angles_are_not_that(model: Path, tmp_path: Path) -> None:
    right = dumped(model, tmp_path / "a.npz")
    base = dumped(model, tmp_path / "b.npz", lambda f, p: ((p * f**1.1).cos(), (p * f**1.1).sin()))
    same = dumped(model, tmp_path / "c.npz", in_type("float32"))
    said = aprfmt("diagnose", right, base, "--model", model, "--json").json
    assert said["verdict"] == "bug" and said["causes"][0]["cause"] != "rope_precision"
    assert aprfmt("diagnose", right, same, "--model", model).code == 0
