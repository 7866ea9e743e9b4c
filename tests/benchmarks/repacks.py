"""Repacks beside `cp` and `sync` of the same bytes, and packed weights decoded beside a fill.

    python tests/benchmarks/repacks.py [--json FILE] [--size 2.0] [--folder DIR] [--pairs 5]
                                       [--decode] [--repack] [--only PATTERN]

A llama-shaped checkpoint of `--size` GB is written in every dialect; each is repacked as blocks of
GGUF and from there back, bare (no source hash, no verification), in pairs with `cp` and `sync` of
the source as `copies.py` makes them: the goal is a ratio of 2.0 or less. Decoding is one thread on
one weight of 64 M elements: elements a second, the share of a fill of as many float32, and the
library that the dialect is of where it decodes on the CPU and is installed.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aprfmt.codecs.dialects import DIALECTS, decode_weight, dialects_at
from aprfmt.codecs.writer import Settings
from aprfmt.codecs.writers import WRITERS
from aprfmt.quantizing.mixture import SCHEMES
from tests.benchmarks.copies import BARE, pairs, row, show, weights_of
from tests.benchmarks.files import APRFMT, PYTHON
from tests.benchmarks.measure import cpu_name

# type that is written -> what its codes are as blocks of GGUF
BLOCKS: Mapping[str, str] = {
    "COMPRESSED-INT4-g32": "Q4_0", "GPTQ-g32": "Q4_0", "AWQ-g32": "Q4_1", "MLX-4bit-g32": "Q4_1",
    "MODELOPT-NVFP4": "NVFP4", "COMPRESSED-MXFP4": "MXFP4",
}  # fmt: skip

ROWS, COLUMNS = 8192, 8192


def run(*words: str) -> None:
    """Run aprfmt, which must succeed."""
    subprocess.run([*APRFMT, *words, "--quiet"], check=True, stdout=subprocess.DEVNULL)


def repacks(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time every direction: from a dialect to blocks, and back where codes are kept."""
    checkpoint, copy = folder / "checkpoint", folder / "copy"
    make = [PYTHON, str(Path(__file__).with_name("files.py")), "--make", str(checkpoint),
            "--size", str(options.size)]  # fmt: skip
    subprocess.run(make, check=True)
    for scheme, blocks in BLOCKS.items():
        if not re.search(options.only, f"{scheme} {blocks}"):
            continue
        source, target = folder / "dialect", folder / "blocks.gguf"
        run("quantize", str(checkpoint), str(source), "--to", "safetensors", "--type", scheme,
            *BARE)  # fmt: skip
        run("convert", str(source), str(target), "--allow-inexact", *BARE)
        os.sync()
        there = [*APRFMT, "convert", str(source), str(folder / "out.gguf"), "--allow-inexact",
                 "--quiet", *BARE]  # fmt: skip
        back = [*APRFMT, "quantize", str(target), str(folder / "out"), "--to", "safetensors",
                "--type", scheme, "--quiet", *BARE]  # fmt: skip
        ways = [(f"{scheme} to {blocks}", there, source, folder / "out.gguf")]
        if scheme != "AWQ-g32":  # its zero points are not in the blocks any more
            ways.append((f"{blocks} to {scheme}", back, target, folder / "out"))
        for case, command, read, made in ways:
            weights = weights_of(read)
            times = pairs(options.pairs, weights, copy, command, made)
            yield row(case, *times, weights.stat().st_size)
        subprocess.run(["rm", "-rf", str(source), str(target)], check=True)


def best(task: Callable[[], object], rounds: int = 5) -> float:
    """Return the least seconds of several runs."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        task()
        found.append(time.perf_counter() - began)
    return min(found)


def decoding(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time decoding of one weight in every dialect that is written."""
    weight = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    out = np.empty_like(weight)
    limit = weight.size / best(lambda: out.fill(1.0)) / 1e9
    for scheme, found in SCHEMES.items():
        if not found.dialect or not re.search(options.only, scheme):
            continue
        writer = WRITERS[found.options["writer"]]
        how = Settings(found.options["size"] or COLUMNS, writer.scales or "BF16",
                       found.options["version"])  # fmt: skip
        source = writer.rounded(weight, how)
        parts = {
            suffix: part._replace(raw=writer.part(source, suffix, how))
            for suffix, part in writer.stored(source.shape, how).items()
        }
        section = writer.section(how, [])
        said = dialects_at(section.get("quantization") or section["quantization_config"], "up_proj")
        assert said is not None
        dialect, config = DIALECTS[writer.encoding.lower()], said[1]
        rate = weight.size / best(lambda d=dialect, p=parts, c=config: decode_weight(d, p, c)) / 1e9  # type: ignore[misc]
        peer = library(scheme, parts, how.size)
        theirs = None if peer is None else weight.size / best(peer) / 1e9
        yield {"case": f"decode {scheme}", "gigaweights_a_second": round(rate, 3),
               "of_fill": round(rate / limit, 3),
               "library": None if theirs is None else round(theirs, 3)}  # fmt: skip


def library(scheme: str, parts: Mapping[str, Any], size: int) -> Callable[[], object] | None:
    """Return what decodes the same parts in the dialect's library, where it is installed."""
    if not scheme.startswith("MLX"):
        return None
    try:
        mx: Any = importlib.import_module("mlx.core")
    except ImportError:
        return None
    kinds = {"U32": np.uint32, "BF16": np.uint16}
    held = [np.frombuffer(p.raw, kinds[p.encoding]).reshape(p.shape) for p in parts.values()]
    arrays = [mx.array(held[0]), *(mx.array(x).view(mx.bfloat16) for x in held[1:])]
    return lambda: mx.eval(mx.dequantize(*arrays, group_size=size, bits=4, stream=mx.cpu))


def main() -> None:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--folder")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--decode", action="store_true", help="only decoding")
    parser.add_argument("--repack", action="store_true", help="only repacks")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not options.repack:
        for found in decoding(options):
            rows.append(found)
            print(found, flush=True)
    if not options.decode:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            for found in repacks(Path(name), options):
                rows.append(found)
                show(found)
    if options.json:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        text = json.dumps({"machine": machine, "rows": rows}, indent=1)
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
