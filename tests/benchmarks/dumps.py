"""Reading a dump of several ranks beside reading its files: processor time, wall time, memory.

    python tests/benchmarks/dumps.py [--size 2] [--ranks 8] [--dtype bfloat16] [--folder DIR]
        [--runs 3] [--form hook|dumper|npy] [--trace] [--profile]

A model of random weights and a dump of --size GB are written: what each module of each
tensor-parallel rank puts out, in SGLang's forms or as .npy. Ours opens the dump, puts its ranks
together and reads every array once; --trace also makes a trace of it, reads the values and the
statistics of every point, and compares two such traces (each file is read twice). The peer reads
the same files in pieces of 8 MiB.
Torch writes the files and is not measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.files import PYTHON
from tests.benchmarks.measure import compile_as_installed, run_process

HIDDEN, FFN, HEADS, KV, LAYERS, VOCAB = 2048, 5632, 16, 8, 4, 2048
HEAD = HIDDEN // HEADS
NAME = "model.forward_batch_info"
READ = """
import os, sys
buffer = bytearray(8 << 20)
for place, _, files in os.walk(sys.argv[1]):
    for name in files:
        with open(os.path.join(place, name), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
"""
OPEN = """
import sys
from pathlib import Path
from aprfmt.model import open_model
from aprfmt.inference.engines.dumps import open_dump
with open_model(Path(sys.argv[2])) as model, open_dump(Path(sys.argv[1]), None, model) as held:
    assert not held.left, held.left
    for name in held.names:
        held.read(name)
"""
TRACE = """
import sys
from pathlib import Path
from aprfmt.model import open_model
from aprfmt.inference.engines.opening import open_trace
with open_model(Path(sys.argv[2])) as model, open_trace(Path(sys.argv[1]), None, model) as trace:
    assert len(trace.records) > 40, trace.run["unknown"]
    for key, record in trace.records.items():
        assert trace.fetch(key) is not None and record.stats is not None
"""
COMPARE = """
import sys
from pathlib import Path
from aprfmt.model import open_model
from aprfmt.inference.engines.opening import open_trace
from aprfmt.measure.traces import compare_traces
dump = Path(sys.argv[1])
with open_model(Path(sys.argv[2])) as model:
    with open_trace(dump, None, model) as trace, open_trace(dump, None, model) as other:
        assert not trace.run.get("lost"), trace.run["unknown"]
        assert compare_traces(trace, other).compared > 40
"""
EMPTY = """
import sys
from pathlib import Path
from aprfmt.model import open_model
from aprfmt.inference.engines.dumps import open_dump
from aprfmt.inference.engines.opening import open_trace
from aprfmt.measure.traces import compare_traces
with open_model(Path(sys.argv[2])) as model:
    model.hyper["vocab_size"]
"""


def write_model(folder: Path) -> Path:
    """Write a llama of random bfloat16 weights and return its folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for number in range(LAYERS):
        name = f"model.layers.{number}"
        shapes |= {f"{name}.self_attn.{one}_proj.weight": (HIDDEN, HIDDEN) for one in "qo"}
        shapes |= {f"{name}.self_attn.{one}_proj.weight": (KV * HEAD, HIDDEN) for one in "kv"}
        shapes |= {f"{name}.mlp.{one}_proj.weight": (FFN, HIDDEN) for one in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes[f"{name}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    torch.manual_seed(0)
    save_file(
        {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


def rank_modules(rank: int, ranks: int, tokens: int, dtype: str) -> Iterator[tuple[str, Any]]:
    """Yield what each module of one rank puts out: random numbers that agree between ranks.

    The residual stream is the sum of what was added to it, as every norm and layer gives it. Each
    is a copy of its own, as what an engine fetches from its device is: torch.save stores a shared
    storage once.
    """
    import torch

    def whole(seed: int, width: int) -> Any:
        made = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, width, generator=made).to(getattr(torch, dtype))

    def share(seed: int, *widths: int) -> Any:
        return whole(seed * 64 + rank, sum(width // ranks for width in widths))

    stream = whole(99, HIDDEN)
    for number in range(LAYERS):
        name, seed = f"model.layers.{number}", 100 + 10 * number
        yield f"{name}.input_layernorm", [whole(seed, HIDDEN), stream.clone()]
        yield f"{name}.self_attn.qkv_proj", share(seed + 2, HIDDEN, KV * HEAD, KV * HEAD)
        yield f"{name}.self_attn.attn", share(seed + 3, HIDDEN)
        attention, hidden = whole(seed + 4, HIDDEN), whole(seed + 9, HIDDEN)
        yield f"{name}.self_attn.o_proj", attention
        stream = stream + attention
        yield f"{name}.post_attention_layernorm", [whole(seed + 5, HIDDEN), stream.clone()]
        yield f"{name}.mlp.gate_up_proj", share(seed + 7, FFN, FFN)
        yield f"{name}.mlp.act_fn", share(seed + 8, FFN)
        yield f"{name}.mlp.down_proj", hidden
        yield name, [hidden.clone(), stream.clone()]
        stream = stream + hidden


def write_dump(folder: Path, size: float, ranks: int, dtype: str, form: str) -> Path:
    """Write a dump of about `size` bytes; return its folder."""
    import torch

    width = LAYERS * (8 * HIDDEN + (3 * HIDDEN + 3 * FFN + 2 * KV * HEAD - HIDDEN) // ranks)
    tokens = int(size / (width * ranks * (2 if dtype != "float32" else 4)))
    ids, positions = torch.arange(tokens) % VOCAB, torch.arange(tokens)
    said = {"input_ids": ids, "positions": positions, "seq_lens": torch.tensor([tokens])}
    for rank in range(ranks):
        found = dict(rank_modules(rank, ranks, tokens, dtype))
        place = folder / f"TP{rank}_PP0_Rank{rank}_pid{rank}"
        place.mkdir(parents=True)
        if form == "hook":
            batch = {f"{NAME}.{name}": value for name, value in said.items()}
            torch.save({**batch, **found}, place / "Pass00000.pt")
            continue
        flat = {**said}
        for name, value in found.items():
            parts = value if isinstance(value, list) else [value]
            flat |= {f"{name}.{n}" if len(parts) > 1 else name: x for n, x in enumerate(parts)}
        for index, (name, value) in enumerate(flat.items()):
            if form == "npy":
                np.save(place / f"{name}.npy", value.float().numpy() if value.is_floating_point()
                        else value.numpy())  # fmt: skip
                continue
            tags = {"step": 0, "rank": rank, "dump_index": index, "name": name}
            meta = {**tags, "sglang_parallel_info": {"tp_rank": rank, "tp_size": ranks}}
            file = "___".join(f"{key}={tag}" for key, tag in tags.items()) + ".pt"
            torch.save({"value": value, "meta": meta}, place / file)
    return folder


def main() -> None:
    """Write the files, measure both, print one line of each."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--size", type=float, default=2.0, help="GB of the dump")
    asked.add_argument("--ranks", type=int, default=8)
    asked.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    asked.add_argument("--form", default="hook", choices=("hook", "dumper", "npy"))
    asked.add_argument("--folder", type=Path)
    asked.add_argument("--runs", type=int, default=3)
    asked.add_argument("--trace", action="store_true", help="also make a trace of it")
    asked.add_argument("--profile", action="store_true", help="print where the time goes")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        root = Path(temporary)
        compile_as_installed(root / "compiled")
        # A process of its own: what this one holds would count as its children's peak memory.
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            model = apart.submit(write_model, root / "model").result()
            dump = apart.submit(
                write_dump, root / "dump", given.size * 1e9, given.ranks, given.dtype, given.form
            ).result()
        files = [path for path in dump.rglob("*") if path.is_file()]
        total = sum(path.stat().st_size for path in files)
        print(f"{len(files)} files, {total / 1e9:.2f} GB, {given.dtype}, {given.form}")
        if given.profile:
            code = TRACE if given.trace else OPEN
            where = [str(PYTHON), "-m", "cProfile", "-s", "tottime", "/dev/stdin"]
            made = subprocess.run(
                [*where, str(dump), str(model)], input=code, capture_output=True, text=True
            )
            print(made.stdout[:5000], made.stderr[-2000:])
            return
        peer = run_process([str(PYTHON), "-c", READ, str(dump)], runs=given.runs)
        idle = run_process([str(PYTHON), "-c", "pass"], runs=given.runs)
        start = run_process([str(PYTHON), "-c", EMPTY, str(dump), str(model)], runs=given.runs)
        reading = peer.processor - idle.processor
        print(
            f"reading the files: {reading:.2f} s of processor time "
            f"({peer.seconds - idle.seconds:.2f} s by the clock), {total / 1e9 / reading:.2f} GB/s"
        )
        works = {"arrays": (OPEN, 1)}
        if given.trace:
            works |= {"trace": (TRACE, 1), "comparison": (COMPARE, 2)}
        for name, (code, times) in works.items():
            ours = run_process([str(PYTHON), "-c", code, str(dump), str(model)], runs=given.runs)
            spent = ours.processor - start.processor
            print(
                f"{name}: {spent:.2f} s of processor time ({ours.seconds - start.seconds:.2f} s by "
                f"the clock), {times * total / 1e9 / spent:.2f} GB/s, "
                f"{times * reading / spent:.2f} of read speed; "
                f"{ours.rss_mib - start.rss_mib:.0f} MiB more than the program"
            )


if __name__ == "__main__":
    main()
