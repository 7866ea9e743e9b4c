"""State dicts as vLLM and SGLang hold them after loading: joined, stacked, divided and padded."""

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
