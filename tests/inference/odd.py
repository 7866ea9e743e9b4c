"""Tiny models of every architecture in sizes that no power of two divides.

Kernels are written for whole warps and whole pieces of 16 bytes; a model of these sizes ends its
rows anywhere, has an odd vocabulary and few experts. `odd` gives a model's file, `exact` numpy's
float64 run of it, which is the reference of every backend on the same stored weights.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import aprfmt
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.capture import key_name, parse_key
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues, Trace
from aprfmt.measure.tolerances import AMPLIFIED, logit_bound
from aprfmt.model import open_model
from tests.inference.judge import backend, rel
from tests.models import IN_GGUF, MAKERS, save_tiny

VOCAB = 131
# 27 tokens, longer than the makers' windows; the last id is the vocabulary's last row.
ODD_IDS = (*((37 * i + 82) % VOCAB for i in range(26)), VOCAB - 1)
FEW_TOKENS = 3  # of a prompt that every product takes as vectors
_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-odd-")


@dataclass(frozen=True)
class Size:
    """One row of sizes; `expert` is the width of an expert's MLP, `shared` of the shared one."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    expert: int
    shared: int
    experts: int

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


SIZES: Mapping[str, Size] = {
    "40": Size(40, 4, 2, 44, 20, 28, 3),
    "50": Size(50, 5, 1, 53, 27, 35, 5),  # rows of odd length behind the activation
    "80": Size(80, 4, 4, 52, 36, 44, 5),
    "120": Size(120, 6, 3, 100, 52, 60, 3),
    "144": Size(144, 4, 2, 100, 44, 36, 5),
    "160": Size(160, 8, 2, 80, 80, 100, 5),
}
# How the weights are stored: dtype of the folder, what `convert` is told.
FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "F32": ("float32", {}),
    "BF16": ("bfloat16", {}),
    "F16": ("float16", {}),
    "Q8_0": ("float32", {"quantize": "Q8_0"}),  # rows of 160 columns; others become F16 or F32
    "Q4_K_M": ("float32", {"quantize": "Q4_K_M"}),  # by the fallbacks for rows of no whole blocks
    "NF4": ("float32", {"quantize": "NF4"}),  # blocks of 64 elements, across rows
}
PLAIN = ("F32", "BF16", "F16")
# Models drawn anew, because the usual seed has an expert chosen by less than float32 tells apart.
SEEDS = {("qwen2_moe", "160"): 2}  # torch draws other weights on another machine: see `exact`
SMALLEST_MARGIN = 1e-5
_DRAWS = 8
DELTA = 5  # times as far from float64 as others may a delta net's float32 be


def forms(arch: str, size: str) -> tuple[str, ...]:
    """Return the forms that a model of this size is tried in; folders only without a GGUF form."""
    found = {"50": (*PLAIN, "NF4"), "160": tuple(FORMS)}.get(size, PLAIN)
    return found if arch in IN_GGUF else tuple(form for form in found if form in (*PLAIN, "NF4"))


