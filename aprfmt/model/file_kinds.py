"""Recognises files that open but are no whole model: adapters, imatrix, projectors, ...

A row of KINDS recognises one kind by what its writers put into it. `--arch` overrides this: who
names an architecture gets a model of it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from aprfmt.arch.role_vocabulary import PROJECTORS
from aprfmt.base.registry import LazyFunction
from aprfmt.base.text_escape import shorten

if TYPE_CHECKING:
    from aprfmt.model import Model


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file that is no whole model of aprfmt: a row of KINDS.

    `is_one(model)` recognises it, `says(model)` describes the file, `todo(model)` is what to do
    next, as a clause. `foreign` marks a whole model in a layout that is not read here.
    """

    name: str
    is_one: "Callable[[Model], bool]"
    says: "Callable[[Model], str]"
    todo: "Callable[[Model], str]"
    foreign: bool = False  # a whole model that is not read here, whatever --arch says


def find_kind(model: "Model") -> Kind | None:
    """Return the Kind of a file that is not a whole model; None for a model."""
    return next((kind for kind in KINDS if kind.is_one(model)), None)


# Name endings of the two factors of a LoRA: PEFT's, llama.cpp's and MLX's, kohya's.
FACTORS = (
    ".lora_A.weight", ".lora_B.weight", ".lora_a", ".lora_b", ".lora_down.weight",
    ".lora_up.weight", ".lora_embedding_A", ".lora_embedding_B",
)  # fmt: skip
_IN_EVERY_FACTOR = ".lora_"
_SCALING = re.compile(r"\.ia3_l(\.[^.]+)?$")
FACTOR_PARTS = (".alpha", ".lora_magnitude_vector", ".lora_magnitude_vector.weight", ".dora_scale")


def _is_adapter(model: "Model") -> bool:
    """Return whether a file is a LoRA adapter, by `general.type` or its tensor names."""
    if _general_type(model) == "adapter":
        return True
    if model.format == "gguf" or not any(_IN_EVERY_FACTOR in name for name in model):
        return False
    if any(map(methodcaller("endswith", FACTORS), model)):
        return True

    from aprfmt.model.adapter_parts import adapter_name

    return bool(adapter_name(model))


def _general_type(model: "Model") -> object:
    """Return the value of a GGUF's key `general.type`, None without it."""
    return model.metadata.get("general.type")


def is_scaling_vector(name: str) -> bool:
    """Return whether a stored name is that of a vector of IA3 (peft, tuners/ia3)."""
    return _SCALING.search(name) is not None


def _is_scaling_adapter(model: "Model") -> bool:
    """Return whether a file is an IA3 adapter, by its tensor names."""
    return model.format != "gguf" and any(map(is_scaling_vector, model))


def _is_other_adapter(model: "Model") -> bool:
    """Return whether a file is an adapter of another method of PEFT, by its adapter_config.json.

    Only files with PEFT's name are looked at.
    """
    if not model.path.name.startswith("adapter_model."):
        return False
    from aprfmt.model.adapter_parts import peft_config

    return peft_config(model).get("peft_type", "LORA") not in ("LORA", "IA3")


def _is_imatrix(model: "Model") -> bool:
    """Return whether a file is an importance matrix, by `general.type` or its tensor names."""
    return _general_type(model) == "imatrix" or (
        len(model) > 0 and all(name.endswith((".in_sum2", ".counts")) for name in model)
    )


def _imatrix_text(model: "Model") -> str:
    """Return a description of an importance matrix: how many weights, of which data set."""
    weights = sum(name.endswith(".in_sum2") for name in model)
    sets: Any = model.metadata.get("imatrix.datasets")
    of = ""
    if isinstance(sets, Sequence) and not isinstance(sets, str) and len(sets):
        of = f" of {shorten(str(sets[0]), 100)}"
    return f"an importance matrix (imatrix) for {weights} weights{of}"


def _is_projector(model: "Model") -> bool:
    """Return whether a file is a multimodal projector that no architecture of aprfmt reads.

    A vision tower without a projector is a separate model, and not one of these.
    """
    if model.metadata.get("clip.projector_type") in PROJECTORS.values():
        return False
    tower = model.metadata.get("general.architecture") == "clip"
    return _general_type(model) == "mmproj" or (
        tower and any(name.startswith("mm.") for name in model)
    )


def _projector_text(model: "Model") -> str:
    """Return a description of a projector's file, with its type."""
    kind = model.metadata.get("clip.projector_type")
    of = f" of type {shorten(kind, 40)}" if isinstance(kind, str) else ""
    return f"a multimodal projector (mmproj){of}: the vision or audio half of a model"


