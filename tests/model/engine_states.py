"""State dicts as vLLM, SGLang and Megatron Core hold them: joined, stacked, divided, padded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
STACKS = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",)}
COLUMNS = ("o_proj", "down_proj")
TABLES = ("embed_tokens", "lm_head")
PADDED = 64  # rows of a vocabulary are padded to a multiple of it

State = dict[str, Any]


def published(folder: Path) -> State:
    """Return the tensors of a folder."""
    from safetensors.torch import load_file

    found: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def of_rank(given: Mapping[str, Any], rank: int, ranks: int, head: int, experts: bool) -> State:
    """Return what one of `ranks` holds; `experts`: whole experts of its own, not shares of all."""
    import torch

    made: State = {}

    def rows(tensor: Any, least: int = 1) -> Any:
        """A rank's rows; a head that several ranks share is whole on each."""
        size = tensor.shape[0]
        if size // ranks >= least:
            return tensor.chunk(ranks, 0)[rank]
        return tensor.split(least, 0)[rank // (ranks * least // size)]

    for name, tensor in given.items():
        base, _, leaf = name.rpartition(".")
        above, _, module = base.rpartition(".")
        joined = next((key for key, parts in JOINED.items() if module in parts), "")
        if ".experts." in name:
            before, _, number = above.rpartition(".")
            stack = next(key for key, parts in STACKS.items() if module in parts)
            count = 1 + max(
                int(key.split(".experts.")[1].split(".")[0])
                for key in given
                if key.startswith(f"{before}.")
            )
            if int(number) or module == "w3":
                continue
            every = []
            for one in range(count):
                shares = [given[f"{before}.{one}.{part}.weight"] for part in STACKS[stack]]
                if not experts:
                    shares = [
                        part.chunk(ranks, 0 if stack == "w13_weight" else 1)[rank]
                        for part in shares
                    ]
                every.append(torch.cat(shares, 0))
            if experts:
                every = every[rank * count // ranks : (rank + 1) * count // ranks]
            made[f"{before}.{stack}"] = torch.stack(every)
        elif joined:
            parts = JOINED[joined]
            if module == parts[0]:
                least = head if joined == "qkv_proj" else 1
                made[f"{above}.{joined}.{leaf}"] = torch.cat(
                    [rows(given[f"{above}.{part}.{leaf}"], least) for part in parts]
                )
        elif module in COLUMNS and tensor.ndim == 2:
            made[name] = tensor.chunk(ranks, 1)[rank].clone()
        elif module in TABLES:
            behind = -tensor.shape[0] % PADDED
            whole = torch.cat([tensor, torch.zeros(behind, *tensor.shape[1:], dtype=tensor.dtype)])
            made[name] = whole.chunk(ranks, 0)[rank].clone()
        else:
            made[name] = tensor
    return made


def save(folder: Path, states: list[State]) -> Path:
    """Write one file a rank, or one file."""
    import torch

    folder.mkdir()
    for rank, state in enumerate(states):
        name = "state.pt" if len(states) == 1 else f"tp_rank_{rank}.pt"
        torch.save({key: value.clone() for key, value in state.items()}, folder / name)
    return folder / "state.pt" if len(states) == 1 else folder


def megatron_rank(
    given: Mapping[str, Any], config: Mapping[str, Any], rank: int, ranks: int, experts: bool
) -> State:
    """Return what one of Megatron Core's ranks holds of a llama, or of a qwen3_moe.

    `experts`: the ranks divide the experts, and nothing else.
    """
    import torch

    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = given["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads
    divided, at = (1, 0) if experts else (ranks, rank)
    made: State = {}

    def padded(table: Any) -> Any:
        """A rank's rows of a table with zeros behind."""
        whole = torch.zeros(-(-len(table) // (128 * divided)) * 128 * divided, table.shape[1])
        whole[: len(table)] = table
        return whole.to(table.dtype).chunk(divided)[at].clone()

    def column(one: str) -> Any:
        return given[f"{one}.weight"].chunk(divided, 0)[at]

    def row(one: str) -> Any:
        return given[f"{one}.weight"].chunk(divided, 1)[at].clone()

    made["embedding.word_embeddings.weight"] = padded(given["model.embed_tokens.weight"])
    made["output_layer.weight"] = padded(given["lm_head.weight"])
    made["decoder.final_layernorm.weight"] = given["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        a, b = f"model.layers.{layer}", f"decoder.layers.{layer}"
        q, k, v = (
            given[f"{a}.self_attn.{one}_proj.weight"].reshape(count, size, -1)
            for one, count in (("q", heads), ("k", kv), ("v", kv))
        )
        each = heads // kv
        groups = [
            torch.cat([*q[g * each : (g + 1) * each], k[g], v[g]])
            for g in range(at * kv // divided, (at + 1) * kv // divided)
        ]
        made[f"{b}.self_attention.linear_qkv.weight"] = torch.cat(groups)
        made[f"{b}.self_attention.linear_proj.weight"] = row(f"{a}.self_attn.o_proj")
        made[f"{b}.self_attention.linear_qkv._extra_state"] = torch.zeros(1)
        norm = given[f"{a}.input_layernorm.weight"]
        made[f"{b}.self_attention.linear_qkv.layer_norm_weight"] = norm
        for one in "qk":
            if f"{a}.self_attn.{one}_norm.weight" in given:
                norm = given[f"{a}.self_attn.{one}_norm.weight"]
                made[f"{b}.self_attention.{one}_layernorm.weight"] = norm
        norm = given[f"{a}.post_attention_layernorm.weight"]
        if f"{a}.mlp.gate.weight" not in given:
            made[f"{b}.mlp.linear_fc1.layer_norm_weight"] = norm
            parts = [column(f"{a}.mlp.{one}_proj") for one in ("gate", "up")]
            made[f"{b}.mlp.linear_fc1.weight"] = torch.cat(parts)
            made[f"{b}.mlp.linear_fc2.weight"] = row(f"{a}.mlp.down_proj")
            continue
        made[f"{b}.pre_mlp_layernorm.weight"] = norm
        made[f"{b}.mlp.router.weight"] = given[f"{a}.mlp.gate.weight"]
        total = sum(name.startswith(f"{a}.mlp.experts.") for name in given) // 3
        count = total // (ranks if experts else 1)
        for local in range(count):
            one = f"{a}.mlp.experts.{local + (rank * count if experts else 0)}"
            parts = [column(f"{one}.{name}_proj") for name in ("gate", "up")]
            made[f"{b}.mlp.experts.linear_fc1.weight{local}"] = torch.cat(parts)
            made[f"{b}.mlp.experts.linear_fc2.weight{local}"] = row(f"{one}.down_proj")
    return made


def pipeline_stage(state: State, stage: int, stages: int, layers: int) -> State:
    """Return a stage's part of a rank's tensors, its layers numbered from 0."""
    each, made = layers // stages, {}
    for name, tensor in state.items():
        if ".layers." not in name:
            last = "output" in name or "final" in name
            if stage == (stages - 1 if last else 0):
                made[name] = tensor
            continue
        before, _, rest = name.partition(".layers.")
        number, _, tail = rest.partition(".")
        if int(number) // each == stage:
            made[f"{before}.layers.{int(number) % each}.{tail}"] = tensor
    return made


# Parts of deepseek_v4's names, as SGLang 0.5.23's deepseek_v4.py and its modules call them.
_RENAMED = (
    (".attn.norm.", ".attn.kv_norm."), (".attn.", ".self_attn."), (".ffn.", ".mlp."),
    (".attn_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
    (".gate.tid2eid", ".topk.tid2eid"), (".gate.bias", ".gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
    (".hc_head.hc_", ".hc_head_"), ("model.language_model.", "model."),
)  # fmt: skip
_PAIRS = {
    "gate_proj": ("gate_up_proj", "up_proj"),
    "wq_a": ("wqkv_a", "wkv"),
    "compressor.wkv": ("compressor.wkv_gate", "compressor.wgate"),
}
UNLOADED = 7.0  # what stands in rows that SGLang loads nothing into


def sglang(given: Mapping[str, Any], kv_rows: Mapping[int, int] | None = None) -> State:
    """Return one rank's state by SGLang's rules for gemma3n, gemma4 and deepseek_v4.

    `kv_rows` are the rows of keys in layers that have none of their own: `qkv_proj` has room for
    them, and there is a norm that nothing was loaded into.
    """
    import torch

    held: State = {}
    for name, tensor in given.items():
        name = f"lm_{name}" if name.startswith("head.") else name
        for old, new in _RENAMED:
            name = name.replace(old, new)
        held[name] = tensor
    made: State = {}
    stacks: dict[str, list[Any]] = {}
    for name, tensor in held.items():
        base = name.removesuffix(".weight")
        module = next((one for one in _PAIRS if base.endswith(f".{one}")), "")
        partner = base.removesuffix(module) + _PAIRS[module][1] + ".weight" if module else ""
        if ".experts." in name:
            above = name.partition(".experts.")[0] + ".experts."
            if base.endswith(".gate_proj"):
                stacks.setdefault(f"{above}w13_weight", []).append(
                    torch.cat([tensor, held[partner]])
                )
            elif base.endswith(".down_proj"):
                stacks.setdefault(f"{above}w2_weight", []).append(tensor)
        elif partner in held:
            made[base.removesuffix(module) + _PAIRS[module][0] + ".weight"] = torch.cat(
                [tensor, held[partner]]
            )
        elif base.endswith(".q_proj"):
            above = base.removesuffix("q_proj")
            key = held.get(f"{above}k_proj.weight")
            if key is None:
                rows = (kv_rows or {})[int(name.split("layers.")[1].split(".")[0])]
                key = torch.full((rows, tensor.shape[1]), UNLOADED)
                made[f"{above}k_norm.weight"] = torch.ones(rows)
            value: Any = held.get(f"{above}v_proj.weight", key)
            made[f"{above}qkv_proj.weight"] = torch.cat([tensor, key, value])
        elif name.endswith(".ape") and tensor.shape[1] == 2 * _norm_of(held, name):
            left, right = torch.chunk(tensor, 2, -1)
            made[name] = torch.cat([left, right], 0).view(tensor.shape)
        elif not base.endswith((".k_proj", ".v_proj", ".up_proj", ".wkv", ".wgate")):
            made[name] = tensor
    return made | {name: torch.stack(parts) for name, parts in stacks.items()}


def _norm_of(held: Mapping[str, Any], name: str) -> int:
    return int(held[name.replace(".ape", ".norm.weight")].shape[0])
