"""Recognizes files of writers that are known to have written wrong files.

One row a fault. What cannot be told from the file itself has no row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, Level, Result
from aprfmt.model import Model


@dataclass(frozen=True, slots=True)
class WriterFault:
    """A writer that wrote wrong files: who and when, what is wrong, and the source of that.

    `formats` are those it wrote. `wrote(model)` returns whether a model is one of these wrong
    files. `reason` is what is wrong, `todo` what a user can do.
    """

    id: str
    formats: tuple[str, ...]
    writer: str
    reason: str
    source: str
    todo: str
    wrote: Callable[[Model], bool]
    level: Level = "fail"


def _is_realizar_gguf_import(model: Model) -> bool:
    """Return whether an APR file is one that realizar's GGUF converter wrote.

    Its traits: the flag QUANTIZED alone, no footer, GGUF names, its own key for the layer count.
    """
    source: Any = model.source
    return (
        source.header.flags == 0x0020
        and source.footer_state() == "missing"
        and "num_hidden_layers" in model.metadata
        and any(name.startswith("blk.") or name == "token_embd.weight" for name in model)
    )


def _is_entrenar_checkpoint(model: Model) -> bool:
    """Return whether an APR file is a training checkpoint of entrenar."""
    return model.metadata.get("format") == "entrenar-checkpoint"


def _has_legacy_codes(model: Model) -> bool:
    """Return whether a tensor of an APR file has another dtype code than its encoding has now."""
    source: Any = model.source
    entries = [entry for shard in source.shards for entry in shard.parsed.entries]
    rows = ((find_encoding(entry.info.encoding), entry.code) for entry in entries)
    return any(row.known and row.apr != code for row, code in rows)


def _lacks_pre_tokenizer(model: Model) -> bool:
    """Return whether a GGUF with a BPE vocabulary does not name its pre-tokenizer."""
    kind = model.metadata.get("tokenizer.ggml.model")
    tokens = "tokenizer.ggml.tokens" in model.metadata
    return kind == "gpt2" and tokens and "tokenizer.ggml.pre" not in model.metadata


FAULTS: tuple[WriterFault, ...] = (
    WriterFault(
        "apr-gguf-order",
        ("apr",),
        "realizar's GGUF converter, to early 2026",
        "matrices have their dimensions in GGUF's order, so rows and columns are exchanged",
        "layout of its files against the reference writer's: flags 0x0020, no footer, GGUF names",
        "import the GGUF again",
        _is_realizar_gguf_import,
    ),
    WriterFault(
        "apr-checkpoint",
        ("apr",),
        "entrenar, training checkpoints",
        "linear weights are stored [in, out], and its own loader transposes them by name",
        "metadata format entrenar-checkpoint",
        "export the checkpoint with the tool that made it",
        _is_entrenar_checkpoint,
    ),
    WriterFault(
        "apr-codes",
        ("apr",),
        "APR writers of January and February 2026",
        "dtype codes meant other encodings then; sizes decide here, and 8 and 9 can mislead",
        "aprender GH-187, GH-191, GH-438",
        "compare values with the source, or import again",
        _has_legacy_codes,
        "warning",
    ),
    WriterFault(
        "gguf-no-pre",
        ("gguf",),
        "llama.cpp's converter before May 2024",
        "tokenizer.ggml.pre is missing, so nobody knows how the text is to be split",
        "llama.cpp pull request 6920 and issue 7476",
        "convert again, or set the key",
        _lacks_pre_tokenizer,
    ),
)


def check_writer(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each known fault of a writer that the file shows.

    `found` says how many faults are known for files of its format.
    """
    faults = [fault for fault in FAULTS if ctx.model.format in fault.formats]
    findings = [
        CheckFinding(
            ctx.where,
            f"a file of {fault.writer}: {fault.reason} ({fault.source})",
            "a file of a writer not known to be faulty",
            fault.todo,
            fault.level,
        )
        for fault in faults
        if fault.wrote(ctx.model)
    ]
    return Result(f"{len(faults)} faults looked for", findings)