def _is_vocabulary(model: "Model") -> bool:
    """Return whether a GGUF has a vocabulary and no tensors."""
    return not len(model) and "tokenizer.ggml.tokens" in model.metadata


def _vocabulary_text(model: "Model") -> str:
    """Return a description of a vocabulary-only file, with its number of tokens."""
    tokens: Any = model.metadata["tokenizer.ggml.tokens"]
    return f"a vocabulary of {len(tokens)} tokens without weights"


# Names of attention and MLP in Meta's and Mistral's own checkpoints, whose q and k have the rows of
# a rotated pair side by side. Sources: mistral-inference, and transformers' scripts
# convert_mistral_weights_to_hf.py and convert_llama_weights_to_hf.py, which rename and permute.
_OWN = ("layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight", "tok_embeddings.weight")


def _is_meta_format(model: "Model") -> bool:
    """Return whether tensors have the names of Meta's and Mistral's original checkpoints."""
    return model.key_style == "safetensors" and sum(name in model for name in _OWN) > 1


def _meta_format_text(model: "Model") -> str:
    """Return a description of a model in the original format of Meta's or Mistral's releases."""
    sizes = " with params.json" if model.path.with_name("params.json").is_file() else ""
    return (
        f"a model in Mistral's (and Meta's) own format{sizes}: names like {_OWN[0]}, rows of q "
        "and k in adjacent pairs"
    )


# The parts of an EAGLE draft: what joins the target's hidden states with embeddings, EAGLE-3's only
# layer, and its map from ids of the draft to the target's. Sources: SpecForge's and vLLM's
# llama_eagle3.py; EAGLE's cnets.py.
_JOINS, _ONLY_LAYER, _TO_TARGET, _IN_DRAFT = "fc.weight", "midlayer.", "d2t", "t2d"


def _is_draft(model: "Model") -> bool:
    """Return whether a file is a draft of speculative decoding (EAGLE), by its tensor names."""
    if model.key_style != "safetensors" or _JOINS not in model:
        return False
    return _TO_TARGET in model or any(name.startswith(_ONLY_LAYER) for name in model)


def _draft_text(model: "Model") -> str:
    """Return a description of a draft, with what its map of ids lacks."""
    says = "a draft of speculative decoding (EAGLE), which runs on the hidden states of its target"
    config = model.config or {}
    few, every = config.get("draft_vocab_size"), config.get("vocab_size")
    if not (isinstance(few, int) and isinstance(every, int) and few < every):
        return says
    missing = [name for name in (_TO_TARGET, _IN_DRAFT) if name not in model]
    if missing:
        return (
            f"{says}; it has {few} of {every} tokens and no {' and no '.join(missing)}, so that "
            "nothing says which ids of the target its own are"
        )
    return says


KINDS: tuple[Kind, ...] = (
    Kind("adapter", _is_adapter, LazyFunction("aprfmt.model.adapter_description:adapter_text"),
         LazyFunction("aprfmt.model.adapter_description:adapter_next_step")),
    Kind("scaling_adapter", _is_scaling_adapter,
         LazyFunction("aprfmt.model.adapter_description:scaling_adapter_text"), lambda model: (
             "it is not merged here; merge it with PEFT's merge_and_unload")),
    Kind("other_adapter", _is_other_adapter,
         LazyFunction("aprfmt.model.adapter_description:other_adapter_text"), lambda model: (
             "it is not read here; load it with PEFT, which merges what its method can merge "
             "(merge_and_unload)")),
    Kind("imatrix", _is_imatrix, _imatrix_text, lambda model: (
        f"aprfmt quantize MODEL OUT.gguf --type Q4_K_M --imatrix {model.path} uses it")),
    Kind("projector", _is_projector, _projector_text, lambda model: (
        f"the language model is in another file; aprfmt tensors {model.path} lists this one")),
    Kind("vocabulary", _is_vocabulary, _vocabulary_text, lambda model: (
        f"aprfmt tokenize {model.path} TEXT uses it")),
    Kind("draft", _is_draft, _draft_text, lambda model: (
        "serve it next to its target; diff and convert --generic take its tensors by their names")),
    Kind("own_format", _is_meta_format, _meta_format_text, lambda model: (
        "convert it to Hugging Face's first, with transformers' convert_mistral_weights_to_hf.py "
        "(convert_llama_weights_to_hf.py for Llama), and open that folder"), foreign=True),
)  # fmt: skip
