"""Peak resident memory of commands on large files: at most 1 GiB, and the same for twice the size.

The sources are sparse llama folders in BF16; what is written is written in full. A size for which
less than twice as much is free is NOT-RUN.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1 << 30
CLOSE = 1.10  # the larger peak against the smaller
HIDDEN, FFN, VOCAB = 4096, 11008, 32000
SPARSE = 40  # GB that hash and validate read; nothing of it is on disk

# Arguments by what is measured: {src} is the source, {out} a folder for outputs.
WRITING: Mapping[str, tuple[str, ...]] = {
    "convert": ("convert", "{src}", "{out}/x.gguf"),
    "quantize": ("quantize", "{src}", "{out}/x.gguf", "--type", "Q8_0"),
    "split": ("split", "{src}", "{out}/s", "--max-shard-size", "2G"),
    "merge": ("merge", "{out}/s", "{out}/m.safetensors"),
}
READING: Mapping[str, tuple[str, ...]] = {
    "hash": ("hash", "{src}"),
    "validate": ("validate", "{src}"),
}
_MAIN = (
    "import sys\nfrom pathlib import Path\nfrom aprfmt.cli.main import main\ncode = 0\n"
    "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = int(stop.code or 0)\n"
    "lines = Path('/proc/self/status').read_text().splitlines()\n"
    "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')), file=sys.stderr)\n"
    "raise SystemExit(code)\n"
)


def llama(folder: Path, nbytes: int) -> Path:
    """Make a llama folder of about so many bytes of zeros, which take no room; return it."""
    folder.mkdir()
    layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    layers = max(1, (nbytes - 4 * VOCAB * HIDDEN) // layer)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for number in range(layers):
        at = f"model.layers.{number}."
        for name in "qkvo":
            shapes[f"{at}self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            shapes[f"{at}mlp.{name}_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, FFN)
        for name in ("input", "post_attention"):
            shapes[f"{at}{name}_layernorm.weight"] = (HIDDEN,)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in sorted(shapes.items()):
        size = 2
        for axis in shape:
            size *= axis
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(words: tuple[str, ...], src: Path, out: Path) -> dict[str, Any]:
    """Run a command; return its exit code, seconds, and peak bytes."""
    arguments = [word.format(src=src, out=out) for word in words]
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", _MAIN, *arguments, "--quiet"],
        cwd=ROOT,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = run.stderr.splitlines()
    peak = int(lines[-1]) * 1024 if lines and lines[-1].isdigit() else 0
    row: dict[str, Any] = {
        "exit": run.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": peak,
        "passed": run.returncode in (0, 1) and 0 < peak <= LIMIT,
    }
    return row if row["passed"] else row | {"error": run.stderr[-500:]}


def series(gigabytes: float, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Measure the writing commands at one size; merge takes what split wrote."""
    src, out = llama(folder / "m", int(gigabytes * 10**9)), folder / "out"
    out.mkdir()
    rows = []
    for name, words in WRITING.items():
        if name in names or (name == "split" and "merge" in names):
            rows.append({"command": name, "gigabytes": gigabytes, **measure(words, src, out)})
            if name != "split":
                for path in out.glob("[xm].*"):
                    path.unlink()
    return [row for row in rows if row["command"] in names]


def main(names: list[str], gigabytes: float) -> int:
    """Measure all, print a JSON line for each; 1 if a bound is broken."""
    names = names or [*READING, *WRITING]
    failed = False
    peaks: dict[str, list[int]] = {}
    for size in (gigabytes, 2 * gigabytes):
        with tempfile.TemporaryDirectory() as base:
            free = shutil.disk_usage(base).free
            if free < 2 * size * 10**9:
                print(json.dumps({"gigabytes": size, "outcome": "NOT-RUN", "free_bytes": free}))
                continue
            for row in series(size, names, Path(base)):
                failed |= not row["passed"]
                peaks.setdefault(row["command"], []).append(row["peak_bytes"])
                print(json.dumps(row), flush=True)
    for name, (small, large) in ((n, p) for n, p in peaks.items() if len(p) == 2):
        bounded = large <= CLOSE * small
        failed |= not bounded
        row = {"command": name, "peaks": [small, large], "passed": bounded}
        print(json.dumps(row), flush=True)
    with tempfile.TemporaryDirectory() as base:
        src = llama(Path(base) / "m", SPARSE * 10**9 if gigabytes >= 8 else int(gigabytes * 4e9))
        for name in READING:
            if name in names:
                size = (src / "model.safetensors").stat().st_size / 10**9
                row = {
                    "command": name,
                    "gigabytes": round(size, 1),
                    **measure(READING[name], src, Path(base)),
                }
                failed |= not row["passed"]
                print(json.dumps(row), flush=True)
    return int(failed)
