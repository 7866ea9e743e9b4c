"""The GPU's end-to-end figures: prefill, decode, tracing, start-up, in one run on one GPU.

    python tests/benchmarks/gpu.py [--json FILE] [--folder DIR] [--only decode,prefill,trace,...]

A Qwen2 of the 0.5B shape with random weights is written to `--folder` first. Every row is checked
against float64 or another path before it is timed. Times are medians of wall-clock times that end
with the device idle. transformers is timed beside where it is installed. Without a GPU everything
is NOT-RUN, exit 2.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.shapes import MADE, made_folder

ROOT = Path(__file__).resolve().parents[2]
PREFILL, DECODE = 512, 256
IDS = [5 + 37 * i % 40000 for i in range(PREFILL)]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 24, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
# What is to be reached: unit, goal, whether less is better, and where the number comes from.
MIXED = ("torch", "cupy")
GOALS: dict[str, tuple[str, float, bool, str]] = {
    "prefill 512, float32, all rows": ("ms", 16.3, True, "torch.compile"),
    "prefill 512, float32, last row": ("ms", 16.3, True, "torch.compile, all rows"),
    "decode, bfloat16": ("tokens/s", 910.0, False, "torch.compile with CUDA graphs"),
    "start to first token": ("s", 5.0, True, "own limit"),
    "trace of all points": ("times the plain pass", 1.3, True, "own limit"),
    "trace of all points but scores and probs": ("times the plain pass", 1.3, True, "own limit"),
} | {
    f"prefill 512, {name}, {backend}": ("times transformers", 1.2, True, "eager pass")
    for name in MADE
    for backend in MIXED
}


def random_model(folder: Path, dtype: str) -> Path:
    """Write the model once; equal numbers in every dtype that holds them."""
    import torch
    from safetensors.torch import save_file

    target = folder / f"qwen2-0.5b-shape-{dtype}"
    if (target / "model.safetensors").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    hidden, ffn, kv = 896, 4864, 128
    shapes = {"model.embed_tokens.weight": (151936, hidden), "model.norm.weight": (hidden,)}
    for layer in range(24):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "self_attn.q_proj.weight": (hidden, hidden),
            p + "self_attn.k_proj.weight": (kv, hidden),
            p + "self_attn.v_proj.weight": (kv, hidden),
            p + "self_attn.o_proj.weight": (hidden, hidden),
            p + "self_attn.q_proj.bias": (hidden,), p + "self_attn.k_proj.bias": (kv,),
            p + "self_attn.v_proj.bias": (kv,), p + "mlp.gate_proj.weight": (ffn, hidden),
            p + "mlp.up_proj.weight": (ffn, hidden), p + "mlp.down_proj.weight": (hidden, ffn),
            p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, device="cuda") * (0.04 if len(shape) == 2 else 0.1)
        x = 1 + x if "norm" in name else x
        tensors[name] = x.bfloat16().to(getattr(torch, dtype)).cpu()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": dtype}))
    return target


def median(work: Callable[[], Any], runs: int = 15) -> float:
    """Return the median seconds of `work`, the device idle before and after."""
    import torch

    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def opened(path: Path, dtype: str, stack: Any, device: str = "cuda", backend: str = "torch") -> Any:
    """Return a session on the GPU."""
    from aprfmt.inference.device import choose_device
    from aprfmt.inference.session import Session
    from aprfmt.model import open_model

    model = stack.enter_context(open_model(path))
    return stack.enter_context(Session.open(model, choose_device(device, backend, dtype).open()))


def rel(found: Any, expected: Any) -> float:
    """Return the relative L2 distance."""
    import numpy as np

    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def prefill(folder: Path) -> dict[str, Any]:
    """Time 512 tokens in float32, all rows of logits and the last one; check against float64."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        path = random_model(folder, "float32")
        session = opened(path, "float32", stack)
        first = median(lambda: session._run_pass(IDS, None, None, "all"), 1)
        for _ in range(3):
            every = session._run_pass(IDS, None, None, "all")
            session.prefill(IDS)
        found: dict[str, Any] = {
            "prefill 512, float32, all rows": 1e3
            * median(lambda: session._run_pass(IDS, None, None, "all")),
            "prefill 512, float32, last row": 1e3 * median(lambda: session.prefill(IDS)),
            "first pass, seconds": first,
            "recorded": session._graphs is not None and len(session._graphs._graphs),
        }
        logits = session.backend.to_numpy(every)
        with ExitStack() as inner:
            exact = opened(path, "float64", inner).logits(IDS)
        found["prefill, relative L2 to float64"] = rel(logits, exact)
        found["prefill, argmax equal"] = bool((logits.argmax(-1) == exact.argmax(-1)).all())
        found["facts"] = dict(session.backend.facts())
    return found


