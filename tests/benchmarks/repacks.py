"""Repacks beside `cp` and `sync` of the same bytes.

    python tests/benchmarks/repacks.py [--json FILE] [--size 2.0] [--folder DIR] [--pairs 5]
                                       [--only PATTERN]

A llama-shaped checkpoint of `--size` GB is written in every dialect; each is repacked as blocks of
GGUF and from there back, bare (no source hash, no verification), in pairs with `cp` and `sync` of
the source as `copies.py` makes them: the goal is a ratio of 2.0 or less. What decoding takes,
`packed.py` measures.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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


def main() -> None:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--folder")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
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
