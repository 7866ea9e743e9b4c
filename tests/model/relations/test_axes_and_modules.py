"""Weights with their axes exchanged, and modules that a quantization names by another prefix.

Seen red: one transposed tensor of many ended the reading, overrides under another prefix read with
the bits of all others, a turned copy written as it was.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

import aprfmt
from aprfmt.model import open_model
from aprfmt.model.exchanged_axes import _axes_relation
from tests.cli.run import aprfmt as command
from tests.model.relations.edits import edited, remedied, same
from tests.models import save_tiny

TURNED = {
    "stacked experts": ("llama4", r"experts[.](gate_up_proj|down_proj)$"),
    "one of two": ("gpt_oss", r"experts[.]gate_up_proj$"),
    "every expert by itself": ("qwen3_moe", r"experts[.][0-9]+[.]\w+[.]weight$"),
    "matrices of an MLP": ("llama", r"mlp[.](up|gate|down)_proj[.]weight$"),
    "key and value": ("qwen2", r"self_attn[.][kv]_proj[.]weight$"),
}


@pytest.mark.parametrize("label", TURNED)
def test_turned_weights_are_one_cause_and_are_turned_back(label: str, tmp_path: Path) -> None:
    arch, pattern = TURNED[label]
    good = tmp_path / "good"
    save_tiny(arch, good)
    with open_model(good) as model:
        assert model.relations == ()
        names = [n for n in model if re.search(pattern, n) and len(set(model[n].shape[-2:])) > 1]
    assert len(names) > 1
    bad = edited(
        good, tmp_path / "bad",
        lambda held: {n: t.transpose(-1, -2) if n in names else t for n, t in held.items()},
    )  # fmt: skip
    with open_model(bad) as model:
        (relation,) = model.relations
        assert relation.kind == "axes" and sorted(relation.where) == sorted(names)
    report = aprfmt.diff(good, bad)
    assert report.exit_code() == 1 and not report.differs
    found = command("diagnose", good, bad, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["transpose"]
    assert command("validate", bad).code == 1
    mended = remedied(relation.remedy, tmp_path / "mended")
    same(good, mended)
    stored = [(folder / "model.safetensors").read_bytes() for folder in (good, mended)]
    assert len(stored[0]) == len(stored[1])
    assert command("convert", bad, tmp_path / "f16", "--encoding", "F16", "--quiet").code == 0
    assert not open_model(tmp_path / "f16").relations


def test_shapes_turned_without_their_values_are_not_called_transposed(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "good")
    bad = edited(
        tmp_path / "good", tmp_path / "bad",
        lambda held: {n: t.reshape(t.shape[::-1]) if ".mlp." in n else t for n, t in held.items()},
    )  # fmt: skip
    report = aprfmt.diff(tmp_path / "good", bad)
    assert report.relations == () and report.exit_code() == 1
    (finding,) = report.findings
    assert finding.cause == "transpose" and "only the shape" in finding.says


TABLES = {
    "its table of tokens": ("llama", ("model.embed_tokens.weight",)),
    "the table that is the head too": ("gemma2", ("model.embed_tokens.weight",)),
    "one beside a learned table of positions": ("gpt2", ("transformer.wte.weight",)),
    "a head alone": ("llama", ("lm_head.weight",)),
}


@pytest.mark.parametrize("label", TABLES)
def test_a_turned_table_changes_no_size_of_the_model(label: str, tmp_path: Path) -> None:
    arch, names = TABLES[label]
    good = tmp_path / "good"
    save_tiny(arch, good)
    with open_model(good) as model:
        sizes = {name: model.hyper[name] for name in ("vocab_size", "hidden_size")}
        stored = [name for name in model if name in names]
    assert stored
    bad = edited(
        good, tmp_path / "bad",
        lambda held: {n: t.T if n in stored else t for n, t in held.items()},
    )  # fmt: skip
    with open_model(bad) as model:
        assert {name: model.hyper[name] for name in sizes} == sizes
    found = command("diagnose", good, bad, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["transpose"]
    checks = command("validate", bad, "--json").json["checks"]
    (failed,) = [one for one in checks if one["outcome"] == "FAIL"]
    assert failed["name"] == "shapes" and "axes are exchanged" in failed["found"]


def test_one_turned_matrix_is_no_relation(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "good")
    one = "model.layers.0.mlp.up_proj.weight"
    bad = edited(tmp_path / "good", tmp_path / "bad", lambda held: held | {one: held[one].T})
    with open_model(bad) as model:
        assert model.relations == ()
    report = aprfmt.diff(tmp_path / "good", bad)
    assert [row.cause for row in report.findings] == ["transpose"]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "net.model."])
def test_overrides_of_modules_that_are_not_there_are_named(
    prefix: str, demo_model: Path, tmp_path: Path
) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    assert command("quantize", demo_model, right, "--type", "MLX-4bit-g64", "--quiet").code == 0
    config = json.loads((right / "config.json").read_text())
    key = "quantization" if "quantization" in config else "quantization_config"
    said = config[key]
    packed = [name.removesuffix(".scales") for name in open_model(right).source.tensors
              if name.endswith(".scales")]  # fmt: skip
    inside = [name for name in packed if name.startswith("model.layers.")]
    own = {"bits": said["bits"], "group_size": said["group_size"]}
    shutil.copytree(right, wrong)
    for folder, head in ((right, "model."), (wrong, prefix)):
        names = {f"{head}{name.removeprefix('model.')}": own for name in inside}
        rest = {name: own for name in packed if name not in inside}
        section = {**said, "bits": 8, **rest, **names}
        keys = {k: section for k in ("quantization", "quantization_config") if k in config}
        (folder / "config.json").write_text(json.dumps(config | keys))
    with open_model(right) as model:
        assert model.relations == ()
    with open_model(wrong) as model:
        (relation,) = model.relations
        assert (relation.kind, relation.count) == ("modules", len(inside))
    found = command("diagnose", right, wrong, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["packing_claim"]
    failed = [r["name"] for r in command("validate", wrong, "--json").json["checks"]
              if r["outcome"] == "FAIL"]  # fmt: skip
    assert failed == ["quantization"]
    assert relation.remedy in command("convert", wrong, tmp_path / "x").err
    same(right, remedied(relation.remedy, tmp_path / "mended"))


@pytest.mark.parametrize(
    ("published", "experts"), [("[out, in]", ()), ("[in, out]", ()), ("[in, out]", (4,))]
)
def test_axes_are_named_as_they_are_and_as_readers_expect_them(
    published: str, experts: tuple[int, ...]
) -> None:
    """Of stacked experts all three axes are named, of a matrix its two."""
    found = [("a.weight", (*experts, 2, 3)), ("b.weight", (*experts, 5, 7))]
    relation = _axes_relation(found, published, Path("m.gguf"))
    other = {"[out, in]": "[in, out]", "[in, out]": "[out, in]"}[published]
    wrong, right = (
        each.replace("[", "[experts, ") if experts else each for each in (other, published)
    )
    assert relation.says == (f"2 weights are stored as {wrong}, readers expect {right}: transposed")
    assert relation.where == ("a.weight", "b.weight")
    assert relation.examples[0] == (f"a.weight {[*experts, 2, 3]}", f"{[*experts, 3, 2]}")
    assert relation.remedy.split() == ["aprfmt", "convert", "m.gguf", "OUT"]