def changes(arch: str, size: Size) -> dict[str, Any]:
    """Return the configuration values of an architecture's maker in these sizes."""
    values = MAKERS[arch][1]
    if "n_embd" in values:
        turned = {"rotary_dim": 6} if "rotary_dim" in values else {}
        return turned | {
            "n_embd": size.hidden,
            "n_head": size.heads,
            "n_inner": size.ffn,
            "vocab_size": VOCAB,
        }
    rotated = int(0.4 * size.head)
    found: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": size.ffn,
    }
    choices: dict[str, Any] = {
        "head_dim": size.head,
        "vocab_size_per_layer_input": VOCAB,
        "moe_intermediate_size": size.expert,
        "shared_expert_intermediate_size": size.shared,
        "num_local_experts": size.experts,
        "num_experts": size.experts,
        "n_routed_experts": size.experts,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": size.hidden // 4 * 2 - 2,
        "q_lora_rank": size.hidden // 2 + 3,
        "qk_nope_head_dim": size.head,
        "qk_rope_head_dim": 6,
        "v_head_dim": size.head + 1,
        "partial_rotary_factor": 0.4,
        "rotary_pct": 0.4,
        "num_kv_heads": size.kv_heads,
        "ffn_hidden_size": size.ffn,
        "moe_num_experts": size.experts,
        "moe_k": 2,
        "moe_topk": 2,
        "shared_intermediate_size": size.shared,
        "moe_shared_expert_intermediate_size": size.shared,
    }
    found |= {key: value for key, value in choices.items() if key in values}
    if "num_heads" in values or ("mamba_n_heads" in values and "mamba_d_ssm" not in values):
        prefix = "" if "num_heads" in values else "mamba_"  # heads divide twice the stream's width
        names = ("num_heads", "head_dim") if not prefix else ("mamba_n_heads", "mamba_d_head")
        found |= dict(zip(names, (4, size.hidden // 2), strict=True))
        found |= {f"{prefix}n_groups": 2}
    if "index_block_size" in values:  # an indexer's heads are those of the keys
        found["index_n_heads"] = size.kv_heads
        found["index_head_dim"] = size.head
        found["rope_parameters"] = values["rope_parameters"] | {"partial_rotary_factor": 0.4}
    if "o_groups" in values:  # the groups of heads divide them
        found["o_groups"] = size.heads
    if "kv_lora_rank" in values:
        found["num_key_value_heads"] = size.heads
    if arch == "deepseek_v4":  # all heads read one latent
        found["num_key_value_heads"] = 1
    if arch == "bamba":  # always rotates the half
        found["head_dim"] = 12
    if arch == "granite_hybrid":  # without experts
        found["num_local_experts"] = 0
    if arch in ("gpt_oss", "mixtral", "olmoe", "minimax_m2", "hunyuan_v1_moe"):
        found["intermediate_size"] = size.expert
    if arch == "phi3":
        factors = [1.0 + 0.3 * i for i in range(rotated // 2)]
        found["rope_parameters"] = {
            **values["rope_parameters"],
            "short_factor": factors,
            "long_factor": factors[::-1],
        }
    return found


def odd(arch: str, size: str, form: str = "BF16") -> Path:
    """Return a model of these sizes, its weights stored so; ask `exact` first where both serve."""
    return _drawn(arch, size, form, SEEDS.get((arch, size), 0))


@cache
def _drawn(arch: str, size: str, form: str, seed: int) -> Path:
    dtype, how = FORMS[form]
    folder = Path(_FOLDER.name) / f"{arch}-{size}-{dtype}-{seed}"
    if not folder.exists():
        save_tiny(arch, folder, dtype, seed=seed, **changes(arch, SIZES[size]))
    if not how:
        return folder
    suffix = "safetensors" if form == "NF4" else "gguf"
    target = Path(_FOLDER.name) / f"{arch}-{size}-{form}-{seed}" / f"model.{suffix}"
    target.parent.mkdir()
    aprfmt.convert(folder, target, **how)
    return target


def points(path: Path, b: Backend, ids: Sequence[int]) -> Trace:
    """Run a model over every capture point, values kept."""
    kept = KeptValues()
    with open_model(path) as model, Session.open(model, b) as session:
        keys = tuple(session.points)
        return session.trace(ids, keys, keep=kept.keep, fetch=kept.fetch, logits_rows="all")


def exact(arch: str, size: str, form: str, count: int) -> Trace:
    """Return the float64 reference of the first `count` tokens, no expert chosen by chance.

    Where two experts are too close with the weights drawn, SEEDS gets the next seed for `odd`.
    """
    first = SEEDS.get((arch, size), 0)
    for seed in range(first, first + _DRAWS):
        SEEDS[arch, size] = seed
        trace = _run(arch, size, form, count, seed)
        margins = [
            trace.recorded_values(k) for k, r in trace.records.items() if r.point == "router_margin"
        ]
        if all(each is not None and each.min() > SMALLEST_MARGIN for each in margins):
            return trace
    raise AssertionError(f"{arch}-{size}: {_DRAWS} draws have two experts that are equally good")


@cache
def _run(arch: str, size: str, form: str, count: int, seed: int) -> Trace:
    return points(_drawn(arch, size, form, seed), backend("numpy:float64"), ODD_IDS[:count])


def limit(case: tuple[str, str], form: str, count: int, bound: float) -> float:
    """Return the bound of a float32 run; a delta net's is wider.

    It divides by the norms of its q and k, and tiny ones carry their rounding along: numpy's own
    float32 was up to 2.2e-5 from float64 at a point, torch's on a GPU 3.6e-5.
    """
    records = exact(*case, form, count).records.values()
    return DELTA * bound if any(record.point == "delta" for record in records) else bound


@cache
def _cpu_run(arch: str, size: str, form: str, count: int, run: str, seed: int) -> Trace:
    return points(_drawn(arch, size, form, seed), backend(run), ODD_IDS[:count])


def rounding(case: tuple[str, str], form: str, count: int, key: Any, run: str) -> float:
    """Return how far a run on the CPU is from float64 at a point, times AMPLIFIED.

    `run` is a backend and its dtype, as "numpy:float32". A tiny model may lose more digits than
    the general bound allows: another order of the same operations is then judged by what this
    order loses.
    """
    arch, size = case
    wanted = exact(arch, size, form, count).recorded_values(key)
    ours = _cpu_run(arch, size, form, count, run, SEEDS[case]).recorded_values(key)
    return AMPLIFIED * rel(ours, wanted)


# Points between the gate of an MLP that drops most of it and what the MLP adds to the stream.
BEHIND_TOPK = ("ffn_topk", "ffn_act", "ffn_mul", "ffn_out", "ffn_contrib")
GELU_SLOPE = 1.13  # at most


def cancelled(case: tuple[str, str], form: str, count: int, key: str, dtype: str) -> float:
    """Return how far a run in `dtype` may be off at a point behind a gate's top-k; 0 elsewhere.

    A product's sums err by a share of their terms, so each of a row's values by that share of the
    row's root mean square, however small the value is: `logit_bound` of the layers so far is the
    share. What stays of a gate is its distance from the row's edge, and is multiplied by the other
    product. Where few of a row's values stay, and barely, or with little on the other side,
    nothing is there for their errors to be small against.
    """
    point, layer = parse_key(key)
    trace = exact(*case, form, count)
    topk = key_name("ffn_topk", layer)
    if point not in BEHIND_TOPK or topk not in trace.records:
        return 0.0
    gate, kept, up, act, product = (
        trace.recorded_values(key_name(f"ffn_{part}", layer))
        for part in ("gate", "topk", "up", "act", "mul")
    )
    assert gate is not None and up is not None and kept is not None
    assert act is not None and product is not None
    off = logit_bound(dtype, layer + 1, SIZES[case[1]].hidden, 1.0)
    gates, ups = (np.sqrt(np.mean(x**2, axis=-1, keepdims=True)) for x in (gate, up))
    moved = np.where(kept > 0, off * (gates + np.abs(gate - kept)), 0)
    errors = (
        (moved, kept),
        (GELU_SLOPE * moved, act),
        (GELU_SLOPE * moved * np.abs(up) + off * np.abs(act) * ups, product),
    )
    shares = (float(np.linalg.norm(e) / np.linalg.norm(x)) for e, x in errors if np.any(x))
    return max(shares, default=0.0)
