"""Reads an adapter as stored: PEFT's folder, a GGUF of llama.cpp, kohya's file, MLX's folder.

A *pair* is the factors A and B of one module with their scale; a *part* is one of its tensors by
kind ("a", "b", "alpha", ...).

PEFT base_model.model.MODULE.lora_A.weight [r, in], .lora_B.weight [out, r]; of embeddings
  .lora_embedding_A [r, tokens], .lora_embedding_B [size, r]; DoRA .lora_magnitude_vector
  [out]; of single parameters as parameters.py says; whole tensors (modules_to_save, bias)
  as base_model.model.NAME. adapter_config.json:
  r, lora_alpha, their patterns, use_rslora, use_dora, fan_in_fan_out
GGUF NAME.weight.lora_a [r, in], NAME.weight.lora_b [out, r]; of token_embd.weight .lora_a
  [tokens, r], .lora_b [size, r]; adapter.lora.alpha
kohya   PREFIX_MODULE_WITH_UNDERSCORES.lora_down.weight, .lora_up.weight, .alpha, .dora_scale
  [out, 1]

MLX     MODULE.lora_a [in, r], MODULE.lora_b [r, out]; of embeddings [tokens, r] and [r, size];
  DoRA MODULE.m [out]; adapter_config.json: lora_parameters with rank and scale

The scale of a pair is alpha / r, with rsLoRA alpha / sqrt(r); MLX states the scale itself. Names of
all spellings, and the sources, are in `model/adapter_parts.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.model import Model, open_model
from aprfmt.model.adapter_parts import (
    DEFAULT_ALPHA,
    GGUF_EMBEDDING,
    adapter_parts,
    adapter_scale,
    is_mlx_table,
    merge_obstacle,
    mlx_parameter,
    odd_tensors,
    pair_fault,
    peft_config,
    target_parameters,
    unwrap_module,
    value_by_pattern,
)
from aprfmt.model.zero_pairs import find_zero_pairs
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.model.relations import Relation


@dataclass(frozen=True)
class StoredPair:
    """The factors of one module as the file has them: its tensors by kind, its rank and its scale.

    `embedding` marks exchanged factors, as for a token embedding. `parameters` are the names of
    single parameters of the module, one of which the pair changes: its rank is then that of all
    experts together, and its scale is not known without the base (`pair_scale`). `turned`: the
    factors are [in, r] and [r, out], as MLX stores them. `halves`: the outputs are read with their
    halves exchanged. `joined`: the pair stands for several, whose outputs follow each other.
    """

    module: str
    parts: Mapping[str, View]
    rank: int
    scale: float
    embedding: bool = False
    parameters: tuple[str, ...] = ()
    turned: bool = False
    halves: bool = False
    joined: tuple["StoredPair", ...] = ()


@dataclass(frozen=True)
class Adapter:
    """An adapter: its spelling (peft, gguf, kohya, mlx), its pairs by module, whole tensors."""

    path: Path
    spelling: str
    pairs: Mapping[str, StoredPair]
    replacements: Mapping[str, View]
    config: Mapping[str, Any]
    alpha: float
    turned: bool = False  # fan_in_fan_out: the base stores [in, out]
    stray: tuple[str, ...] = ()  # stored tensors that are no part of an adapter, and are left out
    relation: "Relation | None" = None  # of its names to the base's, where they are others


def read_adapter(path: Path, *, compare: bool = False) -> tuple[Model, Adapter]:
    """Return (open model, adapter); the caller closes the model.

    Raises FormatError if the file is no adapter, UnsupportedError if it cannot be merged. `compare`
    is for a comparison with a merged model: contradictory alphas are then no error, and tensors
    that no merge reads are left out.
    """
    model = open_model(path)
    try:
        return model, adapter_of_model(model, compare)
    except BaseException:
        model.close()
        raise


def adapter_of_model(model: Model, compare: bool) -> Adapter:
    """Return the adapter in an open file; FormatError or UnsupportedError if it cannot be used.

    `compare` is for a comparison with a merged model: contradictory alphas are then no error, and
    tensors that no merge reads are left out.
    """
    config = peft_config(model)
    kind = model.kind
    if kind is not None and kind.name in ("scaling_adapter", "other_adapter"):
        zeros = find_zero_pairs(model).text
        told = f"; {zeros}" if zeros else ""
        raise UnsupportedError(f"{model.path}: is {kind.says(model)}{told}; {kind.todo(model)}")
    parts = adapter_parts(model)
    if len(parts.spellings) != 1:
        names = ", ".join(sorted(parts.spellings))
        said = f"names of {names}" if names else "no factors of a LoRA"
        raise FormatError(f"{model.path}: has {said}; expected an adapter of one kind")
    (spelling,) = parts.spellings
    obstacle = merge_obstacle(config, parts, model, compare=compare)
    if obstacle:
        raise UnsupportedError(f"{model.path}: {obstacle}")
    for module in parts.factors:
        fault = pair_fault(config, parts, model, module)
        if fault:
            raise FormatError(f"{model.path}: {fault}")
    default = DEFAULT_ALPHA if spelling == "peft" else 0
    alpha = _checked_alpha(
        model, config.get("lora_alpha", model.metadata.get("adapter.lora.alpha", default))
    )
    pairs = {
        module: _make_pair(
            model,
            module,
            {part: model[name] for part, name in own.items()},
            spelling,
            config,
            alpha,
        )
        for module, own in parts.factors.items()
    }
    turned = bool(config.get("fan_in_fan_out"))
    odd = odd_tensors(parts)
    whole = {name: model[own] for name, own in parts.replacements.items() if name not in odd}
    return Adapter(model.path, spelling, pairs, whole, config, alpha, turned, parts.stray)


def _checked_alpha(model: Model, value: Any) -> float:
    """Return an alpha as float; FormatError if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FormatError(f"{model.path}: alpha is {value!r}; expected a number")
    return float(value)


