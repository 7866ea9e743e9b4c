"""Seeded faults of `aprfmt/causes/tensor/exchanged_parts.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis import faults_packed as packs
from tests.diagnosis import packing
from tests.diagnosis.fault import Fault, Pair


def moved_parts(folder: Path, places: Mapping[str, str]) -> None:
    """Put parts under other names in a folder: {the name: whose bytes it gets}."""
    rows = tensors_of(folder)
    write_mixed(
        folder / "model.safetensors", rows | {name: rows[other] for name, other in places.items()}
    )


def exchanged(part: str, one: str, other: str) -> dict[str, str]:
    """Return the places of a part of two modules, each under the other's name."""
    names = [f"model.layers.{module}.{part}" for module in (one, other)]
    return dict(zip(names, names[::-1], strict=True))


GATE, UP, DOWN = (f"1.mlp.{name}_proj" for name in ("gate", "up", "down"))


def _fault(
    name: str, says: str, section: Any, make: packs.Write, places: Mapping[str, str], where: str
) -> Fault:
    """Return the fault of a packed copy whose parts stand under other names."""

    def pair() -> Pair:
        original = packs.source("llama", packs.SIZES)
        folder = packing.folder(original, f"exchanged-{name}", section, make)
        moved_parts(folder, places)
        return original, folder

    return Fault(name, "llama", says, pair, ("exchanged_parts", "quantisation"), (where,))


FILE_FAULTS = (
    _fault("scales-of-up", "GPTQ whose gate and up have each other's scales", packs.GPTQ,
           packs.nearest(packing.gptq), exchanged("scales", GATE, UP), packs.ONE),
    _fault("codes-of-layer-0", "AWQ with the codes of two layers exchanged", packing.awq_section(),
           packs.nearest(packing.awq), exchanged("qweight", UP, UP.replace("1.", "0.")), packs.ONE),
    _fault("scales-copied", "FP8 whose up has the scales of gate", packs.ROW,
           packs.fp8(per="row"),
           {f"model.layers.{UP}.weight_scale": f"model.layers.{GATE}.weight_scale"}, packs.ONE),
)  # fmt: skip
