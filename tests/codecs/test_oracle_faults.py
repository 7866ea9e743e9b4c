"""Parts of every library's packed weights, broken one at a time: refused, by the part's name.

Before, torchao's scales of integers might be NaN or transposed, ModelOpt's tiles transposed, a
row's scales those of groups, codes of another type than is said, and zero points missing.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.codecs.dialect import Dialect, Parts, StoredPart
from aprfmt.codecs.dialects import decode_weight, dialects_at
from aprfmt.errors import AprfmtError
from tests.codecs.test_oracles import FILES, cases, header, rows_of

NUMPY: Mapping[str, Any] = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "U8": np.uint8,
    "I32": np.int32, "U32": np.uint32, "I64": np.int64,
}  # fmt: skip
# What stays a weight: (library, case, part, fault), each "" for any, and why. Whole numbers' scales
# may be negative: MLX's, AutoRound's and those of Q4_0 take the sign of the larger end.
SOUND = {
    **{
        (library, "", "", "negative"): "whole numbers"
        for library in ("mlx", "auto_round", "auto_gptq", "awq")
    },
    **{
        ("compressed_tensors", case, ".weight_scale", "negative"): "whole numbers"
        for case in ("pack", "pack_rounded", "pack_asymmetric")
    },
    ("auto_gptq", "", ".g_idx", "missing"): "inputs are in order",
    ("modelopt", "nvfp4_experts", ".weight_scale_2", "halved"): "one number for both experts",
    ("torchao", "", "._weight_zero_point", "turned"): "one number a row, either way",
    ("modelopt", "fp8_tiles", ".weight_scale", "turned"): "the last two axes are 1",
}


def weight(library: str, case: str) -> tuple[Dialect, dict[str, StoredPart], dict[str, object]]:
    """Return the dialect of an oracle's weight, its parts, and what is said of it."""
    section = json.loads(header(library)["__metadata__"][case])
    stored = {
        name.partition("|")[2]: StoredPart(raw, encoding, shape)
        for name, (encoding, shape, raw) in rows_of(library).items()
        if name.partition("|")[0] == case
    }
    said = dialects_at(section, "model.layers.0.mlp.up_proj")
    assert said is not None
    dialect = next(row for row in said[0] if row.main in stored)
    names = {
        part: dialect.stored("", part, stored)
        for part in (dialect.main, *dialect.parts, *dialect.optional)
    }
    parts = {part: stored[name] for part, name in names.items() if name is not None}
    return dialect, parts, dict(said[1])


def faults(part: str, stored: StoredPart) -> Iterator[tuple[str, StoredPart | None]]:
    """Yield what may be wrong with a part; None: it is not there."""
    yield "missing", None
    held = np.frombuffer(bytes(stored.raw), NUMPY[stored.encoding]).reshape(stored.shape)

    def made(values: Any) -> StoredPart:
        held = np.ascontiguousarray(values)
        return StoredPart(held.tobytes(), stored.encoding, tuple(held.shape))

    if held.ndim > 1 and held.shape[-1] != held.shape[-2]:
        yield "turned", made(held.swapaxes(-1, -2))
    if held.ndim and held.shape[-1] > 1:
        yield "halved", made(held[..., : held.shape[-1] // 2])
    if stored.encoding in ("F32", "F16", "BF16", "F8_E4M3"):
        for name, value in (("nan", np.nan), ("negative", -1.0)):
            values = held.copy()
            values.reshape(-1)[-1] = value
            yield name, made(values)
    elif "scale" in part and held.dtype.itemsize == 1:
        values = held.copy()
        values.view(np.uint8).reshape(-1)[-1] = 255
        yield "nan", made(values)


def decoded(dialect: Dialect, parts: Parts, config: dict[str, object]) -> str:
    """Return what is said of a weight that is refused, "" if it is not."""
    try:
        decode_weight(dialect, parts, config)
    except AprfmtError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("library", FILES)
def test_a_broken_part_is_refused_by_its_name(library: str) -> None:
    taken, tried = [], 0
    for case in (case for name, case in cases() if name == library):
        dialect, parts, config = weight(library, case)
        assert not decoded(dialect, parts, config)
        for part, stored in parts.items():
            if part == dialect.main:
                continue
            for fault, broken in faults(part, stored):
                rest = {name: found for name, found in parts.items() if name != part}
                text = decoded(dialect, rest if broken is None else {**rest, part: broken}, config)
                row = (library, case, part, fault)
                sound = any(
                    all(a in ("", b) for a, b in zip(known, row, strict=True)) for known in SOUND
                )
                tried += 1
                if sound or part in text:
                    continue
                taken.append((*row, text))
    assert tried >= 9 and not taken


@pytest.mark.parametrize(
    ("library", "case", "encoding", "says"),
    [("compressed_tensors", "fp8_rows", "I8", "says type 'float', part '.weight' is I8"),
     ("modelopt", "fp8_rows", "I8", "says FP8_PER_CHANNEL_PER_TOKEN, part '.weight' is I8"),
     ("torchao", "int8", "F8_E4M3", "says Int8Tensor, part '._weight_qdata' is F8_E4M3")],
)  # fmt: skip
def test_codes_of_another_type_than_is_said(
    library: str, case: str, encoding: str, says: str
) -> None:
    dialect, parts, config = weight(library, case)
    main = parts[dialect.main]._replace(encoding=encoding)
    assert says in decoded(dialect, {**parts, dialect.main: main}, config)


WRONG: Mapping[str, tuple[object, ...]] = {
    "bits": (0, -4, 1, 7, 16, True, "4", None, [4]),
    "num_bits": (0, -4, 9, True, "4", [4]),
    "group_size": (0, -2, 1 << 20, 5, True, "32", [32]),
}


def test_a_number_of_the_configuration_that_no_reader_has_is_refused_by_its_key() -> None:
    """Codes of four bits are no codes of seven, whatever their parts' shapes allow."""
    tried, taken = set(), []
    for library, case in cases():
        dialect, parts, config = weight(library, case)
        parts.pop(".g_idx", None)  # it says each input's group, and no size is asked for
        for path in number_paths(config, ()):
            key = path[-1]
            for value in WRONG[key]:
                tried.add((library, key))
                text = decoded(dialect, parts, changed(config, path, value))
                if key not in text:
                    taken.append((library, case, key, value, text))
    assert {("awq", "bits"), ("mlx", "bits"), ("auto_gptq", "bits")} <= tried and not taken


def number_paths(config: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each number of bits or of a group."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in WRONG and value is not None:
                yield (*path, key)
            yield from number_paths(value, (*path, key))


def changed(config: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a configuration with another value there."""
    made = value if len(path) == 1 else changed(config[path[0]], path[1:], value)
    return {**config, path[0]: made}


def test_scales_of_fewer_rows_of_tiles_and_inputs_that_are_no_whole_groups() -> None:
    dialect, parts, config = weight("modelopt", "fp8_tiles")
    scale = parts[".weight_scale"]
    one = scale._replace(raw=bytes(scale.raw)[:4], shape=(1, 1, 1, 1))
    assert "expected [2, 1]" in decoded(dialect, {**parts, ".weight_scale": one}, config)
    dialect, parts, config = weight("awq", "gemm_128")
    main = parts[".qweight"]
    half = main._replace(raw=bytes(main.raw)[: len(main.raw) // 2], shape=(64, 4))
    assert "'.qweight' has 64 inputs" in decoded(dialect, {**parts, ".qweight": half}, config)