def _make_pair(
    model: Model,
    module: str,
    parts: Mapping[str, View],
    spelling: str,
    config: Mapping[str, Any],
    alpha: float,
) -> StoredPair:
    """Return one pair with its rank and scale; FormatError for a scale that is no number.

    The scale is 1 where nothing says it, which is good for a comparison alone.

    `parts` are its tensors by kind ("a", "b", "alpha", ...), which fit each other (`pair_fault`);
    `alpha` is the adapter's.
    """
    if spelling == "mlx":
        return _make_mlx_pair(model, module, parts, config)
    embedding = "embedding_a" in parts or "embedding_b" in parts
    turned = spelling == "gguf" and module == GGUF_EMBEDDING
    rank = parts["embedding_b" if embedding else "b"].shape[1]
    embedding = embedding or turned
    _check_lengths(model, module, parts, parts["b"].shape[0] if "b" in parts else 0)
    # Each spelling has its own place for the scale.
    if spelling == "kohya":
        own = float(parts["alpha"].numpy().reshape(-1)[0]) if "alpha" in parts else float(rank)
        return StoredPair(module, parts, rank, _checked_alpha(model, own) / rank)
    parameters = target_parameters(config, unwrap_module(module)[0]) if spelling == "peft" else ()
    if parameters:
        if parts.keys() != {"a", "b"}:
            raise FormatError(f"{model.path}: {module}: {', '.join(parts)}; expected a and b")
        return StoredPair(module, parts, rank, math.nan, parameters=parameters)
    # PEFT and GGUF: alpha by the configuration. Without one nothing says PEFT's scale.
    if spelling == "peft" and not config:
        return StoredPair(module, parts, rank, 1.0, embedding)
    own = _checked_alpha(model, value_by_pattern(config.get("alpha_pattern"), module, alpha))
    if spelling == "gguf" and not own:
        own = float(rank)  # llama.cpp's rule: no alpha, no scale
    return StoredPair(module, parts, rank, adapter_scale(config, own, rank), embedding)


