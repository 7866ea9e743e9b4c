"""Packed weights of every dialect decoded, beside a fill of memory and the library it is of.

    python tests/benchmarks/packed.py [--json FILE] [--rows 8192] [--columns 8192] [--rounds 5]
                                      [--threads 1] [--only PATTERN]

Rates, higher is better: 10**9 weights a second, and of ours GB/s of float32 that are written. In
every round ours and the limit take turns: `weight` has the scales read and checked, the rows then
decoded into memory in use; `rows` is the latter alone; `share` is that of a streaming fill of the
same memory. A library decodes a weight of its own making on one thread, of a quarter of the rows;
one that is not installed is left out with a line on stderr. `--cpu` counts processor time, for a
machine that does other work meanwhile (one thread).
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aprfmt.codecs import native
from aprfmt.codecs.dialect import Config, StoredPart
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.codecs.lattice import PackedWeight
from tests.benchmarks.measure import aligned_array, cpu_name
from tests.benchmarks.packed_peers import PEERS

Shape = tuple[int, ...]
SIZES = {"F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2}
RNG = np.random.default_rng(0)


def part(encoding: str, shape: Shape, kind: str = "") -> StoredPart:
    """Return a part of random bytes; floats are positive numbers of usual sizes."""
    count = int(np.prod(shape))
    numbers = RNG.random(min(count, 1 << 16), np.float32) + np.float32(0.5)
    made: Any
    if encoding == "F32":
        made = numbers
    elif encoding == "F16":
        made = numbers.astype(np.float16)
    elif encoding == "BF16":
        made = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    else:
        low, high = {"scale": (1, 0x7E), "power": (100, 140)}.get(kind, (0, 256))
        made = RNG.integers(low, high, 1 << 16).astype(np.uint8)
    raw = np.resize(made.view(np.uint8), count * SIZES.get(encoding, 1)).tobytes()
    return StoredPart(raw, encoding, shape)


def numbers(values: Any) -> StoredPart:
    """Return a part of integers."""
    kind = {"int64": "I64", "int32": "I32"}[values.dtype.name]
    return StoredPart(values.tobytes(), kind, values.shape)


def modelopt(algorithm: str, size: int | None = None) -> Config:
    """Return what config.json says of a weight of ModelOpt."""
    said = {"quant_method": "modelopt", "quant_algo": algorithm}
    return said if size is None else {**said, "group_size": size}


def compressed(form: str, **weights: Any) -> Config:
    """Return what it says of one of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}


