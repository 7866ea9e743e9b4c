"""Edits that leave the function as it is: other weights or other spellings of the same model."""

from collections.abc import Callable, Sequence
from typing import Any

from tests.field.edits import Edit, rows
from tests.field.hf import State, on


def neurons_reordered(seed: int = 2) -> Edit:
    """Return an edit of gate, up and down alike: the same function."""

    def run(state: State) -> None:
        import torch

        for name in [name for name in state if name.endswith("mlp.gate_proj.weight")]:
            head = name.removesuffix("gate_proj.weight")
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(state[name]), generator=generator)
            for part in ("gate", "up"):
                for kind in ("weight", "bias"):
                    if f"{head}{part}_proj.{kind}" in state:
                        key = f"{head}{part}_proj.{kind}"
                        state[key] = state[key][order]
            state[f"{head}down_proj.weight"] = state[f"{head}down_proj.weight"][:, order]

    return run


def heads_reordered(heads: Sequence[int], kv_heads: Sequence[int]) -> Edit:
    """Return an edit of q, k, v and the output product alike: the same function."""

    def run(state: State) -> None:
        for part, order in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            on(f"self_attn.{part}_proj.weight", rows(order))(state)
            if any(name.endswith(f"{part}_proj.bias") for name in state):
                on(f"self_attn.{part}_proj.bias", rows(order))(state)
        on("self_attn.o_proj.weight", lambda x: rows(heads)(x.T.contiguous()).T)(state)

    return run


def folded_into_norms(seed: int = 4) -> Edit:
    """Divide norms by scales and multiply the products behind them, as AWQ does."""

    def run(state: State) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        readers = {
            "input_layernorm": [f"self_attn.{p}_proj" for p in "qkv"],
            "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
        }
        for name in sorted(state):
            for norm, products in readers.items():
                if name.endswith(f"{norm}.weight"):
                    scale = torch.rand(len(state[name]), generator=generator) + 0.5
                    state[name] = state[name] / scale
                    for product in products:
                        key = name.replace(f"{norm}.weight", f"{product}.weight")
                        state[key] = state[key] * scale

    return run


def norms_folded_away(state: State) -> None:
    """Multiply every product by the norm before it, and leave ones in the norm."""
    readers = {
        "input_layernorm": [f"self_attn.{p}_proj" for p in "qkv"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    }
    for name in list(state):
        for norm, products in readers.items():
            if name.endswith(f"{norm}.weight"):
                for product in products:
                    key = name.replace(f"{norm}.weight", f"{product}.weight")
                    state[key] = state[key] * state[name]
                state[name] = state[name] * 0 + 1


def values_smoothed(seed: int = 6) -> Edit:
    """Divide value rows by scales and multiply the output product's columns (no groups)."""

    def run(state: State) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        for name in sorted(state):
            if name.endswith("v_proj.weight"):
                scale = torch.rand(len(state[name]), generator=generator) + 0.5
                key = name.replace("v_proj", "o_proj")
                state[name] = state[name] / scale[:, None]
                state[key] = state[key] * scale

    return run


def vocabulary_padded(count: int) -> Edit:
    """Add rows to the embedding and the head that no token reaches."""

    def run(state: State) -> None:
        import torch

        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in state:
                more = torch.zeros(count, state[name].shape[1], dtype=state[name].dtype)
                state[name] = torch.cat([state[name], more])

    return run


def frequencies_stored(state: State) -> None:
    """Store inverse frequencies beside the weights, as old writers did."""
    import torch

    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        state[name] = 5000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float32) / 16)


def old_rope_spelling(config: dict[str, Any]) -> None:
    """Write the rope's keys as they were before `rope_parameters`."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope


def template_in_config() -> dict[str, Callable[[str], str | None]]:
    """Return edits of files that move the chat template into tokenizer_config.json."""
    import json

    from tests.diagnosis.faults import DEMO

    text = (DEMO / "chat_template.jinja").read_text()

    def change(config: str) -> str:
        return json.dumps(json.loads(config) | {"chat_template": text})

    return {"chat_template.jinja": lambda old: None, "tokenizer_config.json": change}


def defaults_left_out(config: dict[str, Any]) -> None:
    """Leave out keys that repeat what the family has by default."""
    for key in ("attention_bias", "attention_dropout", "initializer_range", "use_cache"):
        config.pop(key, None)
