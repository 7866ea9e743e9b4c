"""Gradients on one GPU: right, in time and in memory; below five minutes.

    python tests/benchmarks/step_gpu.py [--json FILE] [--folder DIR] [--device cuda] [--small]

The demo model, a Qwen2 of the 0.5B shape with random weights in bfloat16, and a LoRA adapter beside
its NF4 form, each with one batch. Every gradient of a parameter and of a capture point is compared
between CPU and GPU, backward from the loss, with float64 on the CPU as the arbiter. A backward with
all points kept is timed against torch's own through transformers' model on the same device (at most
2.5 times), and the device's peak is held against what was said before. `--small` leaves out the
0.5B shape. Without a GPU everything is NOT-RUN, exit 2; `--device cpu` tries the script itself.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests.benchmarks.gpu import random_model

ROOT = Path(__file__).resolve().parents[2]
TOKENS, RANK = 64, 8
TIMES = 2.5  # a backward with every point kept, over torch's own
SAID = 1.25  # the device's peak over what was said


def write_batch(path: Path, vocab: int) -> Path:
    """Write a batch of two rows, one of them padded, its prompts not scored."""
    ids = np.array([[(5 + 37 * i + 11 * row) % vocab for i in range(TOKENS)] for row in (0, 1)])
    mask = np.ones_like(ids)
    mask[1, -9:] = 0
    labels = np.where(mask > 0, ids, -100)
    labels[:, :7] = -100
    np.savez(path, input_ids=ids, attention_mask=mask, labels=labels)
    return path


def write_adapter(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write a PEFT adapter for these modules, no factor zero."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    tensors = {}
    for module, (out, width) in shapes.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = rng.normal(size=(RANK, width)).astype(np.float32) / 50
        tensors[f"{name}.lora_B.weight"] = rng.normal(size=(out, RANK)).astype(np.float32) / 50
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def compared(
    path: Path, batch: Path, runs: Sequence[tuple[str, str]], adapter: Path | None = None
) -> dict[str, Any]:
    """Compare the gradients of these runs; return what was found."""
    from aprfmt.adapters.trained_pairs import trained_pairs
    from aprfmt.inference.batch import read_batch
    from aprfmt.inference.gradients.device_gradients import GradientRun, gradients_between
    from aprfmt.model import open_model
    from aprfmt.model.adapter_reading import read_adapter

    began = time.perf_counter()
    with open_model(path) as model:
        loaded = read_batch(batch, int(model.hyper["vocab_size"]))
        pairs: Any = ()
        if adapter is not None:
            opened, read = read_adapter(adapter)
            with opened:
                pairs = trained_pairs(read, model)
        found = gradients_between(model, loaded, [GradientRun(*run) for run in runs], pairs=pairs)
    worst = [max(found.gaps, key=lambda gap: gap.distances[run]) for run in range(len(runs))]
    return {
        "runs": [str(run) for run in found.runs],
        "compared": len(found.gaps),
        "open": len(found.open),
        "loss": found.loss,
        "losses": found.losses,
        "worst": [(gap.key, gap.distances[run], gap.allowed[run]) for run, gap in enumerate(worst)],
        "first_wrong": [found.first(run) for run in range(len(runs))],
        "agrees": found.agrees,
        "seconds": time.perf_counter() - began,
    }


def median(work: Callable[[], Any], device: str, runs: int = 7) -> float:
    """Return the median seconds of `work`, the device idle before and after."""
    import torch

    def idle() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    work()
    times = []
    for _ in range(runs):
        idle()
        began = time.perf_counter()
        work()
        idle()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def timed(path: Path, batch: Path, device: str, dtype: str) -> dict[str, Any]:
    """Time a backward with all points kept, one with none, and transformers' own."""
    import torch

    from aprfmt.inference.batch import read_batch
    from aprfmt.inference.gradients.backend import GradientBackend
    from aprfmt.inference.gradients.batch_gradients import PointGradients, prepare
    from aprfmt.inference.gradients.documents import documents
    from aprfmt.inference.gradients.memory import gradient_memory
    from aprfmt.model import open_model

    found: dict[str, Any] = {"device": device, "dtype": dtype}
    with open_model(path) as model:
        loaded = read_batch(batch, int(model.hyper["vocab_size"]))
        first = documents(loaded)[0]
        said = gradient_memory(model, loaded, dtype=dtype, points=None, device=device)
        backend = GradientBackend(device, dtype)
        if device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        made, leaves, _ = prepare(model, backend, None, ())

        def cleared() -> None:
            for leaf in leaves.leaves.values():
                leaf.grad = None

        def every() -> None:
            cleared()
            made.recorder = PointGradients(None, backend)
            made.backward(first, "all")

        def plain() -> None:
            cleared()
            made.recorder = None
            made.backward(first, "all")

        found["all_points_ms"] = 1000 * median(every, device)
        if device != "cpu":
            found["peak_said"] = said.peak
            found["peak"] = torch.cuda.max_memory_allocated()
        found["no_points_ms"] = 1000 * median(plain, device)
        made.weights.close()
    if importlib.util.find_spec("transformers") is None:
        return {**found, "peer": "NOT-RUN: transformers is not installed"}
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    peer: Any = auto.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).to(device)
    ids = torch.from_numpy(first.ids[None]).to(device)
    labels = torch.from_numpy(np.where(first.labels >= 0, first.labels, -100)).to(device)

    def own() -> None:
        peer.zero_grad(set_to_none=True)
        logits = peer(ids, use_cache=False).logits[0]
        loss: Any = torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100)
        loss.backward()

    found["peer_ms"] = 1000 * median(own, device)
    found["times"] = found["all_points_ms"] / found["peer_ms"]
    return found


