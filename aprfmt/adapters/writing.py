"""Writes an adapter in another spelling: PEFT's folder, a GGUF, or kohya's file.

A *pair* is the factors A and B of one module; a *part* of it is one tensor: "a", "b", "alpha", a
magnitude.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.adapters.merging import stray_notes
from aprfmt.adapters.pair_placement import (
    Array,
    LowRank,
    place_pairs,
    reorder_rows,
    whole_tensors,
    with_base_names,
)
from aprfmt.base.protocols import Note, TensorInfo, TypedValue
from aprfmt.codecs import encode
from aprfmt.conversion.outputs import make_info
from aprfmt.conversion.report import ConversionReport, TensorOutcome
from aprfmt.errors import ConversionError, OutputError
from aprfmt.formats import FORMATS, open_source
from aprfmt.formats.atomic import FileSet
from aprfmt.model import Model, open_model
from aprfmt.model.adapter_parts import PREFIX, is_saved_base
from aprfmt.model.adapter_reading import Adapter, StoredPair, read_adapter
from aprfmt.model.sidecar_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_KOHYA = "lora_te_"  # sd-scripts' prefix of a language model's modules
NamedBytes = tuple[TensorInfo, bytes]
Texts = dict[str, str]


@dataclass(frozen=True)
class Spelling:
    """How a kind of adapter is written: its names, the container, and its metadata.

    `style` is that of the base's names. `names(name, pair, stored)` yields (tensor name, the part
    of the stored pair whose dtype the tensor has, its values). `facts` returns metadata and text
    files. `holds` are the special kinds of pairs that can be written.
    """

    called: str
    container: str
    style: str
    names: Callable[[str, LowRank, StoredPair], Iterator[tuple[str, str, Array]]]
    facts: Callable[[Adapter, Model, Mapping[str, NamedBytes]], tuple[dict[str, Any], Texts]]
    holds: frozenset[str]  # of "DoRA" and "embedding"


def convert_adapter(
    src: Path, dst: Path, base: Path, *, force: bool = False, dry_run: bool = False
) -> ConversionReport:
    """Write the adapter `src` as GGUF, kohya's .safetensors or PEFT folder; return the report.

    `dst`'s extension decides which; with `force` it may exist, with `dry_run` nothing is written.
    The base gives names, and the order of rows. Factors keep their dtype and values. Raises
    ConversionError for what the other spelling cannot express: in GGUF DoRA, and scales that differ
    from one alpha; in kohya's names embeddings.
    """
    # The extension of `dst` selects the spelling.
    spelling = SPELLINGS.get(dst.suffix.lower())
    if spelling is None:
        raise ConversionError(
            f"{dst}: an adapter is written as .gguf, as .safetensors with kohya's names, or as a "
            "folder for PEFT"
        )
    # The tensors in that spelling, by the base's names.
    opened, adapter = read_adapter(src)
    with opened, open_model(base) as model:
        adapter, relation = with_base_names(adapter, model)
        rows = dict(
            _output_tensors(adapter, model, _names_in_style(model, spelling.style), spelling)
        )
        metadata, texts = spelling.facts(adapter, model, rows)
        files, sizes = _write_adapter(dst, rows, metadata, texts, spelling, force, dry_run)
    # Read back what was written, and report each tensor.
    verified = None if dry_run else _verify_written(files[0], rows)
    outcomes = tuple(
        TensorOutcome(name, "bytes", info.encoding, info.encoding, info.shape, info.nbytes)
        for name, (info, _) in rows.items()
    )
    renamed = () if relation is None else (Note("note", str(src), relation.says),)
    note = Note("note", str(src), f"an adapter for {model.spec.name}")
    return ConversionReport(
        src,
        opened.format,
        dst,
        spelling.container,
        files,
        model.spec.name,
        outcomes,
        (note, *stray_notes(adapter), *renamed),
        verified,
        None,
        sizes,
    )


def _verify_written(weights: Path, rows: Mapping[str, NamedBytes]) -> int:
    """Read the written weights back and return how many tensors there are.

    Raises ConversionError for one that differs from `rows`, {name: (info, bytes)}.
    """
    with open_source(weights) as written:
        for name, (_, raw) in rows.items():
            if name not in written.tensors or written.tensors[name].raw() != raw:
                raise ConversionError(f"{weights}: {name} is not what was written; write it again")
    return len(rows)


def _names_in_style(model: Model, style: str) -> Mapping[str, str]:
    """Return {stored name: name in the naming style `style`} of the base's weights.

    Weights that are several tensors in either style are left out.
    """
    from aprfmt.arch.draft_head import stored_groups

    if model.style == style:
        return {name: name for name in model}
    found = {}
    for key, view in model.roles.items():
        groups = (
            stored_groups(model.spec, style, [key], model.hyper) if len(view.names) == 1 else []
        )
        if groups and len(groups[0].stored) == 1:
            found[view.names[0]] = groups[0].stored[0]
    return found


def _output_tensors(
    adapter: Adapter, model: Model, named: Mapping[str, str], spelling: Spelling
) -> Iterator[tuple[str, NamedBytes]]:
    """Yield (name, (info, bytes)) of the tensors to write; factors keep their dtype.

    `named` are the base's weights by stored name, under the names of the spelling's style. Raises
    ConversionError for what the spelling cannot express.
    """
    # Refuse what only a merge can express.
    whole = [name for name in adapter.replacements if not is_saved_base(name, adapter.config)]
    if whole:
        raise ConversionError(
            f"{adapter.path}: {', '.join(whole[:3])} {'is' if len(whole) == 1 else 'are'} whole "
            f"(modules_to_save, or saved for added tokens): {spelling.called} cannot hold that, "
            "only a merge can take it along"
        )
    experts = [pair.module for pair in adapter.pairs.values() if pair.parameters]
    if experts:
        raise ConversionError(
            f"{adapter.path}: {experts[0]} is a pair for single parameters (target_parameters), "
            f"which has no form in {spelling.called} here: merge it (convert BASE OUT --adapter)"
        )
    whole_tensors(adapter, model)  # what is saved of the base has to be this base's
    # Each pair under the name that the spelling has for its weight.
    pairs = dict(zip(place_pairs(adapter, model), adapter.pairs.values(), strict=True))
    for name, made in _pairs_in_style(adapter, model, spelling.style).items():
        stored = pairs[name]
        other = named.get(name)
        kinds = {"DoRA": made.magnitude is not None, "embedding": stored.embedding}
        lacking = [kind for kind, has in kinds.items() if has and kind not in spelling.holds]
        if other is None or lacking:
            what = f"{lacking[0]} has" if lacking else "a weight laid out otherwise has"
            raise ConversionError(
                f"{adapter.path}: {stored.module}: {what} no form in {spelling.called}: merge it "
                "(convert BASE OUT --adapter)"
            )
        for end, part, values in spelling.names(other, made, stored):
            yield end, _encode_tensor(end, stored, part, values)


def _gguf_names(name: str, pair: LowRank, stored: StoredPair) -> Iterator[tuple[str, str, Array]]:
    """Yield (tensor name, part of the pair, values) of a pair as llama.cpp names its tensors."""
    turned = stored.embedding
    yield f"{name}.lora_a", "a", pair.b if turned else pair.a
    yield f"{name}.lora_b", "b", pair.a.T if turned else pair.b


def _peft_names(name: str, pair: LowRank, stored: StoredPair) -> Iterator[tuple[str, str, Array]]:
    """Yield (tensor name, part of the pair, values) of a pair as PEFT names its tensors."""
    module = PREFIX + name.removesuffix(".weight")
    if stored.embedding:
        yield f"{module}.lora_embedding_A", "a", pair.b.T
        yield f"{module}.lora_embedding_B", "b", pair.a.T
    else:
        yield f"{module}.lora_A.weight", "a", pair.a
        yield f"{module}.lora_B.weight", "b", pair.b
    if pair.magnitude is not None:
        yield f"{module}.lora_magnitude_vector", "magnitude", pair.magnitude


def _kohya_names(name: str, pair: LowRank, stored: StoredPair) -> Iterator[tuple[str, str, Array]]:
    """Yield (tensor name, part of the pair, values) of a pair as kohya names it, with its alpha."""
    module = _KOHYA + name.removesuffix(".weight").replace(".", "_")
    yield f"{module}.lora_down.weight", "a", pair.a
    yield f"{module}.lora_up.weight", "b", pair.b
    yield f"{module}.alpha", "alpha", np.array(pair.scale * stored.rank)
    if pair.magnitude is not None:
        yield f"{module}.dora_scale", "magnitude", pair.magnitude[:, None]


def _pairs_in_style(adapter: Adapter, model: Model, style: str) -> Mapping[str, LowRank]:
    """Return {name of the base model's tensor: its low-rank change} of an adapter.

    The rows of each change are in the order in which files of the naming style `style` ("hf" or
    "gguf") store the tensor's rows.
    """
    from aprfmt.arch.draft_head import stored_groups

    found = place_pairs(adapter, model)
    if model.style == style:
        return found
    turned = {}
    for name, pair in found.items():
        keys = model.roles_of.get(name, ())
        here = stored_groups(model.spec, model.style or "", keys, model.hyper)[0]
        there = stored_groups(model.spec, style, keys, model.hyper)[0]
        turned[name] = reorder_rows(pair, here, there, model, adapter)
    return turned


def _encode_tensor(name: str, stored: StoredPair, part: str, values: Array) -> NamedBytes:
    """Return (info, bytes) of a tensor to write, in the dtype that its part of the pair had.

    `part` names the part of `stored`. F32 for a part that the adapter's file does not have.
    """
    like = stored.parts.get(part) or stored.parts.get(f"embedding_{part}")
    kind = "F32" if like is None else like.encoding
    held = np.ascontiguousarray(values, np.float32).reshape(values.shape)
    return make_info(name, held.shape, kind), encode(kind, held)[""]


def _common_alpha(adapter: Adapter) -> float:
    """Return the one alpha that gives every pair its scale; ConversionError if there is none."""
    every = {pair.scale * pair.rank for pair in adapter.pairs.values()}
    found = every.pop()
    if any(not math.isclose(found, other, rel_tol=1e-7) for other in every):
        raise ConversionError(
            f"{adapter.path}: the scales of its pairs are no one alpha divided by their ranks, "
            "which is all that the other form can say: merge it"
        )
    return found


def _gguf_facts(
    adapter: Adapter, model: Model, rows: Mapping[str, NamedBytes]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (metadata, {}) of an adapter in GGUF: architecture, type, alpha, name of the base.

    There are no text files. `rows` is not used here.
    """
    base = adapter.config.get("base_model_name_or_path")
    return {
        "general.architecture": model.spec.called["gguf"][0],
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": TypedValue(_common_alpha(adapter), "float32"),
        **(
            {"general.base_model.count": TypedValue(1, "uint32"), "general.base_model.0.name": base}
            if isinstance(base, str)
            else {}
        ),
    }, {}


def _peft_facts(
    adapter: Adapter, model: Model, rows: Mapping[str, NamedBytes]
) -> tuple[dict[str, Any], Texts]:
    """Return (metadata, {file name: text}) of PEFT's folder, with its adapter_config.json.

    The config has the most common rank and alpha, and patterns for the other pairs.
    """
    names = _names_in_style(model, "hf")
    pairs = zip(place_pairs(adapter, model), adapter.pairs.values(), strict=True)
    modules = {names[name].removesuffix(".weight"): pair for name, pair in pairs}
    ranks = {name: pair.rank for name, pair in modules.items()}
    alphas = {name: _json_number(pair.scale * pair.rank) for name, pair in modules.items()}
    rank, alpha = _most_common(ranks), _most_common(alphas)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(adapter.config.get("base_model_name_or_path", "")),
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: found for name, found in ranks.items() if found != rank},
        "alpha_pattern": {name: found for name, found in alphas.items() if found != alpha},
        "use_rslora": False,
        "use_dora": any(name.endswith("magnitude_vector") for name in rows),
        "target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    return {"format": "pt"}, {ADAPTER_CONFIG: json.dumps(config, indent=2, sort_keys=True) + "\n"}