def gptq(o: int, i: int, bits: int, size: int, act: bool = False) -> Mapping[str, StoredPart]:
    """Return a weight of GPTQ, the inputs of a group together or wherever they are."""
    made = {
        ".qweight": part("I32", (i * bits // 32, o)),
        ".qzeros": part("I32", (i // size, o * bits // 32)),
        ".scales": part("F16", (i // size, o)),
    }
    index = RNG.permutation(np.arange(i) // size).astype(np.int32)
    return made | ({".g_idx": numbers(index)} if act else {})


def mlx(o: int, i: int, bits: int, size: int) -> Mapping[str, StoredPart]:
    """Return a weight of MLX with scales and biases."""
    groups = (o, i // size)
    return {
        ".weight": part("U32", (o, i * bits // 32)),
        ".scales": part("BF16", groups),
        ".biases": part("BF16", groups),
    }


def integers(o: int, i: int, size: int, zeros: bool = False) -> Mapping[str, StoredPart]:
    """Return a weight of packed integers of compressed-tensors."""
    made = {
        ".weight_packed": part("I32", (o, i // 8)),
        ".weight_scale": part("BF16", (o, i // size)),
        ".weight_shape": numbers(np.array([o, i])),
    }
    zero = {".weight_zero_point": part("I32", (o // 8, i // size))}
    return made | (zero if zeros else {})


Make = Callable[[int, int], Mapping[str, StoredPart]]
# case -> dialect, what makes its parts, what config.json says; PEERS has the libraries by case
CASES: Mapping[str, tuple[str, Make, Config]] = {
    "ModelOpt NVFP4": ("modelopt", lambda o, i: {
        ".weight": part("U8", (o, i // 2)), ".weight_scale": part("F8_E4M3", (o, i // 16), "scale"),
        ".weight_scale_2": part("F32", ())}, modelopt("NVFP4", 16)),
    "ModelOpt NVFP4 experts": ("modelopt_experts", lambda o, i: {
        "": part("U8", (4, i // 2, o // 4)),
        "_weight_scale": part("F8_E4M3", (4, i // 16, o // 4), "scale"),
        "_weight_scale_2": part("F32", (4,))}, modelopt("NVFP4", 16)),
    "ModelOpt FP8": ("modelopt", lambda o, i: {
        ".weight": part("F8_E4M3", (o, i)), ".weight_scale": part("F32", ())}, modelopt("FP8")),
    "ModelOpt MXFP8": ("modelopt", lambda o, i: {
        ".weight": part("F8_E4M3", (o, i)), ".weight_scale": part("U8", (o, i // 32), "power")},
        modelopt("MXFP8", 32)),
    "ModelOpt INT4": ("modelopt", lambda o, i: {
        ".weight": part("U8", (o // 2, i)), ".weight_scale": part("F32", (o, i // 128))},
        modelopt("W4A16_AWQ", 128)),
    "compressed INT4 g32": ("compressed_packed", lambda o, i: integers(o, i, 32), compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=32)),
    "compressed INT4 g32 asymmetric": ("compressed_packed", lambda o, i: integers(
        o, i, 32, True), compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)),
    "compressed NVFP4": ("compressed_packed_float", lambda o, i: {
        ".weight_packed": part("U8", (o, i // 2)),
        ".weight_scale": part("F8_E4M3", (o, i // 16), "scale"),
        ".weight_global_scale": part("F32", (1,))}, compressed("nvfp4-pack-quantized")),
    "compressed MXFP4": ("compressed_packed_float", lambda o, i: {
        ".weight_packed": part("U8", (o, i // 2)),
        ".weight_scale": part("U8", (o, i // 32), "power")}, compressed("mxfp4-pack-quantized")),
    "compressed MXFP6": ("compressed_packed_float", lambda o, i: {
        ".weight_packed": part("U8", (o, i * 3 // 4)),
        ".weight_scale": part("U8", (o, i // 32), "power")}, compressed("mxfp6-pack-quantized")),
    "compressed FP8 rows": ("compressed_plain", lambda o, i: {
        ".weight": part("F8_E4M3", (o, i)), ".weight_scale": part("F32", (o, 1))},
        compressed("float-quantized", num_bits=8)),
    "compressed INT8 rows": ("compressed_plain", lambda o, i: {
        ".weight": part("I8", (o, i)), ".weight_scale": part("F32", (o, 1))},
        compressed("int-quantized", num_bits=8)),
    "FP8 128x128": ("fp8_block", lambda o, i: {
        ".weight": part("F8_E4M3", (o, i)), ".weight_scale_inv": part("F32", (o // 128, i // 128))},
        {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "DeepSeek-V4 FP4": ("fp8_block", lambda o, i: {
        ".weight": part("I8", (o, i // 2)),
        ".weight_scale_inv": part("F8_E8M0", (o, i // 32), "power")},
        {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "gpt-oss MXFP4": ("gpt_oss", lambda o, i: {
        "_blocks": part("U8", (1, o, i // 32, 16)),
        "_scales": part("U8", (1, o, i // 32), "power")},
        {"quant_method": "mxfp4"}),
    **{f"MLX {bits} bits g{size}": (
        "mlx", lambda o, i, bits=bits, size=size: mlx(o, i, bits, size),  # type: ignore[misc]
        {"bits": bits, "group_size": size}) for bits, size in ((4, 32), (4, 64), (3, 64), (6, 64),
                                                               (8, 64))},
    **{f"GPTQ {bits} bits g{size}{' act order' * act}": (
        "gptq",
        lambda o, i, b=bits, s=size, a=act: gptq(o, i, b, s, a),  # type: ignore[misc]
        {"quant_method": "gptq", "bits": bits, "group_size": size}) for bits, size, act in (
            (4, 32, False), (4, 128, False), (3, 128, False), (8, 128, False), (4, 128, True))},
    **{f"AWQ g{size}": ("awq", lambda o, i, size=size: {  # type: ignore[misc]
        ".qweight": part("I32", (i, o // 8)), ".qzeros": part("I32", (i // size, o // 8)),
        ".scales": part("F16", (i // size, o))},
        {"quant_method": "awq", "bits": 4, "group_size": size}) for size in (32, 128)},
    "torchao INT8": ("torchao", lambda o, i: {
        "._weight_qdata": part("I8", (o, i)), "._weight_scale": part("F32", (o, 1))},
        {"quant_method": "torchao", "_type": "Int8Tensor", "block_size": [1, 8192]}),
    "torchao NVFP4": ("torchao", lambda o, i: {
        "._weight_qdata": part("U8", (o, i // 2)),
        "._weight_scale": part("F8_E4M3", (o // 4, i // 4), "scale"),
        "._weight_per_tensor_scale": part("F32", ())},
        {"quant_method": "torchao", "_type": "NVFP4Tensor", "block_size": 16,
         "is_swizzled_scales": True}),
}  # fmt: skip


def measured(case: str, options: argparse.Namespace, out: Any) -> dict[str, Any]:
    """Return the figures of one case."""
    dialect, make, config = CASES[case]
    if "block_size" in config and isinstance(config["block_size"], list):
        config = {**config, "block_size": [1, options.columns]}
    packed = PackedWeight(DIALECTS[dialect], make(options.rows, options.columns), config)
    clock = time.process_time if options.cpu else time.perf_counter
    laid = packed.laid_out()
    assert laid is not None

    def whole() -> None:
        found = packed.laid_out()
        assert found is not None
        found.decode_into(out, threads=options.threads)

    flat = out.reshape(-1)
    tasks: dict[str, Callable[[], object]] = {
        "limit": lambda: native.stream_fill(flat),
        "weight": whole,
        "rows": lambda: laid.decode_into(out, threads=options.threads),
    }
    least = dict.fromkeys(tasks, float("inf"))
    for _ in range(options.rounds):
        for name, task in tasks.items():
            began = clock()
            task()
            least[name] = min(least[name], clock() - began)
    rate = {name: out.size / seconds / 1e9 for name, seconds in least.items()}
    row = {
        "case": case, "weight": round(rate["weight"], 3), "rows": round(rate["rows"], 3),
        "gigabytes_a_second": round(4 * rate["weight"], 2), "limit": round(rate["limit"], 3),
        "share": round(rate["rows"] / rate["limit"], 3),
        "share_of_weight": round(rate["weight"] / rate["limit"], 3), "peer": None, "library": None,
    }  # fmt: skip
    return row | peer_of(case, options, clock)


def peer_of(case: str, options: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any]:
    """Return the rate of the dialect's own library, where it is installed."""
    found = next((make for start, make in PEERS.items() if case.startswith(start)), None)
    if found is None:
        return {}
    rows = options.rows // 4
    try:
        library, task = found(case, rows, options.columns)
        task()
    except ImportError as error:
        print(f"{case}: NOT-RUN against its library: {error}", file=sys.stderr)
        return {}
    least = float("inf")
    for _ in range(min(options.rounds, 3)):
        began = clock()
        task()
        least = min(least, clock() - began)
    return {"peer": round(rows * options.columns / least / 1e9, 4), "library": library}


def show(row: dict[str, Any]) -> None:
    """Print a case on a line."""
    peer = (
        ""
        if row["peer"] is None
        else (f"{row['peer']:8.3f} {row['weight'] / row['peer']:7.1f}  {row['library']}")
    )
    print(
        f"{row['case']:32} {row['weight']:7.2f} {row['gigabytes_a_second']:7.1f} "
        f"{row['rows']:7.2f} {row['limit']:7.2f} {row['share']:6.2f} {peer}",
        flush=True,
    )


def main() -> None:
    """Measure the cases that are asked for and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true", help="processor time instead of the clock's")
    options = parser.parse_args()
    out = aligned_array(options.rows * options.columns).reshape(options.rows, options.columns)
    out.fill(0)
    print(
        f"{'case':32} {'weight':>7} {'GB/s':>7} {'rows':>7} {'limit':>7} {'share':>6} "
        f"{'peer':>8} {'ratio':>7}  library"
    )
    rows = []
    for case in CASES:
        if re.search(options.only, case):
            rows.append(measured(case, options, out))
            show(rows[-1])
    if options.json:
        machine = {
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "python": sys.version.split()[0],
            "kernels": native.CPU,
        }
        text = json.dumps({"machine": machine, "rows": rows}, indent=1)
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
