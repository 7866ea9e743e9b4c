"""An adapter in another spelling: PEFT's folder to GGUF and back; kohya's file to either."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.adapters.placing import LowRank, moved, placed, whole_tensors
from aprfmt.adapters.reading import Adapter, Stored, read_adapter
from aprfmt.base.protocols import Note, TensorInfo, Typed
from aprfmt.codecs import encode
from aprfmt.conversion.options import ConversionReport, TensorOutcome
from aprfmt.conversion.outputs import make_info
from aprfmt.errors import ConversionError, OutputError
from aprfmt.formats import FORMATS
from aprfmt.formats.atomic import FileSet
from aprfmt.model import Model, open_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def convert_adapter(
    src: Path, dst: Path, base: Path, *, force: bool = False, dry_run: bool = False
) -> ConversionReport:
    """Write an adapter as a GGUF or a PEFT folder, by the name of `dst`.

    The base gives names, and the order of rows. Factors keep their dtype and values. Raises
    ConversionError for what the other spelling cannot say: DoRA and embeddings in GGUF, scales
    that are no one alpha.
    """
    to_gguf = dst.suffix.lower() == ".gguf"
    opened, adapter = read_adapter(src)
    with opened, open_model(base) as model:
        named = _named(model, "gguf" if to_gguf else "hf")
        rows = dict(_outputs(adapter, model, named, to_gguf))
        metadata, texts = (_gguf if to_gguf else _peft)(adapter, model, rows)
        files, sizes = _write(dst, rows, metadata, texts, to_gguf, force, dry_run)
    outcomes = tuple(
        TensorOutcome(name, "bytes", info.encoding, info.encoding, info.shape, info.nbytes)
        for name, (info, _) in rows.items()
    )
    return ConversionReport(
        src, opened.format, dst, "gguf" if to_gguf else "safetensors", files, model.spec.name,
        outcomes, (Note("note", str(src), f"an adapter for {model.spec.name}"),), None, None, sizes,
    )  # fmt: skip


def _named(model: Model, style: str) -> Mapping[str, str]:
    """Return the names that a style has for the base's stored weights, by its own names."""
    from aprfmt.arch.draft import stored_groups

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


Row = tuple[TensorInfo, bytes]


def _outputs(
    adapter: Adapter, model: Model, named: Mapping[str, str], to_gguf: bool
) -> Iterator[tuple[str, Row]]:
    """Yield the tensors to write, each with its bytes; the factors keep their dtype."""
    whole = whole_tensors(adapter, model)
    if whole:
        raise ConversionError(
            f"{adapter.path}: {next(iter(whole))} is a whole tensor (modules_to_save), "
            "which only a merge can take along"
        )
    pairs = dict(zip(placed(adapter, model), adapter.pairs.values(), strict=True))
    for name, made in _in_style(adapter, model, "gguf" if to_gguf else "hf").items():
        stored = pairs[name]
        other = named.get(name)
        if other is None or stored.embedding or (to_gguf and made.magnitude is not None):
            dora = "DoRA" if made.magnitude is not None else ""
            what = "an embedding's pair" if stored.embedding else dora
            raise ConversionError(
                f"{adapter.path}: {stored.module}: {what or 'a weight laid out otherwise'} has no "
                f"form in {'GGUF' if to_gguf else 'PEFT'}: merge it (convert BASE OUT --adapter)"
            )
        module = _PREFIX + other.removesuffix(".weight")
        ends = (f"{other}.lora_a", f"{other}.lora_b")
        if not to_gguf:
            ends = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
        for end, part, values in zip(ends, ("a", "b"), (made.a, made.b), strict=True):
            yield end, _row(end, stored, part, values)
        if made.magnitude is not None:
            end = f"{module}.lora_magnitude_vector"
            yield end, _row(end, stored, "magnitude", made.magnitude)


