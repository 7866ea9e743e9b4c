"""docs/architectures.md, printed from the tables: `python -m aprfmt.arch.page`."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from aprfmt.arch import ARCHS
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.base.markdown import table

_HEAD = """# Architectures

Printed from the tables in `aprfmt/arch/` by `python -m aprfmt.arch.page`.

Sources of the rows: the arithmetic and the names in config.json are those of transformers
(`configuration_*.py` and `modeling_*.py` of 5.23.0; a tiny random model of every architecture
agrees to 1e-12 in float64). Tensor names in GGUF are those of the `gguf` package's name map.
Changes of weights in a GGUF are those of llama.cpp's converter (`conversion/*.py`) and of the
graphs that read its files (`src/models/*.cpp`).

## What is known

Level `full`: names, shapes, layout, hyperparameters and the forward pass, on all backends (numpy,
torch, cupy); float64 logits are within 1e-12 of transformers', every capture point too. An encoder
has no logits: `trace --points pooled` is its embedding, and `run`, `eval` and `parity` refuse it
(exit 2). Level `names`: all but the forward pass, which is what `convert`, `diff`, `hash`,
`validate` and `quantize` need; a tiny model of transformers' comes back from every format bit by
bit. Commands that run a model refuse one of level `names` (exit 2).

"""
_DRAFTS = """
## Draft heads

A head for multi-token prediction (MTP) is one more layer, which reads the model's hidden state of a
token and the embedding of the next and guesses the one after it. `eval --draft` runs it and counts
the guesses that the model itself would make, `trace --draft` shows its capture points. In a GGUF it
is block `{N}`, the number of the model's layers, with `blk.{N}.nextn.*` beside the layer's tensors;
converting to GGUF leaves it out by `--drop`. Its names in Hugging Face folders (embedding and head
are the model's where it has none):

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


def page() -> str:
    """Return the page as Markdown."""
    specs = [ARCHS[name] for name in ARCHS.own]
    known = [(spec.name, spec.level, _types(spec), _gguf(spec), _runs(spec)) for spec in specs]
    full = [spec for spec in specs if spec.level == "full"]
    blocks = [(spec.name, _called(spec), _unlike(spec), _lost(spec)) for spec in full]
    layouts = [row for spec in specs for row in _layouts(spec)]
    drafts = [(spec.name, _code([f"{names.layer}*"]), _code(list(names.own)))
              for spec in specs if (names := spec.draft.get("hf")) is not None]  # fmt: skip
    return (
        _HEAD
        + table(("architecture", "level", "model types", "GGUF", "runs on"), known)
        + _DRAFTS
        + table(("architecture", "layer", "other tensors"), drafts)
        + _BLOCKS
        + table(("architecture", "called", "unlike llama", "lost in GGUF"), blocks)
        + _LAYOUTS
        + table(("architecture", "style", "stored", "roles", "steps"), layouts)
    )


def _types(spec: ArchSpec) -> str:
    """Return the model types of config.json; the other names are classes."""
    return _code([name for name in spec.called.get("hf", ()) if name == name.lower()])


def _gguf(spec: ArchSpec) -> str:
    return _code(spec.called.get("gguf", ())) or "-"


def _runs(spec: ArchSpec) -> str:
    return "numpy torch cupy" if spec.level == "full" else "-"


def _called(spec: ArchSpec) -> str:
    """Return the names in config.json and in GGUF."""
    return "; ".join(
        f"{style} {_code(spec.called[style])}" for style in ("hf", "gguf") if style in spec.called
    )


def _unlike(spec: ArchSpec) -> str:
    base = BlockSpec()
    own = [
        f"{each.name} {getattr(spec.block, each.name)}" for each in fields(BlockSpec)
        if getattr(spec.block, each.name) != getattr(base, each.name)
    ]  # fmt: skip
    return ", ".join(own)


def _lost(spec: ArchSpec) -> str:
    return _code(list(dict.fromkeys(loss.name for loss in spec.lost if loss.style == "gguf")))


def _layouts(spec: ArchSpec) -> Iterator[tuple[str, ...]]:
    for style, bindings in spec.bindings.items():
        for row in bindings:
            if row.steps:
                steps = ", ".join(str(step) for step in row.steps)
                yield spec.name, style, _code(row.stored), _code(row.roles), steps


def _code(names: Sequence[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(page(), end="")
