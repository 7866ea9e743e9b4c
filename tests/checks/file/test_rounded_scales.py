"""Scales that were rounded after the codes were made, seen from the file alone.

Honest scales of few values (DeepSeek's UE8M0, rounded up before the codes are made; OCP's MX, which
rounds down and clips) are no such thing, and exact ones are not either.

Seen red: PASS without a word.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.checks.file.rounded_scales import rounded_scales_text
from tests.cli.run import aprfmt
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import source

Array = Any
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
TILES = {"quant_method": "fp8", "weight_block_size": [32, 32]}
INT4 = packing.compressed_section(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True
)
E5M2 = np.arange(1, 0x7C, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32)


def up(scale: Array) -> Array:
    return np.exp2(np.ceil(np.log2(scale)))


def down(scale: Array) -> Array:
    return np.exp2(np.floor(np.log2(scale)))


def nearest(scale: Array) -> Array:
    return np.exp2(np.round(np.log2(scale)))


def coarse(scale: Array) -> Array:
    return E5M2[np.abs(scale[..., None] - E5M2).argmin(-1)]


def exact(scale: Array) -> Array:
    return scale


def fp8(before: Callable[[Array], Array], after: Callable[[Array], Array]) -> Callable[..., Any]:
    """Return a maker of FP8 weights by tiles, whose scales are changed before and after coding."""

    def make(name: str, x: Array) -> packing.Rows:
        tall, wide = x.shape[0] // 32, x.shape[1] // 32
        most = np.abs(x.reshape(tall, 32, wide, 32)).max((1, 3)) * 64  # normal numbers of E5M2
        scale = before((most / 448).astype(np.float32))
        spread = scale.repeat(32, 0).repeat(32, 1)
        codes = np.clip(64 * x / spread, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        stored = after(scale).astype(np.float32)
        return {
            f"{name}.weight": packing.row(codes),
            f"{name}.weight_scale_inv": packing.row(stored),
        }

    return make


def int4(before: Callable[[Array], Array], after: Callable[[Array], Array]) -> Callable[..., Any]:
    """Return a maker of symmetric four bits, whose scales are changed before and after coding."""

    def make(name: str, x: Array) -> packing.Rows:
        cells = x.reshape(len(x), -1, 32)
        scale = before(np.abs(cells).max(-1) / 7)
        codes = np.clip(np.round(cells / scale[..., None]), -8, 7).astype(int).reshape(x.shape) + 8
        zeros = np.full(scale.shape, 8)
        group = np.arange(x.shape[1]) // 32
        p = packing.Packed(codes, after(scale), zeros, group, 4)
        return packing.compressed(name, p, dtype=np.float32)

    return make


MAKERS = {"fp8": (fp8, TILES), "int4": (int4, INT4)}
ROUNDED = {"up": up, "down": down, "nearest": nearest}


def checked(name: str, maker: str, *how: Callable[[Array], Array]) -> Any:
    make, section = MAKERS[maker]
    path = packing.folder(source("llama", WIDE), f"rounded-{maker}-{name}", section, make(*how))
    return aprfmt("validate", path)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("way", ROUNDED)
def test_scales_rounded_after_the_codes_are_said(way: str, maker: str) -> None:
    said = checked(f"{way}-after", maker, exact, ROUNDED[way])
    assert "scales are powers of two alone" in said.out
    assert "were rounded after the codes were made" in said.out


def test_scales_rounded_to_e5m2_are_said() -> None:
    assert "scales are F8_E5M2 alone" in checked("e5m2-after", "fp8", exact, coarse).out


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("way", [*ROUNDED, "exact", "e5m2"])
def test_honest_scales_are_not(way: str, maker: str) -> None:
    before = {"exact": exact, "e5m2": coarse}.get(way) or ROUNDED[way]
    said = checked(f"{way}-before", maker, before, exact)
    assert "were rounded after the codes were made" not in said.out


@pytest.mark.parametrize(("bits", "kind", "least"), [(8, "up", 18), (4, "up", 59), (8, "e5m2", 59)])
def test_so_many_groups_leave_no_doubt(bits: int, kind: str, least: int) -> None:
    """Each with its largest value at the end of the codes, by a chance of 0.3 or 0.7 apiece."""
    held = [0.5, 2.0] if kind == "up" else [1.25, 1.5]

    def said(groups: int, **changed: Any) -> str:
        codes = np.resize(changed.pop("one", [4, 1, 2, 3]), 4 * groups)
        codes[changed.pop("lower", slice(0, 0))] = 3  # of -2 to 2
        scale = np.resize(np.array(changed.pop("scales", held)), groups)
        of: dict[str, Any] = {
            "scale": SimpleNamespace(of=lambda expert: scale),
            "offset": None,
            "zero": None,
            "rows": 1,
            "codes": SimpleNamespace(bits=bits),
            "shape": (1, 4 * groups),
            "tile": (0, 0),
            "values": np.arange(-2, 3),
            "group": np.arange(4 * groups) // 4,
            "unpack_rows": lambda start, stop: codes[None],
        }
        laid: Any = SimpleNamespace(**of | changed)
        return rounded_scales_text(laid)

    name = "powers of two" if kind == "up" else "F8_E5M2"
    assert said(least - 1) == "" and said(least).startswith(f"scales are {name} alone, and in each")
    assert f" of {least} groups" in said(least) and f" of {5 * least} groups" in said(5 * least)
    assert said(least + 1, lower=slice(0, 1)) == ""  # one falls short of the end
    assert said(least, one=[4, 0, 2, 3]) and said(least, one=[4, 0, 4, 0]) == ""  # clipped
    even = least + least % 2  # two and three codes at the end by turns are not yet too many
    assert said(even, one=[4, 0, 2, 3, 4, 0, 4, 3])
    assert said(even, one=[4, 0, 4, 3, 4, 0, 2, 0]) == ""
    assert said(least, scales=[1.1, 2.0]) == said(least, scales=[1.0, 1.0]) == ""
    assert said(least, scales=[-1.0, 2.0]) == "" and said(least, offset=object()) == ""
    assert said(least, scale=None) == "" and said(least, rows=0) == ""
    few = SimpleNamespace(bits=bits - 1)
    assert (said(least, codes=few) == "") is (kind == "e5m2" or bits == 4 or least < 59)
    middle = SimpleNamespace(of=lambda expert: np.array([0.0, 0.0]))
    assert said(least, zero=middle) and not said(
        least, zero=SimpleNamespace(of=lambda expert: np.array([0.0, 1.0]))
    )
