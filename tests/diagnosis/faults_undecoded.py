"""Seeded faults of packed weights that cannot be decoded, or are not what is said of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis import packing
from tests.diagnosis.fault import Fault
from tests.diagnosis.faults_packed import GPTQ, INT4, ROW, Write, gptq, nearest, packed, source
from tests.diagnosis.packing import Rows

Array = Any
ALONE = "model.layers.0.self_attn.q_proj.weight"


def undecoded(
    name: str,
    says: str,
    section: Mapping[str, Any],
    make: Write,
    cause: str | tuple[str, ...],
    change: Callable[[Rows], None] | None = None,
    claim: Mapping[str, Any] | None = None,
    *,
    packed_reference: bool = False,
    where: str = ALONE,
    confidence: str = "confirmed",
) -> Fault:
    """Return the fault of a packed copy that cannot be decoded, or is not said to be what it is."""

    def pair() -> tuple[Path, Path]:
        original = source("llama")
        whole = packing.folder(original, f"packed-{name}-good", section, make)
        broken = packing.folder(original, f"packed-{name}", {**section, **(claim or {})}, make)
        if change is not None:
            rows = dict(tensors_of(broken))
            change(rows)
            write_mixed(broken / "model.safetensors", rows)
        return whole if packed_reference else original, broken

    causes = (cause,) if isinstance(cause, str) else cause
    return Fault(name, "llama", says, pair, causes, (where,), confidence=confidence)


def of_scale(change: Callable[[Any], Any], part: str) -> Callable[[Rows], None]:
    """Return a change of the scales of one weight, as an array."""
    name = ALONE.removesuffix("weight") + part

    def applied(rows: Rows) -> None:
        dtype, shape, raw = rows[name]
        values = np.frombuffer(raw, packing.TYPES[dtype]).reshape(shape).copy()
        rows[name] = packing.row(change(values))

    return applied


def one_is(value: float) -> Callable[[Array], Array]:
    """Return a change of the fourth scale."""

    def change(scales: Array) -> Array:
        scales.reshape(-1)[3] = value
        return scales

    return change


def without(part: str) -> Callable[[Rows], None]:
    """Return a change that leaves out one part of one weight."""

    def change(rows: Rows) -> None:
        del rows[ALONE.removesuffix("weight") + part]

    return change


SIXTEEN = packing.compressed_section(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=True
)
BY_ROW: Write = lambda name, x: packing.fp8(name, x, per="row")  # noqa: E731
PLAIN4 = nearest(packed, symmetric=True, dtype=ml_dtypes.bfloat16)

UNDECODED_FAULTS: tuple[Fault, ...] = (
    undecoded(
        "scales-turned-in-file",
        "scales of one GPTQ weight stored transposed",
        GPTQ,
        nearest(gptq),
        ("scales_shape", "quantisation"),
        of_scale(lambda s: s.T, "scales"),
    ),
    undecoded(
        "scales-of-other-groups",
        "scales of one weight by groups of 96, 32 are claimed",
        INT4,
        PLAIN4,
        "scales_shape",
        of_scale(lambda s: s[:, :1], "weight_scale"),
        packed_reference=True,
    ),
    undecoded(
        "scale-nan",
        "one scale of FP8 rows is NaN",
        ROW,
        BY_ROW,
        ("scales_invalid", "quantisation"),
        of_scale(one_is(float("nan")), "weight_scale"),
    ),
    undecoded(
        "scale-negative",
        "one scale of FP8 rows is negative",
        ROW,
        BY_ROW,
        ("scales_invalid", "quantisation"),
        of_scale(one_is(-1.0), "weight_scale"),
    ),
    undecoded(
        "scales-left-out",
        "the scales of one INT4 weight are not in the file",
        INT4,
        PLAIN4,
        "scales_missing",
        without("weight_scale"),
        packed_reference=True,
    ),
    undecoded(
        "scales-left-out-unseen",
        "the same beside weights in BF16",
        INT4,
        PLAIN4,
        "scales_missing",
        without("weight_scale"),
        confidence="unconfirmed",
    ),
    undecoded(
        "groups-misclaimed",
        "config.json claims groups of 16, the scales are of 32",
        INT4,
        PLAIN4,
        "packing_claim",
        None,
        SIXTEEN,
        where=ALONE.replace("q_proj", "o_proj"),
    ),
    undecoded(
        "method-misclaimed",
        "config.json claims GPTQ's weights to be Marlin's",
        GPTQ,
        nearest(gptq),
        "packing_claim",
        None,
        {"checkpoint_format": "marlin"},
        packed_reference=True,
    ),
)
