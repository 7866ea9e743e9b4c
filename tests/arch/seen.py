"""What llama.cpp makes of files we write.

python -m tests.arch.seen --write docs/reference/llama_cpp.json

Needs its libraries (docs/notes/optional_tests.md), for towers libmtmd among them. Every tiny model
of an architecture with a GGUF form is written as one in float32, loaded, and run: the row has the
relative distance of its logits, of an encoder's embedding or of a tower's rows, to transformers'.
Each model runs in a process of its own, since the
library ends the process where it finds what it does not expect. Names of architectures behind the
file try these alone and keep the rows of the others.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.arch import ARCHS
from tests.arch import mtmd, towers
from tests.arch.listed import BASE, CAUSAL, HOMELESS, LISTED, MASKED, cut
from tests.models import MAKERS, save_tiny

IDS = (3, 17, 5, 40, 22, 9, 31, 8)
SAFE = ("A_log", "dt_bias", "layer_scalar")  # random ones overflow


_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "rms_norm_eps": 1e-6}
_SECTIONS = {"rope_parameters": {
    "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}}  # fmt: skip
_TEXT_SECTIONS = {"rope_parameters": {
    "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}}  # fmt: skip
_INDEXER = {"rms_norm_eps": 1e-6, "index_head_dim": 64}
_UNLIMITED = {"time_step_limit": (0.0, float("inf"))}
# Shapes and settings that llama.cpp's graphs are fixed to, where the tiny models have others: what
# a GGUF has no key for is listed in docs/reference/architectures.md.
SUITED: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16}, "gemma3": {"query_pre_attn_scalar": 16},
    "phi3": {
        "original_max_position_embeddings": 512, "max_position_embeddings": 2048,
        "sliding_window": 4096,
    },
    "exaone_moe": {"n_group": 1, "topk_group": 1},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 5},
    "olmoe": {"num_key_value_heads": 4}, "dots1": {"num_key_value_heads": 4},
    "gpt_oss": {"swiglu_limit": 7.0}, "nemotron": {"head_dim": None},
    "seed_oss": {"attention_out_bias": False}, "phimoe": {"attention_bias": True},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "bitnet": {"hidden_act": "silu"}, "umt5": {"num_decoder_layers": 3},
    "qwen3_next": _DELTA, "qwen3_5": {**_DELTA, **_SECTIONS},
    "qwen3_5_moe": {**_DELTA, **_SECTIONS},
    "qwen2_vl": {"use_sliding_window": False, "rms_norm_eps": 1e-9},
    "qwen2_5_vl": {"rms_norm_eps": 1e-9},
    "qwen3_vl": _TEXT_SECTIONS, "qwen3_vl_moe": _TEXT_SECTIONS,
    "bamba": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    }},
    "gemma3n": {
        "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 256, "laurel_rank": 64,
        "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 6,
        "intermediate_size": [4000] * 6, "altup_num_inputs": 4, "final_logit_softcapping": 30.0,
        "layer_types": [*["sliding_attention"] * 4, "full_attention", "sliding_attention"],
    },
    "nemotron_h": {"time_step_min": 1e-9}, "nemotron_h_moe": {"time_step_min": 1e-9},
    "mamba2": _UNLIMITED, "granite_hybrid_moe": _UNLIMITED,
    "falcon_h1": {
        "mamba_norm_before_gate": False,
        **dict.fromkeys((
            "embedding_multiplier", "lm_head_multiplier", "key_multiplier",
            "attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier",
            "ssm_out_multiplier",
        ), 1.0),
        "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5,
    },
    "deepseek_v2": {"rms_norm_eps": 1e-6}, "deepseek_v3": {"rms_norm_eps": 1e-6},
    "kimi_linear": {"rms_norm_eps": 1e-6}, "glm4_moe_lite": {"rms_norm_eps": 1e-6},
    "deepseek_v32": _INDEXER, "glm_moe_dsa": _INDEXER,
    "falcon_mamba": {"layer_norm_epsilon": 1e-6, "mixer_rms_eps": 1e-6},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "index_head_dim": 64, "hc_mult": 4,
    },
    "minimax": {
        "rms_norm_eps": 1e-6,
        **{f"{part}_{kind}_factor": 1.5 if kind == "alpha" else 1.0
           for part in ("full_attn", "linear_attn", "mlp") for kind in ("alpha", "beta")},
    },
    "minimax_m3_vl": {
        "shared_intermediate_size": 24, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    },
}  # fmt: skip
# What stands beside a row: why llama.cpp gives other numbers for models that are not suited, or
# for this one, where no setting makes them equal.
BECAUSE: Mapping[str, str] = {
    "phi3": "it turns by the long factors once its context is longer than the trained one, "
    "transformers once the text is",
    "exaone_moe": "it has no groups of experts",
    "exaone4": "it has windows, and layers that do not rotate, in models of 64 layers only",
    "phimoe": "it weighs the experts by a softmax over the chosen ones",
    "llama4": "chunks of 8192 positions, and queries that grow by 8192, are fixed in it",
    "umt5": "it has no more layers in the decoder than in the encoder",
    "bitnet": "it computes silu where the model says relu2",
    "bamba": "the converter reorders whole heads, of which this model rotates half",
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        "its delta nets add the model's epsilon to the lengths of q and k, transformers' 1e-6",
    ),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"),
        "this version reads no epsilon of such a file and computes with 0: this model's is 1e-9, "
        "and 3.4e-02 lie between them at 3e-4",
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"),
        "pairs that no section has do not turn there: this model's have all",
    ),
    "gemma3n": "its GELU is a table of float16, and it divides the variance that cuts an MLP's "
    "gate by one less than the values: with both in our pass 8e-05 are left (of 4000 values here: "
    "3.6e-02 apart at 40); the first 20 layers have keys and values, the first 10 are cut",
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"),
        "its GELU is a table of float16: with it in our pass the first row is 2.3e-07 apart, and "
        "later ones where a value falls on another entry",
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_linear", "glm4_moe_lite"),
        "it normalises compressed queries and keys by the model's epsilon, transformers by 1e-6",
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        "it normalises compressed queries and keys by the model's epsilon, transformers by 1e-6, "
        "and ends the process where an indexer's heads have 14 elements: here they have 64",
    ),
    "deepseek_v4": "it ends the process where there are not 4 streams, or an indexer's heads have "
    "10 elements: here they have 64",
    "minimax": "it has one factor for all streams, and one epsilon for all norms",
    "minimax_m3_vl": "it clamps at 7, has a shared expert as wide as some others, and indexers in "
    "all layers with experts, after the dense ones",
    "falcon_mamba": "it normalises time steps, B and C by the model's epsilon, "
    "transformers by 1e-6",
    **dict.fromkeys(
        ("clip_vision", "siglip_vision"), "a tower alone has no projector, and it loads none"
    ),
    "pixtral_vision": "with the text's row of the token [IMG_BREAK] in addition to what is written",
    "voxtral_tower": "it averages the frames in pairs, as transformers does not, and makes 188 "
    "rows of them where it expects 187",
    "nemotron_h": "it does not raise time steps to the model's smallest (0.001)",
    "nemotron_h_moe": "it does not raise time steps to the model's smallest (0.001)",
}


def tried() -> Iterator[tuple[str, str]]:
    """Yield (architecture, tiny model) for every architecture that has a GGUF form."""
    for name in ARCHS.own:
        if "gguf" not in ARCHS[name].called:
            continue
        listed = [label for label, (arch, *_) in LISTED.items() if arch == name]
        if name in MAKERS:
            yield name, name
        elif listed:
            yield name, listed[0]


def made(label: str, folder: Path) -> tuple[Any, str]:
    """Write a tiny model and return it with what loads it."""
    import torch
    import transformers

    if label in MAKERS:
        return save_tiny(label, folder, **SUITED.get(label, {})), CAUSAL
    auto: Any = transformers
    _, kind, loader, values = LISTED[label]
    config = auto.AutoConfig.for_model(kind, **{**values, **SUITED.get(label, {})})
    torch.manual_seed(3)
    how: Any = getattr(auto, loader)
    if hasattr(how, "from_config"):
        model = how.from_config(config, attn_implementation="eager", experts_implementation="eager")
    else:
        model = how(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.endswith(SAFE):
                matrix = tensor.ndim > 1
                shift = 1.0 if "norm" in name and not matrix else 0.0
                tensor.copy_(torch.randn(tensor.shape) * (0.3 if matrix else 0.1) + shift)
    model = model.float().eval()
    model.save_pretrained(folder)
    cut(label, folder)
    return model, loader


def theirs(model: Any, loader: str) -> Any:
    """Return transformers' logits, or the mean of an encoder's last rows; None without either."""
    import torch

    ids = torch.tensor([IDS])
    with torch.no_grad():
        if loader == CAUSAL:
            return model(ids).logits[0].double().numpy()
        if loader in (BASE, MASKED) and model.main_input_name == "input_ids":
            return model.base_model(ids).last_hidden_state[0].double().mean(0).numpy()
    return None


def ours(path: Path, loader: str, width: int) -> Any:
    """Return llama.cpp's logits, or its embedding."""
    from aprfmt.inference.engines.llama_library import Library

    library = Library.open()
    run: Any = library.llama
    with library.model(path) as loaded, library.context(loaded, len(IDS), 1) as context:
        if loader == CAUSAL:
            assert library.decode(context, IDS) == 0, library.last_errors()
            return np.stack([library.logits(context, row, width) for row in range(len(IDS))])
        run.llama_set_embeddings.argtypes = [ctypes.c_void_p, ctypes.c_bool]
        run.llama_get_embeddings_seq.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        run.llama_get_embeddings_seq.restype = ctypes.POINTER(ctypes.c_float)
        run.llama_set_embeddings(context, True)
        assert library.decode(context, IDS) == 0, library.last_errors()
        pooled = run.llama_get_embeddings_seq(context, 0)
        return np.ctypeslib.as_array(pooled, (width,)).copy() if pooled else None