def _most_common(values: Mapping[str, float]) -> float:
    """Return the value that most keys have; of equally common ones the first."""
    return max(values.values(), key=list(values.values()).count)


def _json_number(value: float) -> float:
    """Return a whole number as int, others unchanged."""
    near = round(value)
    return near if math.isclose(value, near, rel_tol=1e-12) else value


def _kohya_facts(
    adapter: Adapter, model: Model, rows: Mapping[str, NamedBytes]
) -> tuple[dict[str, Any], Texts]:
    """Return (metadata, {}) of an adapter in kohya's spelling; other parameters are not used."""
    ranks = {str(pair.rank) for pair in adapter.pairs.values()}
    return {
        "ss_network_module": "networks.lora",
        "ss_network_dim": ranks.pop() if len(ranks) == 1 else "Dynamic",
    }, {}


# By the extension of the output; a folder has none.
SPELLINGS: Mapping[str, Spelling] = {
    ".gguf": Spelling("GGUF", "gguf", "gguf", _gguf_names, _gguf_facts, frozenset({"embedding"})),
    ".safetensors": Spelling(
        "kohya's file", "safetensors", "hf", _kohya_names, _kohya_facts, frozenset({"DoRA"})
    ),
    "": Spelling(
        "PEFT", "safetensors", "hf", _peft_names, _peft_facts, frozenset({"DoRA", "embedding"})
    ),
}


