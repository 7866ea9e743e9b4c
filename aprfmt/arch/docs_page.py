"""Prints docs/reference/architectures.md from the tables: `python -m aprfmt.arch.docs_page`.

What llama.cpp made of the files is a recorded measurement, docs/reference/llama_cpp.json.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from aprfmt.arch import ARCHS
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.base.markdown import table

_HEAD = """# Architectures

Printed from the tables in `aprfmt/arch/` by `python -m aprfmt.arch.docs_page`.

Sources of the rows: the arithmetic and the names in config.json are those of transformers
(`configuration_*.py` and `modeling_*.py` of 5.23.0; a tiny random model of every architecture
agrees to 1e-12 in float64). Tensor names in GGUF are those of the `gguf` package's name map.
Changes of weights in a GGUF are those of llama.cpp's converter (`conversion/*.py`) and of the
graphs that read its files (`src/models/*.cpp`).

## What is known

A model type is known at one of two levels:

- `full`: names, shapes, layout, hyperparameters and the forward pass, on all backends (numpy,
  torch, cupy)
- `names`: all but the forward pass: `convert`, `diff`, `hash`, `validate` and `quantize` need no
  more. Commands that run a model refuse it (exit 2)

Of a model of level `full`, float64 logits and every capture point are within 1e-12 of
transformers'. A tiny model of level `names` that transformers made comes back from every format
bit by bit.

An encoder has no logits: `trace --points pooled` is its embedding, and `run`, `eval` and `parity`
refuse it (exit 2). Where keys tie at the edge of what an indexer chooses, the first are chosen,
and `index_margin` is 0. PyTorch's topk on a CPU leaves open which it takes. Scores of few heads
often tie at exactly 0.

The columns of the table:

- `measured against`: transformers' float64 logits at every point (level `full`), or the bytes of
  its saved tiny model after GGUF or APR and back.
- `mixtures`: those of `quantize` that a GGUF holds ([list](quantization.md)). They depend on
  roles, not on the architecture.
- `llama.cpp`: what its library computed from a float32 GGUF of that model, as the relative
  distance of its logits, or of an encoder's embedding, to transformers'. `loads` means that the
  file loads and there is nothing to compare. `-` means that there is no GGUF form. A sentence next
  to a distance names a setting that llama.cpp fixes and the model type has otherwise. The tiny
  model then has llama.cpp's setting, or differs by it. A file is refused for a shape that
  llama.cpp fixes.

llama.cpp's GELU is the tanh form in a table of float16 values. With that table in transformers
too, gpt2's 1.7e-04 becomes 2.7e-07 and falcon's 3.3e-04 becomes 3.4e-07. An input between two of
its values leaves up to 1e-04.

### Vision and audio towers

A tower that reads images or sound is, with its projector, an architecture that `--arch` names. Of
a folder of gemma3, `convert FOLDER mmproj.gguf --arch gemma3_vision --drop 'language_model*'`
writes the file that llama.cpp takes by `--mmproj`, and `--drop 'vision_tower*' --drop
'multi_modal_projector*'` writes the text model. `llama.cpp` of a tower is the distance of the rows
that its libmtmd gives to the text model.

Towers, and the models that have them:

- `pixtral_vision`: `llava` with pixtral, and `mistral3`. llama.cpp also asks the file for the row
  of the text's token [IMG_BREAK]: without it, as `convert` says, it does not load the file
- `qwen2_vl_vision`, `qwen2_5_vl_vision`, `qwen3_vl_vision`: the Qwen models of these names, the
  last also of qwen3_vl_moe. Leave out `lm_head.weight` and `model.language_model*`, or `model.*`
  if the tower is below `visual.` alone
- `qwen2_audio_tower`: `qwen2_audio`
- `voxtral_tower`: `voxtral`

Files of other projectors are inspected, compared and copied by their tensors.

### All model types

"""
_DRAFTS = """
## Draft heads

A head for multi-token prediction (MTP) is one more layer. It reads the model's hidden state of a
token and the embedding of the next, and guesses the one after it. `eval --draft` runs it and
counts the guesses that the model itself would make. `trace --draft` shows its capture points. In a
GGUF it is block `{N}`, the number of the model's layers, with `blk.{N}.nextn.*` next to the
tensors of the layer, and `nextn_predict_layers` counts it; `convert` writes it so, as llama.cpp's
converter does, and takes it back. Its roles are those of that layer in every format
(`L{N}.nextn.eh_proj.weight`).

DeepSeek V4's head (`mtp.{I}.*`) is not one of these: two matrices join what it reads, and it has
its own residual streams. aprfmt does not run it. Its tensors have no role: they are kept byte by
byte between Hugging Face folders and APR files, compared by their names, and left out of a GGUF
with `--drop 'mtp.*'`, as llama.cpp's converter leaves them out of the model's file.

Names of the others in Hugging Face folders, `{I}` the head's number (embedding and head are the
model's where it has none):

"""
_BLOCKS = """
## Blocks

The base is llama: RMSNorm before attention and before the MLP, no biases, rope over whole heads in
split halves, grouped queries, a gated MLP. `BlockSpec` in `aprfmt/arch/spec.py` explains each
field. The last column names hyperparameters that a GGUF cannot express.

"""
_LAYOUTS = """
## Layouts

Tensors that a style stores in another layout than the logical weight ([out, in]; q, k and v
separate; gate and up separate; rope in split halves; experts stacked; norms without 1 added). Steps
run from the stored tensors to the logical ones; `{L}` is a layer, `{E}` an expert.

