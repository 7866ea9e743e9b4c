"""The same question has the same answer, word for word: no output hangs on the order of a set.

Python draws the order of a set of texts anew in each process, by PYTHONHASHSEED.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from aprfmt.cli.commands import COMMANDS
from tests import approved
from tests.checks.gates.faults import copied, swapped_tokens
from tests.cli.run import ROOT, aprfmt
from tests.conversion.folders import tensors_of, write_mixed
from tests.patience import PATIENCE
from tests.scope import SAMPLED, SCOPE, chosen

PART = os.environ.get(SCOPE) == SAMPLED
ANSWERS = Path(__file__).parent / "answers"
SEEDS = (0, 3) if PART else (0, 1, 2, 3)
# {m} is the demo model, {g} its GGUF, {q} a quantized one, {l} one with an adapter merged into
# some parts, {t} one with tokens exchanged, {k} one with other keys, {x} a text, {o} a new folder.
RUNS: Mapping[str, tuple[str, ...]] = {
    "demo": ("demo --out {o}/demo",),
    "inspect": ("inspect {m}", "inspect {q}"),
    "tensors": ("tensors {q}",),
    "tree": ("tree {g}",),
    "hex": ("hex {g} --limit 4",),
    "cat": ("cat {g} output_norm.weight",),
    "import": ("import {m} -o {o}/i.apr",),
    "export": ("export {g} --to safetensors -o {o}/e",),
    "convert": ("convert {m} {o}/c.gguf", "convert {t} {o}/c.apr"),
    "quantize": ("quantize {m} {o}/q.gguf --type Q4_K_M",
                 "quantize {m} {o}/a --to safetensors --type AWQ-g32"),
    "set": ("set {g} general.name=x general.author=y -o {o}/s.gguf",),
    "split": ("split {m} {o}/split --max-shard-size 3M",),
    "merge": ("merge {g} {o}/m.gguf",),
    "repair": ("repair {g} --from {g} -o {o}/r.gguf",),
    "diff": ("diff {m} {l}", "diff {m} {t}", "diff {m} {k}", "diff {m} {q}"),
    "parity": ("parity {g} --between numpy numpy:float64 --ids 1,2,3",),
    "diagnose": ("diagnose {m} {l} --ids 1,2,3", "diagnose {m} {t} --ids 1,2,3",
                 "diagnose {m} {k} --ids 1,2,3"),
    "attest": ("attest {q} --from {m}", "attest {g} --from {q}"),
    "step": ("step {m} --after {l} --optimizer adamw:lr=1e-3",),
    "hash": ("hash {g}",),
    "scan": ("scan {m} {g} {q} {t} -o {o}/scan.jsonl --jobs 1",),
    "validate": ("validate {m}", "validate {k}"),
    "tokenize": ("tokenize {g} hello",),
    "template": ("template {g} --user hi",),
    "trace": ("trace {g}", "trace {g} --payload --ids 1,2,3 --layers 0"),
    "logits": ("logits {g} --ids 1,2,3",),
    "run": ("run {g} --ids 1,2,3 --max-tokens 2",),
    "eval": ("eval {g} --text {x}",),
    "qa": ("qa {m} --only init-statistics --only metadata --only tensor-contract",
           "qa {k} --only metadata"),
    "explain": ("explain", "explain Q4_K", "explain nothing"),
    "doctor": ("doctor",),
}  # fmt: skip
_DRIVER = """
import json, sys
from tests.cli.run import aprfmt
runs = json.loads(sys.stdin.read())
found = {}
for text in runs:
    done = aprfmt(*text.split())
    found[text] = [done.code, done.out, done.err]