def _write_adapter(
    dst: Path,
    rows: Mapping[str, NamedBytes],
    metadata: Mapping[str, Any],
    texts: Texts,
    spelling: Spelling,
    force: bool,
    dry_run: bool,
) -> tuple[tuple[Path, ...], dict[Path, int]]:
    """Write the file or the folder; return (paths, {path: size in bytes}).

    A folder is made if `dst` has no extension. With `dry_run` nothing is written, and the sizes are
    those of the tensors and texts. Raises OutputError for a folder that exists, without `force`.
    """
    in_folder = not dst.suffix
    weights = dst / ADAPTER_WEIGHTS if in_folder else dst
    others = {dst / name: text.encode() for name, text in texts.items()}
    if in_folder and dst.exists() and not force:
        raise OutputError(f"{dst}: exists; use --force to replace it")
    spec = FORMATS[spelling.container]
    infos = {name: info for name, (info, _) in rows.items()}
    if dry_run:
        sizes = {weights: sum(info.nbytes for info in infos.values())}
        return (weights, *others), {**sizes, **{path: len(text) for path, text in others.items()}}
    own = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    with FileSet(force=force, folder=dst if in_folder else None, ours=lambda n: n in own) as files:
        with spec.open_sink(weights, force=force, files=files) as sink:
            ordered = spec.order(list(infos.values()))
            sink.plan(metadata, ordered)
            for info in ordered:
                sink.write(info.name, iter([memoryview(rows[info.name][1])]))
        for path, text in others.items():
            files.create(path).write(text)
    every = (weights, *others)
    return every, {path: path.stat().st_size for path in every}
