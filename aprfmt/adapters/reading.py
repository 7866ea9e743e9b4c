"""An adapter as it is stored: PEFT's folder, a GGUF of llama.cpp, kohya's file.

PEFT    base_model.model.MODULE.lora_A.weight [r, in], .lora_B.weight [out, r]; of embeddings
        .lora_embedding_A [r, tokens], .lora_embedding_B [size, r]; DoRA .lora_magnitude_vector
        [out]; whole tensors (modules_to_save, bias) as base_model.model.NAME. adapter_config.json:
        r, lora_alpha, their patterns, use_rslora, use_dora, fan_in_fan_out
GGUF    NAME.weight.lora_a [r, in], NAME.weight.lora_b [out, r]; of token_embd.weight .lora_a
        [tokens, r], .lora_b [size, r]; adapter.lora.alpha
kohya   PREFIX_MODULE_WITH_UNDERSCORES.lora_down.weight, .lora_up.weight, .alpha, .dora_scale
        [out, 1]

The scale of a pair is alpha / r, with rsLoRA alpha / sqrt(r).
Source: peft 0.21, tuners/lora and utils/save_and_load.py; llama.cpp, convert_lora_to_gguf.py and
llama-adapter.cpp; kohya's sd-scripts, networks/lora.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.base.regexes import matches_start
from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.model import Model, open_model
from aprfmt.model.kinds import peft_config
from aprfmt.tensors.view import View

_PEFT = "base_model.model."
_ENDS: Mapping[str, tuple[str, str]] = {  # ending -> (spelling, which part of a pair)
    ".lora_A.weight": ("peft", "a"),
    ".lora_B.weight": ("peft", "b"),
    ".lora_embedding_A": ("peft", "embedding_a"),
    ".lora_embedding_B": ("peft", "embedding_b"),
    ".lora_magnitude_vector": ("peft", "magnitude"),
    ".lora_magnitude_vector.weight": ("peft", "magnitude"),
    ".lora_a": ("gguf", "a"),
    ".lora_b": ("gguf", "b"),
    ".lora_down.weight": ("kohya", "a"),
    ".lora_up.weight": ("kohya", "b"),
    ".alpha": ("kohya", "alpha"),
    ".dora_scale": ("kohya", "magnitude"),
}

EMBEDDING = "token_embd.weight"  # the one pair of a GGUF whose factors stand the other way round
# Initializations that take their factors out of the base, to which alone the trained ones can be
# added. PEFT writes another word where it saves an adapter for the base as it was.
_OF_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_UNREAD = ("lora_bias", "alora_invocation_tokens", "target_parameters", "trainable_token_indices")


@dataclass(frozen=True)
class Stored:
    """One pair as its file has it: its parts by kind, its rank and its scale.

    `embedding` marks factors that stand the other way round, for a table of tokens.
    """

    module: str
    parts: Mapping[str, View]
    rank: int
    scale: float
    embedding: bool = False


@dataclass(frozen=True)
class Adapter:
    """An adapter: its spelling (peft, gguf, kohya), its pairs by module, whole tensors by name."""

    path: Path
    spelling: str
    pairs: Mapping[str, Stored]
    whole: Mapping[str, View]
    config: Mapping[str, Any]
    alpha: float
    turned: bool = False  # fan_in_fan_out: the base stores [in, out]


def read_adapter(path: Path) -> tuple[Model, Adapter]:
    """Open an adapter; the caller closes the model. FormatError if the file is not one."""
    model = open_model(path)
    try:
        return model, _read(model)
    except BaseException:
        model.close()
        raise


def _read(model: Model) -> Adapter:
    config = peft_config(model)
    groups: dict[str, dict[str, View]] = {}
    whole: dict[str, View] = {}
    spellings: set[str] = set()
    for name, view in model.items():
        end = next((end for end in sorted(_ENDS, key=len, reverse=True) if name.endswith(end)), "")
        if not end:
            whole[name.removeprefix(_PEFT)] = view
            continue
        spelling, part = _ENDS[end]
        spellings.add(spelling)
        groups.setdefault(name.removesuffix(end).removeprefix(_PEFT), {})[part] = view
    if len(spellings) != 1:
        said = f"names of {', '.join(sorted(spellings))}" if spellings else "no factors of a LoRA"
        raise FormatError(f"{model.path}: has {said}; expected an adapter of one kind")
    spelling = spellings.pop()
    _refuse(model, config, whole, spelling)
    alpha = _number(model, config.get("lora_alpha", model.metadata.get("adapter.lora.alpha", 0)))
    pairs = {
        module: _stored(model, module, parts, spelling, config, alpha)
        for module, parts in groups.items()
    }
    turned = bool(config.get("fan_in_fan_out"))
    return Adapter(model.path, spelling, pairs, whole, config, alpha, turned)


def _refuse(
    model: Model, config: Mapping[str, Any], whole: Mapping[str, View], spelling: str
) -> None:
    """Raise for an adapter that is not a LoRA, or has parts that are not supported here."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{model.path}: peft_type is {kind!r}; LORA is what is read")
    for key in _UNREAD:
        if config.get(key):
            raise UnsupportedError(f"{model.path}: {key} of adapter_config.json is not read here")
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_OF_BASE):
        raise UnsupportedError(
            f"{model.path}: adapter_config.json says init_lora_weights {began!r}, which changed "
            "the base as well; save it by PEFT's path_initial_model_for_weight_conversion first"
        )
    odd = [name for name in whole if "lora" in name or spelling == "kohya"]
    if odd:
        raise UnsupportedError(f"{model.path}: {odd[0]} is no part of a LoRA that is read here")