def architecture_of(label: str) -> str:
    """Return the architecture of a tiny model."""
    return label if label in MAKERS else LISTED[label][0]


def look(label: str) -> Mapping[str, Any]:
    """Return the row of one tiny model."""
    import aprfmt
    from aprfmt.errors import AprfmtError
    from aprfmt.inference.engines.llama_library import Library

    with tempfile.TemporaryDirectory() as scratch:
        if "clip" in ARCHS[architecture_of(label)].called.get("gguf", ()) and mtmd.found():
            return towers.look(label, Path(scratch))
        folder, path = Path(scratch) / "m", Path(scratch) / "m.gguf"
        model, loader = made(label, folder)
        drop = (HOMELESS[label],) if label in HOMELESS else ()
        aprfmt.convert(folder, path, drop=drop, metadata={"tokenizer.ggml.model": "none"})
        expected = theirs(model, loader)
        try:
            if expected is None:
                with Library.open().model(path):
                    return {"loads": True}
            found = ours(path, loader, expected.shape[-1])
            if found is None:  # it pools nothing here
                return {"loads": True}
        except AprfmtError as error:
            return {"loads": False, "why": str(error).split("loading model: ")[-1].split(";")[0]}
    distance = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return {"loads": True, "distance": float(f"{distance:.1e}")}


def row(label: str) -> Mapping[str, Any]:
    """Return the row of one tiny model, made by another process."""
    command = (sys.executable, "-m", "tests.arch.seen", "--one", label)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    said = [line for line in done.stderr.splitlines() if ".cpp:" in line or "Error" in line]
    return {"loads": False, "why": said[-1].rpartition("/")[-1] if said else "ended without a word"}


def main(arguments: list[str]) -> None:
    """Print the row of one model, or write those of all, or of named, architectures."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(look(arguments[1])))
        return
    from aprfmt.inference.engines.llama_library import Library

    target, named = Path(arguments[1]), arguments[2:]
    rows = json.loads(target.read_text())["rows"] if named and target.is_file() else {}
    models = dict(tried())
    for name in named or models:
        because = {"because": BECAUSE[name]} if name in BECAUSE else {}
        rows[name] = {"model": models[name], **row(models[name]), **because}
        print(name, rows[name], file=sys.stderr, flush=True)
    version = Library.open().version().split(" CPU")[0]
    kept = {name: rows[name] for name in models if name in rows}
    target.write_text(json.dumps({"library": version, "rows": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
