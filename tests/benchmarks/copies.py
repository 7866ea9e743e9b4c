"""Lossless conversion beside `cp` and `sync` of the same bytes, in interleaved pairs; `diff`.

    python tests/benchmarks/copies.py [--json FILE] [--size 2.0] [--folder DIR] [--pairs 7]
        [--only WORDS]

Each of the six directions runs bare (no source hash, no verification) and as it is by default;
before every run `cp` and `sync` of the source are timed, so that both meet the same machine. The
figure is the median of the pairs' ratios, the spread the half range of the middle half over the
median: above 15 % it is "not measured". GGUFWriter and safetensors' save_file, which decode nothing
either, stand beside it; at the end `diff` of equal models beside `cmp` of equal files.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.files import APRFMT, PYTHON
from tests.benchmarks.measure import compile_as_installed, cpu_name

BARE = ("--no-verify", "--no-source-hash")
UNSTEADY = 0.15
_GGUF = """
import sys, numpy as np, gguf
from gguf import GGUFReader, GGUFWriter
writer = GGUFWriter(sys.argv[2], "llama")
for tensor in GGUFReader(sys.argv[1]).tensors:
    writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
writer.close()
"""
_SAFETENSORS = """
import sys, ml_dtypes
from safetensors import safe_open
from safetensors.numpy import save_file
with safe_open(sys.argv[1], "np") as file:
    save_file({name: file.get_tensor(name) for name in file.keys()}, sys.argv[2])
"""


def timed(command: Sequence[str]) -> float:
    """Return the seconds a command takes."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def gone(*paths: Path) -> None:
    """Remove files and folders, and have the disk do so before anything is timed."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.sync()


def pairs(
    count: int, weights: Path, copy: Path, run: Sequence[str], made: Path
) -> tuple[list[float], list[float]]:
    """Return the seconds of `count` interleaved runs: ours, and cp with sync."""
    ours, peers = [], []
    for _ in range(count):
        peers.append(
            timed(["sh", "-c", f"cp {str(weights)!r} {str(copy)!r} && sync {str(copy)!r}"])
        )
        gone(copy)
        ours.append(timed(run))
        gone(made)
    return ours, peers


def beside(count: int, run: Sequence[str], peer: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the seconds of `count` interleaved runs of two commands that write nothing."""
    timed(run)  # compiles what no run before it imported
    times = [(timed(peer), timed(run)) for _ in range(count)]
    return [ours for _, ours in times], [theirs for theirs, _ in times]


def row(
    case: str, ours: Sequence[float], peers: Sequence[float], nbytes: int, peer: str = "cp + sync"
) -> dict[str, Any]:
    """Return the figure of one case."""
    ratios = sorted(a / b for a, b in zip(ours, peers, strict=True))
    median = statistics.median(ratios)
    quarter = len(ratios) // 4
    spread = (ratios[-1 - quarter] - ratios[quarter]) / 2 / median
    return {
        "case": case, "ratio": round(median, 3), "spread": round(spread, 3),
        "measured": spread <= UNSTEADY, "seconds": round(statistics.median(ours), 3),
        "peer": peer, "peer_seconds": round(statistics.median(peers), 3),
        "gigabytes_a_second": round(nbytes / 1e9 / statistics.median(ours), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print a case on a line."""
    said = "" if found["measured"] else "  not measured: unsteady"
    took, peer = f"{found['seconds']:7.2f} s", f"{found['peer']} {found['peer_seconds']:7.2f} s"
    ratio = f"{found['ratio']:6.2f} +- {100 * found['spread']:3.0f} %"
    print(f"{found['case']:44} {ratio}  {took}  {peer}{said}", flush=True)


def weights_of(source: Path) -> Path:
    """Return the file of a source that cp copies."""
    return source / "model.safetensors" if source.is_dir() else source


def found_in(
    case: str, times: tuple[list[float], list[float]], weights: Path, peer: str = "cp + sync"
) -> dict[str, Any]:
    """Return the row of a case, and print it."""
    found = row(case, *times, weights.stat().st_size, peer)
    show(found)
    return found


def converted(
    sources: Mapping[str, Path], folder: Path, count: int, only: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the six directions."""
    for first, second in permutations(sources, 2):
        source, weights = sources[first], weights_of(sources[first])
        made = folder / ("out" if second == "safetensors" else f"out.{second}")
        command = [*APRFMT, "convert", str(source), str(made), "--to", second, "--quiet"]
        for case, flags in (("bare", BARE), ("hash + verify", ())):
            if only not in f"{first} to {second}, {case}":
                continue
            run = [*command, *flags]
            timed(run)  # compiles what no run before it imported
            gone(made)
            times = pairs(count, weights, folder / "copy", run, made)
            yield found_in(f"{first} to {second}, {case}", times, weights)


def libraries(sources: Mapping[str, Path], folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of other projects' writers."""
    for case, code, source, suffix in (
        ("GGUFWriter, gguf to gguf", _GGUF, sources["gguf"], "gguf"),
        (
            "save_file, safetensors to safetensors",
            _SAFETENSORS,
            sources["safetensors"],
            "safetensors",
        ),
    ):
        weights, made = weights_of(source), folder / f"peer.{suffix}"
        run = [
            "sh",
            "-c",
            '"$0" -c "$1" "$2" "$3" && sync "$3"',
            PYTHON,
            code,
            str(weights),
            str(made),
        ]
        try:
            times = pairs(count, weights, folder / "copy", run, made)
        except subprocess.CalledProcessError:
            print(f"{case}: NOT-RUN, its library is not installed")
            gone(made)
            continue
        yield found_in(case, times, weights)


def compared(sources: Mapping[str, Path], folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of `diff`."""
    weights, copy = weights_of(sources["safetensors"]), folder / "copy"
    shutil.copyfile(weights, copy)
    for kind in ("apr", "gguf"):
        run = [*APRFMT, "diff", str(sources["safetensors"]), str(sources[kind])]
        times = beside(count, run, ["cmp", str(weights), str(copy)])
        yield found_in(f"diff of safetensors and {kind}, equal", times, weights, "cmp")


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--folder")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", help="of the six directions, those that have this")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        compile_as_installed(folder / "compiled")
        sources = {"safetensors": folder / "checkpoint"}
        make = [
            PYTHON,
            str(Path(__file__).with_name("files.py")),
            "--make",
            str(sources["safetensors"]),
            "--size",
            str(args.size),
        ]
        subprocess.run(make, check=True)
        for kind in ("apr", "gguf"):
            sources[kind] = folder / f"source.{kind}"
            command = [*APRFMT, "convert", str(sources["safetensors"]), str(sources[kind])]
            timed([*command, *BARE, "--quiet"])
        os.sync()
        rows = [*converted(sources, folder, args.pairs, args.only)]
        for every in (libraries, compared) if not args.only else ():
            rows += every(sources, folder, args.pairs)
    if args.json:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