def _number(model: Model, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FormatError(f"{model.path}: alpha is {value!r}; expected a number")
    return float(value)


def _stored(
    model: Model, module: str, parts: Mapping[str, View], spelling: str,
    config: Mapping[str, Any], alpha: float,
) -> Stored:  # fmt: skip
    embedding = "embedding_a" in parts or "embedding_b" in parts
    a, b = ("embedding_a", "embedding_b") if embedding else ("a", "b")
    for part in (a, b):
        if part not in parts:
            raise FormatError(f"{model.path}: {module} has no {part} beside {', '.join(parts)}")
    turned = spelling == "gguf" and module == EMBEDDING
    rank = _rank(model, module, parts[a].shape, parts[b].shape, turned)
    embedding = embedding or turned
    _check_lengths(model, module, parts)
    if spelling == "kohya":
        own = float(parts["alpha"].numpy().reshape(-1)[0]) if "alpha" in parts else float(rank)
        return Stored(module, parts, rank, _number(model, own) / rank)
    claimed = _by_pattern(config.get("rank_pattern"), module, config.get("r", rank))
    if claimed != rank:
        raise FormatError(
            f"{model.path}: {module}: adapter_config.json says rank {claimed}, its factors have "
            f"{rank}"
        )
    own = _number(model, _by_pattern(config.get("alpha_pattern"), module, alpha))
    if spelling == "gguf" and not own:
        own = float(rank)  # llama.cpp's rule: no alpha, no scale
    scale = own / math.sqrt(rank) if config.get("use_rslora") else own / rank
    return Stored(module, parts, rank, scale, embedding)


def _rank(model: Model, module: str, a: tuple[int, ...], b: tuple[int, ...], turned: bool) -> int:
    """Return the rank of two factors; FormatError for shapes that are no pair's."""
    if len(a) != 2 or len(b) != 2 or a[turned] != b[1] or not b[1]:
        expected = "[tokens, r] and [size, r]" if turned else "[r, in] and [out, r]"
        raise FormatError(
            f"{model.path}: {module}: factors are {list(a)} and {list(b)}; expected {expected}"
        )
    return b[1]


def _check_lengths(model: Model, module: str, parts: Mapping[str, View]) -> None:
    """Raise FormatError for DoRA's lengths that are not one for each row."""
    lengths = parts.get("magnitude")
    if lengths is None:
        return
    rows = parts["b"].shape[0] if "b" in parts else 0
    if lengths.shape not in ((rows,), (rows, 1)):
        raise FormatError(
            f"{model.path}: {module}: {lengths.name} is {list(lengths.shape)}; expected a length "
            f"for each of {rows} rows, [{rows}] or [{rows}, 1]"
        )


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return PEFT's value of a module: of the first pattern that ends its name, else `default`."""
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if matches_start(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def factors(pair: Stored) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return A [r, in] and B [out, r] as float64; FormatError for one that is not finite."""
    for part in pair.parts.values():
        values = part.numpy()
        wrong = int((~np.isfinite(values)).sum())
        if wrong:
            raise FormatError(
                f"{part.name}: holds {wrong} NaN or infinite numbers of {values.size}; expected "
                "finite factors: get the adapter again"
            )
    if pair.embedding and "a" in pair.parts:
        a, b = pair.parts["b"].numpy().T, pair.parts["a"].numpy()
    elif pair.embedding:
        a, b = pair.parts["embedding_b"].numpy().T, pair.parts["embedding_a"].numpy().T
    else:
        a, b = pair.parts["a"].numpy(), pair.parts["b"].numpy()
    return a.astype(np.float64), b.astype(np.float64)