def _in_style(adapter: Adapter, model: Model, style: str) -> Mapping[str, LowRank]:
    """Return the pairs by the base's names, their rows in the order of a style."""
    from aprfmt.arch.draft import stored_groups

    found = placed(adapter, model)
    if model.style == style:
        return found
    turned = {}
    for name, pair in found.items():
        keys = model.roles_of.get(name, ())
        here = stored_groups(model.spec, model.style or "", keys, model.hyper)[0]
        there = stored_groups(model.spec, style, keys, model.hyper)[0]
        turned[name] = moved(pair, here, there, model, adapter)
    return turned


def _row(name: str, stored: Stored, part: str, values: "np.ndarray[Any, Any]") -> Row:
    kind = stored.parts[part].encoding
    held = np.ascontiguousarray(values, np.float32)
    return make_info(name, held.shape, kind), encode(kind, held)[""]


def _alpha(adapter: Adapter) -> float:
    """Return the one alpha by which alpha / r is the scale of every pair; ConversionError."""
    every = {pair.scale * pair.rank for pair in adapter.pairs.values()}
    found = every.pop()
    if any(not math.isclose(found, other, rel_tol=1e-7) for other in every):
        raise ConversionError(
            f"{adapter.path}: the scales of its pairs are no one alpha divided by their ranks, "
            "which is all that the other form can say: merge it"
        )
    return found


def _gguf(
    adapter: Adapter, model: Model, rows: Mapping[str, Row]
) -> tuple[dict[str, Any], dict[str, str]]:
    base = adapter.config.get("base_model_name_or_path")
    return {
        "general.architecture": model.spec.called["gguf"][0],
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": Typed(_alpha(adapter), "float32"),
        **({"general.base_model.count": Typed(1, "uint32"), "general.base_model.0.name": base}
           if isinstance(base, str) else {}),
    }, {}  # fmt: skip


def _peft(
    adapter: Adapter, model: Model, rows: Mapping[str, Row]
) -> tuple[dict[str, Any], dict[str, str]]:
    ranks = {
        name.removeprefix(_PREFIX).removesuffix(".lora_A.weight"): info.shape[0]
        for name, (info, _) in rows.items()
        if name.endswith(".lora_A.weight")
    }
    rank = max(ranks.values(), key=list(ranks.values()).count)
    alpha = _alpha(adapter)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(adapter.config.get("base_model_name_or_path", "")),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "rank_pattern": {name: found for name, found in ranks.items() if found != rank},
        "use_rslora": False,
        "use_dora": any(name.endswith("magnitude_vector") for name in rows),
        "target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    return {"format": "pt"}, {CONFIG: json.dumps(config, indent=2, sort_keys=True) + "\n"}


def _write(
    dst: Path, rows: Mapping[str, Row], metadata: Mapping[str, Any], texts: Mapping[str, str],
    to_gguf: bool, force: bool, dry_run: bool,
) -> tuple[tuple[Path, ...], dict[Path, int]]:  # fmt: skip
    """Write the file, or the folder; everything is published together."""
    if not to_gguf and dst.suffix:
        raise ConversionError(f"{dst}: an adapter is written as .gguf, or as a folder for PEFT")
    weights = dst if to_gguf else dst / WEIGHTS
    beside = {dst / name: text.encode() for name, text in texts.items()}
    if not to_gguf and dst.exists() and not force:
        raise OutputError(f"{dst}: exists; use --force to replace it")
    spec = FORMATS["gguf" if to_gguf else "safetensors"]
    infos = {name: info for name, (info, _) in rows.items()}
    if dry_run:
        sizes = {weights: sum(info.nbytes for info in infos.values())}
        return (weights, *beside), {**sizes, **{path: len(text) for path, text in beside.items()}}
    own = (WEIGHTS, CONFIG)
    with FileSet(force=force, folder=None if to_gguf else dst, ours=lambda n: n in own) as files:
        with spec.open_sink(weights, force=force, files=files) as sink:
            ordered = spec.order(list(infos.values()))
            sink.plan(metadata, ordered)
            for info in ordered:
                sink.write(info.name, iter([memoryview(rows[info.name][1])]))
        for path, text in beside.items():
            files.create(path).write(text)
    every = (weights, *beside)
    return every, {path: path.stat().st_size for path in every}
