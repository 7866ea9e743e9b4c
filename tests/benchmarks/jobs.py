"""`--jobs` beside one worker on one thread: FP8 to BF16, whole and in shards, and BF16 to Q4_K_M.

    python tests/benchmarks/jobs.py [--json FILE] [--size 2.0] [--folder /dev/shm] [--runs 3]
        [--only WORDS]

Makes its own input by seed: `--size` gigabytes of BF16, and a folder of that size whose projections
are FP8 with scales of 128 x 128 blocks. Each conversion runs with `--jobs 1 --threads 1` and with
one worker for each processor, in turn, without hash and verification; the outputs are compared byte
for byte. There are as many shards as processors. The figure is the ratio of the medians, said with
the size: planning takes as long for a small model, so that the ratio grows with it. The folder must
have room for six times `--size`.
"""

import argparse
import filecmp
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aprfmt.base.processors import cpu_count
from tests.benchmarks.copies import BARE, timed, weights_of
from tests.benchmarks.files import APRFMT, llama
from tests.benchmarks.measure import compile_as_installed, cpu_name
from tests.conversion.folders import write_mixed

BLOCK = 128
PACKED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
SHARD = "SHARD"  # stands for the size of one
CASES: Mapping[str, tuple[str, Sequence[str]]] = {
    "FP8 to BF16": ("fp8", ("convert", "--encoding", "BF16")),
    "FP8 to BF16, shards": ("fp8", ("convert", "--encoding", "BF16", "--max-shard-size", SHARD)),
    "BF16 to Q4_K_M": ("bf16", ("quantize", "--type", "Q4_K_M")),
}


def packed(plain: Path, folder: Path) -> Path:
    """Write a folder of the same shapes, its projections as random FP8 codes with scales."""
    with (plain / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    rng = np.random.default_rng(1)
    rows: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = tuple(entry["shape"])
        count = int(np.prod(shape))
        if "_proj" not in name:
            rows[name] = ("BF16", shape, (rng.integers(0, 1 << 7, count, np.uint16) << 7).tobytes())
            continue
        codes = np.frombuffer(rng.bytes(count), np.uint8)
        codes = codes - ((codes & 0x7F) == 0x7F)  # no NaN
        rows[name] = ("F8_E4M3", shape, codes.tobytes())
        grid = tuple(-(-size // BLOCK) for size in shape)
        scale = rng.random(grid, np.float32) + np.float32(0.5)
        rows[f"{name}_scale_inv"] = ("F32", grid, scale.tobytes())
    folder.mkdir()
    write_mixed(folder / "model.safetensors", rows)
    said = json.loads((plain / "config.json").read_text()) | PACKED
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def case(
    name: str, source: Path, words: Sequence[str], folder: Path, runs: int, size: float
) -> dict[str, Any]:
    """Return the figure of one conversion, and print it."""
    workers = {"one": ("--jobs", "1", "--threads", "1"), "many": ("--jobs", str(cpu_count()))}
    seconds: dict[str, list[float]] = {which: [] for which in workers}
    made = {which: folder / which for which in workers}
    shard = f"{1000 * size / cpu_count():.0f}MB"
    command, *rest = [shard if word == SHARD else word for word in words]
    for number in range(runs + 1):  # the first compiles what nothing before it imported
        for which, flags in workers.items():
            shutil.rmtree(made[which], ignore_errors=True)
            made[which].mkdir()
            target = str(made[which] / "out.gguf")
            run = [*APRFMT, command, str(source), target, *rest, *flags, *BARE, "--quiet"]
            took = timed(run)
            seconds[which] += [took] if number else []
    one, many = (statistics.median(seconds[which]) for which in workers)
    nbytes = weights_of(source).stat().st_size
    outputs = sorted(path.name for path in made["one"].iterdir())
    same = outputs == sorted(path.name for path in made["many"].iterdir())
    _, *unlike = filecmp.cmpfiles(made["one"], made["many"], outputs, shallow=False)
    found = {
        "case": name, "source_bytes": nbytes,
        "ratio": round(one / many, 2), "seconds_one": round(one, 3),
        "seconds_many": round(many, 3), "jobs": cpu_count(),
        "same_bytes": same and not any(unlike), "files": len(outputs),
        "output_bytes": sum(path.stat().st_size for path in made["many"].iterdir()),
    }  # fmt: skip
    print(
        f"{name:20} {nbytes / 1e9:5.1f} GB {found['ratio']:6.2f} times  {one:7.2f} s, "
        f"{many:7.2f} s with {found['jobs']} jobs  same bytes: {found['same_bytes']}",
        flush=True,
    )
    for path in made.values():
        shutil.rmtree(path)
    return found


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="of the cases, those whose title has this")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        free, needed = shutil.disk_usage(folder).free, int(6e9 * args.size)
        if free < needed:
            print(f"NOT-RUN: {folder} has {free / 1e9:.1f} GB, {needed / 1e9:.1f} are needed")
            sys.exit(2)
        compile_as_installed(folder / "compiled")
        plain = llama(folder / "bf16", args.size)
        fp8 = folder / "fp8"
        cases = {title: row for title, row in CASES.items() if args.only in title}
        sources = {
            kind: plain if kind == "bf16" else packed(plain, fp8)
            for kind in {kind for kind, _ in cases.values()}
        }
        rows = [
            case(title, sources[kind], words, folder, args.runs, args.size)
            for title, (kind, words) in cases.items()
        ]
    if args.json:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    if not all(row["same_bytes"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
