"""A file of a packing library that states the packing otherwise than config.json.

AutoGPTQ, GPTQModel and AutoAWQ read their own file (quantize_config.json, quant_config.json) before
config.json; transformers, vLLM and aprfmt read config.json's section. So one of them reads the same
bytes as other weights.
"""

import json
import shlex
from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.model import Model
from aprfmt.model.packing import PackingConflict, changes_weights, packing_conflicts, stated_packing

CAUSE_ROWS = (
    Cause(
        "packing_file", "config", "bug",
        "quantize_config.json or quant_config.json states another packing than config.json: "
        "AutoGPTQ, GPTQModel and AutoAWQ go by the first, transformers and vLLM by the second.",
        "Bits, group size, order, symmetry or format in both files of one folder.",
        "Nothing is made again: config.json's values are those that the weights are read by.",
        most="located",
    ),
)  # fmt: skip


def packing_file_findings(model: Model, other: Model, side: str) -> Iterator[Finding]:
    """Yield one finding where a packing library's file and config.json state different packings.

    `model` is the one judged, `side` its letter ("A" or "B"). Yields nothing where `other` has the
    same contradiction, where its config.json already differs from this one, or where the weights
    decode alike by both files. Raises FormatError for a damaged file.
    """
    same = {(one.file, one.key, repr(one.other)) for one in packing_conflicts(other)}
    theirs = stated_packing(other)
    apart = [
        one
        for one in packing_conflicts(model)
        if (one.file, one.key, repr(one.other)) not in same
        and theirs.get(one.key, one.used) == one.used
        and changes_weights(model, one.key)
    ]
    if not apart:
        return
    file = apart[0].file
    shown = "; ".join(f"{one.key} {one.used!r} and {one.other!r}" for one in apart)
    mine, there = side.lower(), "b" if side == "A" else "a"
    yield Finding(
        "packing_file",
        f"config.json and {file} of {side} differ: {shown}; AutoGPTQ, GPTQModel and AutoAWQ read "
        "the second, transformers and vLLM the first",
        "config",
        "bug",
        tuple(f"{file}: {one.name}" for one in apart),
        False,
        side=side,
        values={f"{file}: {one.name}": {mine: one.other, there: one.used} for one in apart},
        next=set_command(model.path, [_assignment(one) for one in apart]),
    )


def _assignment(one: PackingConflict) -> str:
    """Return the quoted argument of `aprfmt set` that gives the file config.json's value."""
    return shlex.quote(f"{one.file}:{one.name}={json.dumps(one.used)}")