def decode(folder: Path) -> dict[str, Any]:
    """Time greedy steps in bfloat16 behind a prompt, and from the process's start to a token."""
    from contextlib import ExitStack

    from aprfmt.inference.sampling import Sampler, Sampling

    with ExitStack() as stack:
        began = time.perf_counter()
        session = opened(random_model(folder, "bfloat16"), "bfloat16", stack)
        stream = session.generate(IDS[:128], Sampler(Sampling()), DECODE + 8)
        made, times = [next(stream)], [time.perf_counter()]
        for token in stream:
            made.append(token)
            times.append(time.perf_counter())
        again = list(session.generate(IDS[:128], Sampler(Sampling()), DECODE + 8))
        assert again == made, "replayed steps differ"
        steps = [b - a for a, b in pairwise(times[8:])]
        late = statistics.median(steps)
        reference = opened(random_model(folder, "bfloat16"), "float32", stack)
        whole = reference.logits([*IDS[:128], *made[:16]])
        ours = session.logits([*IDS[:128], *made[:16]])
        floor = 0.988e9 / 4.22e12
        return {
            "decode, bfloat16": 1 / late,
            "decode, whole": (len(times) - 9) / (times[-1] - times[8]),
            "opened to first token, in process": times[0] - began,
            "opened to tenth token, in process": times[9] - began,
            "decode, share of the weights' read time": floor / late,
            "decode, relative L2 to float32": rel(ours, whole),
            "facts": dict(session.backend.facts()),
        }


def process(folder: Path) -> dict[str, Any]:
    """Time `aprfmt run` as a process, kernels compiled anew and then from their cache on disk."""
    import subprocess

    found: dict[str, Any] = {}
    command = [
        sys.executable,
        "-m",
        "aprfmt",
        "run",
        str(random_model(folder, "bfloat16")),
        "--ids",
        ",".join(map(str, IDS[:128])),
        "--max-tokens",
        str(DECODE),
        "--ignore-stop",
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--json",
    ]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"PYTHONPATH": str(ROOT), "CUPY_CACHE_DIR": cache}
        for name in ("compiling", "compiled"):
            began = time.perf_counter()
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            took = time.perf_counter() - began
            if done.returncode:
                return {"process": f"failed: {done.stderr[-300:]}"}
            speed = json.loads(done.stdout)["speed"]
            found[f"process, {name}: s"] = took
            found[f"process, {name}: load to first token, s"] = (
                speed["load_seconds"] + speed["prefill_seconds"]
            )
            found[f"process, {name}: tokens/s"] = speed["decode_tokens_per_second"]
    return found | {"start to first token": found["process, compiling: load to first token, s"]}


def many(folder: Path) -> dict[str, Any]:
    """Time a prefill with the layers on all GPUs beside one GPU's, and compare their logits."""
    from contextlib import ExitStack

    import torch

    if torch.cuda.device_count() < 2:
        return {"layers on all GPUs": "NOT-RUN: one GPU"}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        path = random_model(folder, "float32")
        logits = {}
        for device in ("cuda:0", "cuda:all"):
            session = opened(path, "float32", stack, device)
            logits[device] = session.logits(IDS)
            session.prefill(IDS)
            found[f"{device}: prefill, ms"] = 1e3 * median(partial(session.prefill, IDS), 7)
            took = median(partial(session.step, 7), 33)
            found[f"{device}: steps, tokens/s"] = 1 / took
            found[f"{device}: facts"] = dict(session.backend.facts())
        found["all GPUs, relative L2 to one"] = rel(logits["cuda:all"], logits["cuda:0"])
        same = logits["cuda:all"].argmax(-1) == logits["cuda:0"].argmax(-1)
        found["all GPUs, argmax equal"] = bool(same.all())
    return found


