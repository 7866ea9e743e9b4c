"""Repacks beside `cp` and `sync` of the same bytes.

    python tests/benchmarks/repacks.py [--json FILE] [--size 2.0] [--folder DIR] [--pairs 5]
                                       [--only PATTERN] [--cpu]

A llama-shaped checkpoint of `--size` GB is written in every dialect; each is repacked as blocks of
GGUF and from there back, and moved between containers. Every way runs bare (no source hash, no
verification) and in full, in pairs with `cp` and `sync` of what it reads as `copies.py` makes them,
or of what it writes where that is more: the goal is a ratio of 2.0 or less. With `--cpu` it is
processor time that is compared, for a machine that does other work meanwhile; what the disk and the
second processor take over is then counted too. What decoding takes, `packed.py` measures.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.copies import BARE, gone, row, show, timed, weights_of
from tests.benchmarks.files import APRFMT, PYTHON
from tests.benchmarks.jobs import packed
from tests.benchmarks.measure import compile_as_installed, cpu_name

FLAGS = {"bare": BARE, "full": ()}


class Way(NamedTuple):
    """One case: what it reads of the folder, what it writes, and the command between the two."""

    read: str
    made: str
    words: Sequence[str]


def convert(read: str, made: str, *words: str) -> Way:
    """Return a conversion; what is inexact is counted."""
    return Way(read, made, ("convert", *words, "--allow-inexact"))


def written(read: str, made: str, scheme: str) -> Way:
    """Return what writes a dialect's folder."""
    return Way(read, made, ("quantize", "--to", "safetensors", "--type", scheme))


def _blocks(scheme: str, back: bool = True) -> Mapping[str, Way]:
    there, again = convert(scheme, f"{scheme}.gguf"), written(f"{scheme}.gguf", "out", scheme)
    return {f"{scheme} to GGUF": there} | ({f"GGUF to {scheme}": again} if back else {})


# What is made of "checkpoint" first, and is not timed; then the cases, each with what they read.
MADE: Mapping[str, Way] = {
    "NF4": written("checkpoint", "NF4", "NF4"),
    "Q4_K.gguf": Way("checkpoint", "Q4_K.gguf", ("quantize", "--type", "Q4_K_M")),
    "NF4.apr": convert("NF4", "NF4.apr"),
    "Q4_K.apr": convert("Q4_K.gguf", "Q4_K.apr"),
    "Q4_K.safetensors": convert("Q4_K.gguf", "Q4_K.safetensors", "--generic"),
    "MXFP4.apr": convert("COMPRESSED-MXFP4.gguf", "MXFP4.apr"),
}
SCHEMES = ("COMPRESSED-INT4-g32", "GPTQ-g32", "AWQ-g32", "MLX-4bit-g32", "MODELOPT-NVFP4",
           "COMPRESSED-MXFP4")  # fmt: skip
CASES: Mapping[str, Way] = {
    # AWQ's zero points are not in the blocks any more.
    **{k: v for name in SCHEMES for k, v in _blocks(name, back=name != "AWQ-g32").items()},
    "MXFP4, GGUF to APR": convert("COMPRESSED-MXFP4.gguf", "out.apr"),
    "MXFP4, APR to GGUF": convert("MXFP4.apr", "out.gguf"),
    "MXFP4, APR to COMPRESSED-MXFP4": written("MXFP4.apr", "out", "COMPRESSED-MXFP4"),
    "FP8 in tiles to BF16": convert("fp8", "out", "--to", "safetensors", "--encoding", "BF16"),
    "NF4, safetensors to APR": convert("NF4", "out.apr"),
    "NF4, APR to safetensors": convert("NF4.apr", "out", "--to", "safetensors"),
    "Q4_K, GGUF to safetensors": convert("Q4_K.gguf", "out.safetensors", "--generic"),
    "Q4_K, safetensors to GGUF": convert("Q4_K.safetensors", "out.gguf", "--generic"),
    "Q4_K, GGUF to APR": convert("Q4_K.gguf", "out.apr"),
    "Q4_K, APR to GGUF": convert("Q4_K.apr", "out.gguf"),
}


def run_of(way: Way, folder: Path, flags: Sequence[str]) -> Sequence[str]:
    """Return the command of a way."""
    first, *rest = way.words
    return [
        *APRFMT,
        first,
        str(folder / way.read),
        str(folder / way.made),
        *rest,
        "--quiet",
        *flags,
    ]


def provide(name: str, folder: Path) -> None:
    """Make what a case reads, where it is not there yet."""
    if (folder / name).exists():
        return
    if name == "fp8":
        packed(folder / "checkpoint", folder / name)
        return
    scheme = name.removesuffix(".gguf")
    way = MADE.get(name) or (
        convert(scheme, name) if name != scheme else written("checkpoint", name, scheme)
    )
    provide(way.read, folder)
    subprocess.run(run_of(way, folder, BARE), check=True, stdout=subprocess.DEVNULL)
    os.sync()


def processor(command: Sequence[str]) -> float:
    """Return the seconds that processors spend on a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def repacks(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time every case, bare and in full, each run beside one of cp with sync."""
    make = [
        PYTHON,
        str(Path(__file__).with_name("files.py")),
        "--make",
        str(folder / "checkpoint"),
        "--size",
        str(options.size),
    ]
    subprocess.run(make, check=True)
    clock = processor if options.cpu else timed
    for case, way in CASES.items():
        if not re.search(options.only, case):
            continue
        provide(way.read, folder)
        read, made, copy = folder / way.read, folder / way.made, folder / "copy"
        kept = made.with_name(f"kept-{made.name}")
        if made.exists():
            made.rename(kept)  # another case reads it
        clock(run_of(way, folder, BARE))  # compiles what no run before it imported
        larger = max(weights_of(read), weights_of(made), key=lambda path: path.stat().st_size)
        peer = folder / "peer"
        shutil.copyfile(larger, peer)
        peer_run = ["sh", "-c", f"cp {str(peer)!r} {str(copy)!r} && sync {str(copy)!r}"]
        gone(made)
        for which, flags in FLAGS.items():
            ours, peers = [], []
            for _ in range(options.pairs):
                peers.append(clock(peer_run))
                gone(copy)
                ours.append(clock(run_of(way, folder, flags)))
                gone(made)
            yield row(f"{case}, {which}", ours, peers, peer.stat().st_size)
        gone(peer)
        if kept.exists():
            kept.rename(made)


def main() -> None:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--folder")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true", help="processor time, not the clock's")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        compile_as_installed(Path(name) / "compiled")
        for found in repacks(Path(name), options):
            rows.append(found)
            show(found)
    if options.json:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        text = json.dumps({"machine": machine, "rows": rows}, indent=1)
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