def _make_mlx_pair(
    model: Model, module: str, parts: Mapping[str, View], config: Mapping[str, Any]
) -> StoredPair:
    """Return the two factors of one module of an MLX adapter, with their rank and scale.

    `parts` are its tensors by kind, which fit each other (`pair_fault`); the scale is that of
    `config`, which `merge_obstacle` has checked. Raises FormatError for DoRA lengths that are not
    one for each row of the weight.
    """
    table = is_mlx_table(module)
    rows = parts["a"].shape[0] if table else parts["b"].shape[1]
    _check_lengths(model, module, parts, rows)
    rank = parts["b"].shape[0]
    scale = float(mlx_parameter(config, "scale"))
    return StoredPair(module, parts, rank, scale, embedding=table, turned=True)


def pair_scale(adapter: Adapter, parameter: str) -> tuple[int, float]:
    """Return (rank, scale) that PEFT's configuration gives a single parameter.

    Raises FormatError for a rank that is not a whole number from 1 on, and for an alpha that is not
    a number.
    """
    config = adapter.config
    rank = value_by_pattern(config.get("rank_pattern"), parameter, config.get("r"))
    alpha = value_by_pattern(config.get("alpha_pattern"), parameter, adapter.alpha)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise FormatError(f"{adapter.path}: r of {parameter} is {rank!r}; expected a rank")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise FormatError(f"{adapter.path}: alpha of {parameter} is {alpha!r}; expected a number")
    return rank, adapter_scale(config, float(alpha), rank)


def _check_lengths(model: Model, module: str, parts: Mapping[str, View], rows: int) -> None:
    """Raise FormatError for a DoRA magnitude that has not one number for each of `rows` rows."""
    lengths = parts.get("magnitude")
    if lengths is None:
        return
    if lengths.shape not in ((rows,), (rows, 1)):
        raise FormatError(
            f"{model.path}: {module}: {lengths.name} is {list(lengths.shape)}; expected a length "
            f"for each of {rows} rows, [{rows}] or [{rows}, 1]"
        )


def read_factors(pair: StoredPair) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a pair's LoRA factors (A [r, in], B [out, r]) as float64.

    FormatError for values that are NaN or infinite.
    """
    if pair.joined:
        return _joined_factors(pair.joined)
    for part in pair.parts.values():
        values = part.numpy()
        wrong = int((~np.isfinite(values)).sum())
        if wrong:
            raise FormatError(
                f"{part.name}: holds {wrong} NaN or infinite numbers of {values.size}; expected "
                "finite factors: get the adapter again"
            )
    if pair.turned:
        a, b = pair.parts["a"].numpy(), pair.parts["b"].numpy()
        a, b = (b, a) if pair.embedding else (a.T, b.T)
    elif pair.embedding and "a" in pair.parts:
        a, b = pair.parts["b"].numpy().T, pair.parts["a"].numpy()
    elif pair.embedding:
        a, b = pair.parts["embedding_b"].numpy().T, pair.parts["embedding_a"].numpy().T
    else:
        a, b = pair.parts["a"].numpy(), pair.parts["b"].numpy()
    if pair.halves:
        b = np.roll(b, len(b) // 2, axis=0)
    return a.astype(np.float64), b.astype(np.float64)


def _joined_factors(
    pairs: Sequence[StoredPair],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return factors (A [sum of ranks, in], B [sum of outputs, sum of ranks]) of joined LoRA pairs.

    B is block-diagonal and contains each pair's scale, so that B @ A is the change of a module that
    joins the outputs of the pairs, in their order.
    """
    factors = [(pair.scale, *read_factors(pair)) for pair in pairs]
    made = np.zeros((sum(len(b) for _, _, b in factors), sum(len(a) for _, a, _ in factors)))
    row = column = 0
    for scale, a, b in factors:
        made[row : row + len(b), column : column + len(a)] = scale * b
        row, column = row + len(b), column + len(a)
    return np.concatenate([a for _, a, _ in factors]), made