def trace(folder: Path) -> dict[str, Any]:
    """Time a trace's statistics beside the pass alone, recorded both."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        session = opened(random_model(folder, "float32"), "float32", stack)
        every = tuple(session.points)
        outer = [key for key, item in session.points.items() if not item.point.inner]
        found: dict[str, Any] = {}
        session.trace(IDS, [])
        for name, keys in (("eager, all", every), ("eager, outer", outer)):
            found[f"trace first, {name}"] = 1e3 * median(partial(session.trace, IDS, keys), 1)
        for _ in range(3):
            session.trace(IDS, [])
            session.trace(IDS, every)
            session.trace(IDS, outer)
        plain = median(lambda: session._run_pass(IDS, None, None, "last"))
        found["plain pass, ms"] = 1e3 * plain
        for name, keys in (
            ("trace of all points", every),
            ("trace of all points but scores and probs", outer),
        ):
            took = median(partial(session.trace, IDS, keys))
            found[name] = took / plain
            found[f"{name}, ms"] = 1e3 * took
        found["points"] = {"all": len(session.trace(IDS, every).records), "outer": len(outer)}
    return found


def transformers(folder: Path) -> dict[str, Any]:
    """Time transformers' own eager pass and generation on the same files."""
    if importlib.util.find_spec("transformers") is None:
        return {"transformers": "NOT-RUN: not installed"}
    import torch
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    found: dict[str, Any] = {}
    ids = torch.tensor([IDS], device="cuda")
    with torch.inference_mode():
        model = loader.from_pretrained(random_model(folder, "float32"), dtype=torch.float32).cuda()
        from contextlib import ExitStack

        logits = model(ids).logits[0].double().cpu().numpy()
        with ExitStack() as stack:
            exact = opened(random_model(folder, "float32"), "float64", stack).logits(IDS)
        found["transformers prefill, relative L2 to our float64"] = rel(logits, exact)
        found["transformers prefill, all rows, ms"] = 1e3 * median(lambda: model(ids), 7)
        del model
        model = loader.from_pretrained(
            random_model(folder, "bfloat16"), dtype=torch.bfloat16
        ).cuda()
        short = ids[:, :128]
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(short, max_new_tokens=8, **options)
        took = median(lambda: model.generate(short, max_new_tokens=64, **options), 3)
        found["transformers decode, tokens/s"] = 64 / took
    return found


def mixings(folder: Path) -> dict[str, Any]:
    """Time 512 tokens through every way to mix, on both backends, as shares of transformers' time.

    Float32, the last row of logits only; an encoder gives its pooled embedding, transformers all
    hidden rows. transformers computes its "eager" attention. Each model's first passes record what
    can be recorded and are not timed. A model that fails has its error as text, and the others go
    on.
    """
    import torch

    found: dict[str, Any] = {}
    for name in MADE:
        try:
            found |= time_mixing(name, folder)
        except Exception as error:  # one model's failure is a row of the table
            said = " ".join(str(error).split())[:200]
            found[f"prefill 512, {name}, FAILED"] = f"{type(error).__name__}: {said}"
        torch.cuda.empty_cache()
    return found


def time_mixing(name: str, folder: Path) -> dict[str, Any]:
    """Return {row: transformers' milliseconds, or a backend's share of them} of one model."""
    from contextlib import ExitStack

    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    ids = torch.tensor([IDS], device="cuda")
    path = made_folder(name, folder / name)
    encodes = name == "encoder"
    kind: Any = AutoModel if encodes else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").cuda()
    given: dict[str, Any] = {} if encodes else {"use_cache": True, "logits_to_keep": 1}
    with torch.inference_mode():
        theirs = median(partial(model, ids, **given))
        theirs = median(partial(model, ids, **given))
    del model
    found: dict[str, Any] = {f"prefill 512, {name}, transformers, ms": 1e3 * theirs}
    for backend in MIXED:
        with ExitStack() as stack:
            session = opened(path, "float32", stack, backend=backend)
            work = partial(session.embedding if encodes else session.prefill, IDS)
            median(work, 4)
            found[f"prefill 512, {name}, {backend}"] = median(work) / theirs
    return found


def kernels(folder: Path) -> dict[str, Any]:
    """Run gpu_kernels.py, which prints its own table; its rows go into the JSON."""
    import subprocess

    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "tests.benchmarks.gpu_kernels", "--json", file.name]
        done = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE)
        print(done.stdout)
        if done.returncode:
            return {"kernels": f"NOT-RUN: exit {done.returncode}"}
        rows = json.loads(Path(file.name).read_text())["rows"]
    return {"kernels": rows}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "decode": decode, "process": process, "prefill": prefill, "trace": trace, "many": many,
    "transformers": transformers, "mixings": mixings, "kernels": kernels,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "aprfmt-gpu")
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("NOT-RUN: torch finds no CUDA device", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    for name in options.only.split(","):
        found |= PARTS[name](options.folder)
        torch.cuda.empty_cache()
    for name, value in found.items():
        if name in GOALS:
            unit, goal, less, source = GOALS[name]
            reached = value <= goal if less else value >= goal
            print(
                f"{name:45} {value:10.3f} {unit:22} goal {goal} ({source})  "
                f"{'reached' if reached else 'MISSED'}"
            )
        elif not isinstance(value, list):
            print(f"{name:45} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