print(json.dumps(found))
"""
_TIME = re.compile(r"[\d.,]+ *(?:ms|s|min|[KMGT]?i?B(?:/s)?|tokens/s|%|tokens a second)\b")


def test_every_command_is_asked() -> None:
    assert set(RUNS) == set(COMMANDS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("order")
    found = {"m": demo_model, "g": folder / "demo.gguf", "q": folder / "small.gguf"}
    assert aprfmt("convert", demo_model, found["g"]).code == 0
    assert aprfmt("quantize", demo_model, found["q"], "--type", "Q4_K_M").code == 0
    for name in "ltk":
        found[name] = copied(demo_model, folder / name)
    swapped_tokens(found["t"])
    config = json.loads((found["k"] / "config.json").read_text("utf-8"))
    changed = {"rms_norm_eps": 1e-2, "rope_theta": 77.0, "one": 1, "two": 2, "three": 3}
    (found["k"] / "config.json").write_text(json.dumps(config | changed), "utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        path = found["k"] / name
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"read_by": "nobody"}))
    (found["k"] / "notes.xyz").write_text("a file that nobody reads")
    merged(found["l"])
    (folder / "x.txt").write_text("It is a truth universally acknowledged, and so on.", "utf-8")
    return {**{name: str(path) for name, path in found.items()}, "x": str(folder / "x.txt")}


def merged(folder: Path) -> None:
    """Add products of rank 2 to five kinds of matrices in all layers."""
    import numpy as np

    rows = dict(tensors_of(folder))
    rng = np.random.default_rng(5)
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
    for name, (dtype, shape, raw) in rows.items():
        if not name.endswith(tuple(f"{kind}.weight" for kind in kinds)):
            continue
        assert dtype == "BF16"
        wide = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        delta = rng.standard_normal((shape[0], 2)) @ rng.standard_normal((2, shape[1]))
        sums = (wide + 0.02 * delta).astype(np.float32)
        rows[name] = (dtype, shape, (sums.view(np.uint32) >> 16).astype("<u2").tobytes())
    write_mixed(folder / "model.safetensors", rows)


def test_no_output_hangs_on_the_order_of_sets(inputs: Mapping[str, str], tmp_path: Path) -> None:
    texts: dict[int, dict[str, list[str]]] = {}
    # {l} is merged, {t} has other tokens: the longest lists of what differs.
    every = [text for name in RUNS for text in RUNS[name]]
    asked = [text for text in every if not PART or chosen(text, 3) or text.startswith("diff")]
    for seed in SEEDS:
        out = tmp_path / f"o{seed}"
        out.mkdir()
        runs = [text.format(**inputs, o=out) for text in asked]
        done = subprocess.run(
            [sys.executable, "-c", _DRIVER], input=json.dumps(runs), capture_output=True, text=True,
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": str(seed)}, timeout=PATIENCE * 5,
            check=True,
        )  # fmt: skip
        told = json.loads(done.stdout.splitlines()[-1])
        texts[seed] = {
            command.replace(str(out), "OUT"): [
                _TIME.sub("TIME", str(part).replace(str(out), "OUT")) for part in parts
            ]
            for command, parts in told.items()
        }
    first = texts[SEEDS[0]]
    assert len(first) == len(asked)
    for text in asked:
        command = text.format(**inputs, o="OUT")
        if text != "doctor":  # says what the machine has
            name = re.sub(r"[^\w.=-]+", "_", text)
            paths = {path: f"{{{key}}}" for key, path in inputs.items()}
            told = "\n".join((f"$ aprfmt {text}", *first[command]))
            approved.check(ANSWERS / f"{name}.txt", told, paths)
    for seed in SEEDS[1:]:
        assert texts[seed].keys() == first.keys()
        for command, said in texts[seed].items():
            assert said == first[command], f"{command}: seed {seed} says something else"


# --- the source -----------------------------------------------------------------------------------

# What does not show in which order its argument comes.
UNORDERED = {"sorted", "set", "frozenset", "any", "all", "sum", "min", "max", "len"}


def is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub):
        return is_set(node.left) or is_set(node.right)
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(node, ast.Set | ast.SetComp) or (
        isinstance(called, ast.Name) and called.id in ("set", "frozenset")
    )


def ordered_uses(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield sets whose order may show: looped over, joined, or made a list, tuple or dict of."""
    fine = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and node.func.id in UNORDERED
        for argument in node.args
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            sources = [node.iter]
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            sources = [] if id(node) in fine else [each.iter for each in node.generators]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            sources = list(node.args) if name in ("join", "list", "tuple", "fromkeys") else []
        else:
            continue
        yield from (each for each in sources if is_set(each))


ORDERLESS = {  # loops whose order shows nowhere
    "aprfmt/codecs/native/__init__.py",  # fills a table
    "aprfmt/formats/atomic.py",  # syncs folders
    "aprfmt/causes/forward/moe.py",  # numbers, whose order is not drawn
}


def test_no_loop_runs_over_a_set() -> None:
    found = {}
    for folder in ("aprfmt", "cli", "inference"):  # the last two are linked from the first
        for path in (ROOT / folder).rglob("*.py"):
            places = [node.lineno for node in ordered_uses(ast.parse(path.read_text("utf-8")))]
            if places:
                found[str(path.relative_to(ROOT))] = places
    assert set(found) <= ORDERLESS, found
