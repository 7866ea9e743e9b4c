"""Dumps as engines write them: a model's own values under their modules, by rank and by pass.

The formats are those of SGLang's hook and dumper and of vLLM's dump by rank (their sources stand in
aprfmt.base.dump_names). Values are cut as tensor, sequence, context, expert, data and
pipeline parallelism cut them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
Arrays = Mapping[str, Array]
Pair = tuple[Array, Array]


def modules(own: Arrays, layers: int = 3) -> dict[str, Any]:
    """Return what vLLM's modules of a dense or a mixtral block put out, in order of execution."""
    flat = {
        key: np.asarray(value).reshape(len(value), -1)
        for key, value in own.items()
        if key.rpartition(".")[2] not in ("scores", "probs")
    }
    found: dict[str, Any] = {"model.embed_tokens": flat["embd"]}
    for n in range(layers):
        at, name = f"L{n}.", f"model.layers.{n}"
        norm = flat[at + "attn_norm"]
        found[f"{name}.input_layernorm"] = (norm, flat[f"L{n - 1}.out"]) if n else norm
        qkv = [flat[at + part] for part in ("q", "k", "v")]
        found[f"{name}.self_attn.qkv_proj"] = tuple(qkv)
        found[f"{name}.self_attn.attn"] = flat[at + "attn"]
        found[f"{name}.self_attn.o_proj"] = flat[at + "attn_out"]
        found[f"{name}.post_attention_layernorm"] = flat[at + "ffn_norm"], flat[at + "mid"]
        if at + "router" in flat:
            found[f"{name}.block_sparse_moe.gate"] = flat[at + "router"]
            found[f"{name}.block_sparse_moe.experts"] = out = flat[at + "moe_out"]
        else:
            found[f"{name}.mlp.gate_up_proj"] = flat[at + "ffn_gate"], flat[at + "ffn_up"]
            found[f"{name}.mlp.act_fn"] = flat[at + "ffn_mul"]
            found[f"{name}.mlp.down_proj"] = out = flat[at + "ffn_out"]
        found[name] = out, flat[at + "mid"]
    found["model.norm"] = flat["final_norm"], flat[f"L{layers - 1}.out"]
    found["logits_processor"] = flat["logits"]
    return found


FUSED = ("qkv_proj", "gate_up_proj")  # their tuple is one tensor, parts side by side
COLUMNS = (*FUSED, "self_attn.attn", "act_fn")


def columns(name: str, value: Any, rank: int, ranks: int, head: int = 16) -> Any:
    """Return a rank's columns of a column-parallel result; another value as it is."""
    if not name.endswith(COLUMNS):
        return value
    parts = value if isinstance(value, tuple) else (value,)
    made = []
    for number, part in enumerate(parts):
        width = part.shape[1] // ranks
        if name.endswith("qkv_proj") and number and width < head:
            copies = head // width  # ranks that share a key head
            made.append(np.split(part, part.shape[1] // head, 1)[rank // copies])
        else:
            made.append(np.split(part, ranks, 1)[rank])
    return np.concatenate(made, 1)


def rows(value: Any, chosen: Any) -> Any:
    """Return rows of a result, or of both parts of (hidden, residual)."""
    if isinstance(value, tuple):
        return tuple(part[list(chosen)] for part in value)
    return value[list(chosen)]


def state(
    found: Mapping[str, Any], change: Callable[[str, Any], Any] | None = None
) -> dict[str, Any]:
    """Return a dict that torch.save can write: tensors, and lists of them for tuples."""
    import torch

    made: dict[str, Any] = {}
    for name, value in found.items():
        value = value if change is None else change(name, value)
        if value is None:
            continue
        if isinstance(value, tuple) and name.endswith(FUSED):
            value = np.concatenate(value, 1)
        made[name] = (
            [torch.tensor(np.array(part)) for part in value]
            if isinstance(value, tuple)
            else torch.tensor(np.array(value))
        )
    return made


def batch(ids: Sequence[int], positions: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """Return what SGLang's hook writes of a ForwardBatch."""
    import torch

    name = "model.forward_batch_info"
    return {
        f"{name}.input_ids": torch.tensor(list(ids)),
        f"{name}.seq_lens": torch.tensor(list(lengths)),
        f"{name}.positions": torch.tensor(list(positions)),
    }


def hook_passes(folder: Path, passes: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]) -> Path:
    """Write passes as SGLang's hook does: what follows the inner model is in the next file.

    A pass is (batch, modules). The last one's logits are written by one more, empty pass.
    """
    import torch

    folder.mkdir(parents=True)
    late: dict[str, Any] = {}
    for number, (said, found) in enumerate([*passes, ({}, {})]):
        inner = {name: value for name, value in found.items() if name.startswith("model.")}
        if not found and not late:
            continue
        torch.save({**late, **inner, **said}, folder / f"Pass{number:05d}.pt")
        late = {name: value for name, value in found.items() if not name.startswith("model.")}
    return folder


def dumper(
    folder: Path,
    step: int,
    rank: int,
    found: Mapping[str, Any],
    dims: Mapping[str, str],
    parallel: Mapping[str, int],
) -> None:
    """Write a pass as SGLang's dumper does: one file a tensor, its dims and ranks inside."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, value) in enumerate(found.items()):
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        own = name.split(".", 3)[3] if layer and name.count(".") > 2 else name
        tags: dict[str, Any] = {
            "step": step,
            "rank": rank,
            "dump_index": index,
            "name": own,
            "recompute_status": "disabled",
        }
        if layer is not None and own != name:
            tags["layer_id"] = int(layer)
        meta = {**tags, "sglang_parallel_info": dict(parallel)}
        if name in dims:
            meta["dims"] = dims[name]
        file = "___".join(f"{key}={tag}" for key, tag in tags.items()) + ".pt"
        torch.save({"value": value, "meta": meta}, folder / file)
