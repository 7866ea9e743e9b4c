"""Architectures as tables: looked up by name, one file per family."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.base.registry import Registry, some_of
from aprfmt.base.text import shorten
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec

_HERE = "aprfmt.arch."

ARCHS: "Registry[ArchSpec]" = Registry(
    "arch",
    {
        "llama": _HERE + "llama:LLAMA",
        "mistral": _HERE + "llama:MISTRAL",
        "mixtral": _HERE + "llama:MIXTRAL",
        "qwen2": _HERE + "qwen2:QWEN2",
        "qwen3": _HERE + "qwen3:QWEN3",
        "gemma": _HERE + "gemma:GEMMA",
        "gemma2": _HERE + "gemma2:GEMMA2",
        "gemma3": _HERE + "gemma3:GEMMA3",
        "phi2": _HERE + "phi2:PHI2",
        "phi3": _HERE + "phi3:PHI3",
        "gpt2": _HERE + "gpt2:GPT2",
        "gpt_oss": _HERE + "gpt_oss:GPT_OSS",
        "olmo2": _HERE + "olmo2:OLMO2",
        "olmo3": _HERE + "olmo2:OLMO3",
        "stablelm": _HERE + "stablelm:STABLELM",
        "starcoder2": _HERE + "starcoder2:STARCODER2",
        "granite": _HERE + "granite:GRANITE",
        "smollm3": _HERE + "smollm3:SMOLLM3",
        "cohere": _HERE + "cohere:COHERE",
        "qwen2_moe": _HERE + "qwen2_moe:QWEN2_MOE",
        "qwen3_moe": _HERE + "qwen3_moe:QWEN3_MOE",
        "deepseek_v2": _HERE + "deepseek:DEEPSEEK_V2",
        "deepseek_v3": _HERE + "deepseek:DEEPSEEK_V3",
        "arcee": _HERE + "arcee:ARCEE",
        "seed_oss": _HERE + "seed_oss:SEED_OSS",
        "exaone4": _HERE + "exaone4:EXAONE4",
        "cohere2": _HERE + "cohere2:COHERE2",
        "ernie4_5": _HERE + "ernie:ERNIE4_5",
        "nemotron": _HERE + "nemotron:NEMOTRON",
        "jais2": _HERE + "jais2:JAIS2",
        "glm4": _HERE + "glm4:GLM4",
        "olmoe": _HERE + "olmoe:OLMOE",
        "hunyuan_v1_dense": _HERE + "hunyuan:HUNYUAN_DENSE",
        "hunyuan_v1_moe": _HERE + "hunyuan:HUNYUAN_MOE",
        "glm4_moe": _HERE + "glm4_moe:GLM4_MOE",
        "minimax_m2": _HERE + "minimax_m2:MINIMAX_M2",
        "ernie4_5_moe": _HERE + "ernie_moe:ERNIE4_5_MOE",
        "granitemoe": _HERE + "granite:GRANITE_MOE",
        "dots1": _HERE + "dots1:DOTS1",
        "gpt_neox": _HERE + "gpt_neox:GPT_NEOX",
        "gpt_bigcode": _HERE + "gpt_bigcode:GPT_BIGCODE",
        "gptj": _HERE + "gptj:GPTJ",
        "falcon": _HERE + "falcon:FALCON",
        "falcon_40b": _HERE + "falcon:FALCON_40B",
        "bert": _HERE + "encoders:BERT",
        "roberta": _HERE + "encoders:ROBERTA",
        "distilbert": _HERE + "encoders:DISTILBERT",
        "mpnet": _HERE + "encoders:MPNET",
        "modernbert": _HERE + "modernbert:MODERNBERT",
        "nomic_bert": _HERE + "rotary_encoders:NOMIC_BERT",
        "jina_embeddings_v3": _HERE + "rotary_encoders:JINA_V3",
        "bloom": _HERE + "bloom:BLOOM",
        "mpt": _HERE + "mpt:MPT",
        "opt": _HERE + "opt:OPT",
        "gpt_neo": _HERE + "listed:GPT_NEO",
        "olmo": _HERE + "listed:OLMO",
        "llama4": _HERE + "llama4:LLAMA4",
        "phimoe": _HERE + "phimoe:PHIMOE",
        "bitnet": _HERE + "listed_new:BITNET",
        "eurobert": _HERE + "listed_new:EUROBERT",
        "apertus": _HERE + "apertus:APERTUS",
        "persimmon": _HERE + "listed:PERSIMMON",
        "xglm": _HERE + "listed:XGLM",
        "biogpt": _HERE + "listed:BIOGPT",
        "codegen": _HERE + "listed:CODEGEN",
        "qwen3_next": _HERE + "qwen3_next:QWEN3_NEXT",
        "qwen3_5": _HERE + "qwen3_5:QWEN3_5",
        "qwen3_5_moe": _HERE + "qwen3_5:QWEN3_5_MOE",
        "rwkv": _HERE + "rwkv:RWKV",
        "mamba": _HERE + "mamba:MAMBA",
        "falcon_mamba": _HERE + "mamba:FALCON_MAMBA",
        "mamba2": _HERE + "mamba:MAMBA2",
        "jamba": _HERE + "jamba:JAMBA",
        "bamba": _HERE + "granite_hybrid:BAMBA",
        "granite_hybrid": _HERE + "granite_hybrid:GRANITE_HYBRID",
        "granite_hybrid_moe": _HERE + "granite_hybrid:GRANITE_HYBRID_MOE",
        "falcon_h1": _HERE + "falcon_h1:FALCON_H1",
        "lfm2": _HERE + "lfm2:LFM2",
        "lfm2_moe": _HERE + "lfm2:LFM2_MOE",
        "nemotron_h": _HERE + "nemotron_h:NEMOTRON_H",
        "nemotron_h_moe": _HERE + "nemotron_h:NEMOTRON_H_MOE",
        "t5": _HERE + "t5:T5",
        "t5_gated": _HERE + "t5:T5_GATED",
        "umt5": _HERE + "t5:UMT5",
        "t5_encoder": _HERE + "t5:T5_ENCODER",
        "t5_gated_encoder": _HERE + "t5:T5_GATED_ENCODER",
        "umt5_encoder": _HERE + "t5:UMT5_ENCODER",
        "whisper": _HERE + "whisper:WHISPER",
        "clip_vision": _HERE + "vision:CLIP_VISION",
        "siglip_vision": _HERE + "vision:SIGLIP_VISION",
        "gemma3_vision": _HERE + "gemma3_vision:GEMMA3_VISION",
        "pixtral_vision": _HERE + "pixtral_vision:PIXTRAL_VISION",
        "qwen2_audio_tower": _HERE + "audio_towers:QWEN2_AUDIO",
        "voxtral_tower": _HERE + "audio_towers:VOXTRAL",
        "gemma3n": _HERE + "gemma3n:GEMMA3N",
        "gemma4": _HERE + "gemma4:GEMMA4",
        "ministral3": _HERE + "ministral3:MINISTRAL3",
        "mimo": _HERE + "mimo:MIMO",
        "mimo_v2": _HERE + "mimo:MIMO_V2",
    },
    ArchError,
)


def arch_names() -> tuple[str, ...]:
    """Return the names of all architectures, third parties' included."""
    return tuple(ARCHS)