def main() -> int:
    """Run everything; exit 1 where a goal is missed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    import torch

    device = given.device
    if device != "cpu" and not torch.cuda.is_available():
        print("NOT-RUN: torch sees no GPU")
        return 2
    from aprfmt.conversion import convert

    keep = tempfile.TemporaryDirectory(prefix="aprfmt-step-gpu-")
    folder = given.folder or Path(keep.name)
    folder.mkdir(parents=True, exist_ok=True)
    demo = ROOT / "fixtures" / "demo"
    rows: dict[str, Any] = {}
    missed = []

    def shown(name: str, row: dict[str, Any], good: bool) -> None:
        rows[name] = row
        print(f"{'PASS' if good else 'FAIL'}  {name}: {json.dumps(row, default=str)}", flush=True)
        if not good:
            missed.append(name)

    def check(path: Path, name: str, modules: Sequence[str], dtypes: Sequence[str]) -> None:
        from aprfmt.model import open_model

        with open_model(path) as model:
            batch = write_batch(folder / f"{name}.npz", int(model.hyper["vocab_size"]))
            shapes = {module: model[f"{module}.weight"].shape for module in modules}
        for dtype in dtypes:
            row = compared(path, batch, [("cpu", "float32"), (device, dtype)])
            shown(f"{name}, gradients, {dtype}", row, row["agrees"])
        packed = folder / f"{name}-nf4"
        if not packed.exists():
            convert(path, packed, to="safetensors", quantize="NF4")
        adapter = write_adapter(folder / f"{name}-adapter", shapes)
        row = compared(packed, batch, [("cpu", "float32"), (device, dtypes[-1])], adapter)
        shown(f"{name}, QLoRA, {dtypes[-1]}", row, row["agrees"])
        row = timed(path, batch, device, dtypes[-1])
        good = row.get("times", 0.0) <= TIMES
        good = good and row.get("peak", 0) <= SAID * row.get("peak_said", 1)
        shown(f"{name}, backward, {dtypes[-1]}", row, good)

    layer = "model.layers.{}.self_attn.{}"
    names = [layer.format(i, which) for i in (0, 1) for which in ("q_proj", "v_proj")]
    check(demo, "demo", names, ("float32", "bfloat16"))
    if not given.small:
        check(random_model(folder, "bfloat16"), "qwen2 0.5B", names, ("bfloat16",))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1, default=str))
    print(f"missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
