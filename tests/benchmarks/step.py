"""`aprfmt step` of a large pair of checkpoints, beside reading the same bytes: time and memory.

    python tests/benchmarks/step.py [--size 8] [--moved 2] [--folder DIR] [--runs 3] [--json FILE]

Both checkpoints are sparse: holes that the file system reads as zeros, --size GB each in bfloat16,
of which --moved tensors of the second one hold numbers. The peer reads both files in pieces of
8 MiB and compares them.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.files import APRFMT, PYTHON
from tests.benchmarks.measure import Row, compile_as_installed, report, run_process

HIDDEN, FFN, VOCAB = 4096, 14336, 32000
READ = """
import sys
a, b = (open(path, "rb", buffering=0) for path in sys.argv[1:3])
while True:
    x, y = a.read(8 << 20), b.read(8 << 20)
    if not x:
        break
    assert len(x) == len(y) and (x == y or True)
"""


def shapes(size: float) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a llama of so many bytes in bfloat16."""
    layer = {
        **{f"self_attn.{name}_proj.weight": (rows, HIDDEN)
           for name, rows in (("q", HIDDEN), ("k", 1024), ("v", 1024), ("o", HIDDEN))},
        "mlp.gate_proj.weight": (FFN, HIDDEN), "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    one = 2 * sum(int(np.prod(shape)) for shape in layer.values())
    layers = max(1, round((size - 4 * VOCAB * HIDDEN) / one))
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for number in range(layers):
        made |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return made | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def write(folder: Path, tensors: dict[str, tuple[int, ...]], moved: int) -> Path:
    """Write a sparse checkpoint; the first `moved` matrices of layers hold bfloat16 numbers."""
    folder.mkdir()
    offsets: dict[str, int] = {}
    rows: dict[str, dict[str, object]] = {}
    at = 0
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        offsets[name] = at
        rows[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(rows).encode()
    header += b" " * (-len(header) % 8)
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": FFN, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        begin = file.tell()
        file.truncate(begin + at)
        for name in [name for name in tensors if "_proj" in name][:moved]:
            file.seek(begin + offsets[name])
            count = int(np.prod(tensors[name]))
            file.write(np.full(count, 0x3951, "<u2").tobytes())  # 2e-4
    return folder / "model.safetensors"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=8.0, help="GB of each checkpoint")
    parser.add_argument("--moved", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        compile_as_installed(folder / "compiled")
        tensors = shapes(asked.size * 1e9)
        before = write(folder / "before", tensors, 0)
        after = write(folder / "after", tensors, asked.moved)
        stated = "--optimizer=adamw:lr=2e-4,step=1"
        command = [*APRFMT, "step", str(before), "--after", str(after), stated, "--json"]
        ours = run_process(command, runs=asked.runs, fine=(0, 1, 2))
        peer = run_process([PYTHON, "-c", READ, str(before), str(after)], runs=asked.runs)
        size = 2 * before.stat().st_size
    row = Row(
        "step", f"{size / 1e9:.1f} GB, {asked.moved} tensors moved", "processor s",
        ours.processor, peer.processor, "read both", ours.rss_mib, peer.rss_mib,
    )  # fmt: skip
    report([row], asked.json)


if __name__ == "__main__":
    main()