def find_arch(
    style: str,
    name: str,
    roles: Collection[str] = (),
    values: Mapping[str, Value] | None = None,
) -> "ArchSpec":
    """Return the architecture with a given name in a style ("hf", "gguf", "apr").

    Where several share the name (GGUF's `llama` is llama, mistral or mixtral), the stored tensor
    names in `roles` and the metadata in `values` decide. Raises ArchError for an unknown name and
    lists similar names; it never guesses one of them.
    """
    specs = [ARCHS[arch] for arch in ARCHS.own]
    candidates = [spec for spec in specs if name in spec.called.get(style, ())]
    if not candidates:  # other packages' tables are read only if no built-in one fits
        specs = [ARCHS[arch] for arch in ARCHS]
        candidates = [spec for spec in specs if name in spec.called.get(style, ())]
    shown = [spec for spec in candidates if spec.evidence and spec.evidence(roles, values or {})]
    chosen = shown or [spec for spec in candidates if spec.evidence is None] or candidates
    if len(chosen) == 1:
        chosen[0].block.check()
        return chosen[0]
    what = f"{style} architecture '{shorten(name, 100)}'"
    if chosen:
        raise ArchError(
            f"{what} may be {' or '.join(spec.name for spec in chosen)}, "
            "and nothing in the file decides; name it with --arch"
        )
    known = list(dict.fromkeys(n for spec in specs for n in spec.called.get(style, ())))
    near = get_close_matches(name, known, 3, cutoff=0.4) or known
    raise ArchError(
        f"{what} is not known; {'near' if near != known else 'known'} "
        f"names: {some_of(near)}; if it is one of {some_of(arch_names())} under another name, "
        "say so with --arch"
    )