"""


SEEN = Path(__file__).resolve().parents[2] / "docs" / "reference" / "llama_cpp.json"
_KNOWN = (
    "architecture", "level", "model types", "GGUF", "mixtures", "runs on", "measured against",
    "llama.cpp",
)  # fmt: skip


def architectures_page() -> str:
    """Return the Markdown text of docs/reference/architectures.md."""
    specs = [ARCHS[name] for name in ARCHS.own]
    seen = json.loads(SEEN.read_text())
    known = [
        (
            spec.name,
            spec.level,
            _code(_hf_types(spec)),
            _code(spec.called.get("gguf", ())) or "-",
            "all" if "gguf" in spec.called else "-",
            "numpy torch cupy" if spec.level == "full" else "-",
            _measured_text(spec),
            _llama_cpp_text(spec, seen["rows"]),
        )
        for spec in specs
    ]
    full = [spec for spec in specs if spec.level == "full"]
    blocks = [
        (spec.name, _names_text(spec), _block_differences(spec), _lost_in_gguf(spec))
        for spec in full
    ]
    layouts = [row for spec in specs for row in _layout_rows(spec)]
    drafts = [
        (spec.name, _code([f"{names.layer}*"]), _code(list(names.tensors)))
        for spec in specs
        if (names := spec.draft.get("hf")) is not None
    ]
    return (
        _HEAD
        + model_count()
        + f"llama.cpp: {seen['library']}.\n"
        + f"`python -m tests.arch.seen --write docs/reference/{SEEN.name}` looks anew.\n\n"
        + table(_KNOWN, known)
        + _DRAFTS
        + table(("architecture", "layer", "other tensors"), drafts)
        + _BLOCKS
        + table(("architecture", "called", "unlike llama", "lost in GGUF"), blocks)
        + _LAYOUTS
        + table(("architecture", "style", "stored", "roles", "steps"), layouts)
    )


def _measured_text(spec: ArchSpec) -> str:
    """Return what was compared with transformers for an architecture, and the tolerance."""
    if spec.level == "names":
        return "bytes, equal"
    return "logits, 1e-12" if spec.block.head != "none" else "embedding, 1e-12"


def _llama_cpp_text(spec: ArchSpec, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what llama.cpp made of an architecture's file: loads, refuses, or the distance.

    `rows` are the recorded measurements by architecture.
    """
    if "gguf" not in spec.called:
        return "-"
    row = rows.get(spec.name)
    if row is None:
        return "not tried"
    if not row["loads"]:
        return f"refuses the tiny model: {row['why']}"
    result = f"{row['distance']:.1e}" if "distance" in row else "loads"
    return f"{result} ({row['because']})" if "because" in row else result


def model_types() -> frozenset[str]:
    """Return the model types of config.json that any architecture here is for."""
    return frozenset(name for arch in ARCHS.own for name in _hf_types(ARCHS[arch]))


def uniquely_named_archs() -> frozenset[str]:
    """Return the architectures with a stored name or layout step that no other one has."""
    users: dict[object, set[str]] = defaultdict(set)
    for name in ARCHS.own:
        for style, bindings in ARCHS[name].bindings.items():
            for row in bindings:
                steps = tuple(str(step) for step in row.steps)
                users[style, row.stored, row.roles, steps].add(name)
    return frozenset(next(iter(found)) for found in users.values() if len(found) == 1)


def model_count() -> str:
    """Return a paragraph with the numbers of architectures and model types."""
    forward = sum(ARCHS[name].level == "full" for name in ARCHS.own)
    return (
        f"{len(ARCHS.own)} architectures for {len(model_types())} model types, {forward} of them "
        f"with a forward pass; {len(uniquely_named_archs())} have names or steps that no "
        f"other one has.\n"
    )


def _hf_types(spec: ArchSpec) -> list[str]:
    """Return the model types of config.json of an architecture, without its class names."""
    return [name for name in spec.called.get("hf", ()) if name == name.lower()]


def _names_text(spec: ArchSpec) -> str:
    """Return the names in config.json and in GGUF as Markdown code, by style."""
    return "; ".join(
        f"{style} {_code(spec.called[style])}" for style in ("hf", "gguf") if style in spec.called
    )


def _block_differences(spec: ArchSpec) -> str:
    """Return the fields of the block spec that differ from llama's, with their values."""
    base = BlockSpec()
    own = [
        f"{each.name} {getattr(spec.block, each.name)}"
        for each in fields(BlockSpec)
        if getattr(spec.block, each.name) != getattr(base, each.name)
    ]
    return ", ".join(own)


def _lost_in_gguf(spec: ArchSpec) -> str:
    """Return the hyperparameters that a GGUF cannot express, as Markdown code."""
    return _code(list(dict.fromkeys(loss.name for loss in spec.lost if loss.style == "gguf")))


def _layout_rows(spec: ArchSpec) -> Iterator[tuple[str, ...]]:
    """Yield (architecture, style, stored names, roles, steps) of bindings with layout steps."""
    for style, bindings in spec.bindings.items():
        for row in bindings:
            if row.steps:
                steps = ", ".join(str(step) for step in row.steps)
                yield spec.name, style, _code(row.stored), _code(row.roles), steps


def _code(names: Sequence[str]) -> str:
    """Return names as Markdown code, separated by spaces."""
    return " ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(architectures_page(), end="")
