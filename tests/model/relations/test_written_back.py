"""Each relation is one cause in `diff` and `diagnose`, and the command both print mends B.

Seen red: a key of the configuration that `diff` called tensor_names, a kind without a case, a
relation whose command was left out.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.model import open_model
from aprfmt.model.relations import RelationKind, list_relations
from tests.arch.towers import made
from tests.cli.run import aprfmt as command
from tests.diagnosis.test_remedies import written
from tests.model.relations.edits import edited, substituted, with_names
from tests.models import save_tiny

Pair = tuple[Path, Path]


def _prefixed(demo: Path, folder: Path) -> Pair:
    return demo, with_names(demo, folder / "b", lambda name: f"_orig_mod.{name}")


def _renamed(demo: Path, folder: Path) -> Pair:
    return demo, with_names(demo, folder / "b", substituted(r"\.mlp\.", ".feed_forward."))


def _shifted(demo: Path, folder: Path) -> Pair:
    """Return a copy whose layers are counted from 1."""

    def name(key: str) -> str:
        parts = key.split(".")
        return ".".join(str(int(part) + 1) if part.isdigit() else part for part in parts)

    return demo, with_names(demo, folder / "b", name)


def _without_architecture(demo: Path, folder: Path) -> Pair:
    rows = {
        f"enc.{i}.weight": np.random.default_rng(i).normal(size=(32, 32)).astype(np.float32)
        for i in range(6)
    }
    save_file(rows, folder / "a.safetensors")
    save_file({f"wrap.{name}": row for name, row in rows.items()}, folder / "b.safetensors")
    return folder / "a.safetensors", folder / "b.safetensors"


def _container(demo: Path, folder: Path) -> Pair:
    right, wrong = folder / "a.gguf", folder / "b.gguf"
    assert command("convert", demo, right, "--quiet").code == 0
    with open_model(demo) as model, open_model(right) as other:
        names = {key: view.names[0] for key, view in model.roles.items()}
        pairs = [f"{view.names[0]}={names[key]}" for key, view in other.roles.items()]
    rules = [word for pair in pairs for word in ("--rename", pair)]
    assert command("convert", right, wrong, "--arch", "none", *rules, "--quiet").code == 0
    return right, wrong


def _extension(demo: Path, folder: Path) -> Pair:
    a, b = folder / "a.safetensors", folder / "b.gguf"
    for path in (a, b):
        shutil.copy(demo / "model.safetensors", path)
    return a, b


def _index(demo: Path, folder: Path) -> Pair:
    assert command("split", demo, folder / "a", "--max-shard-size", "2M", "--quiet").code == 0
    shutil.copytree(folder / "a", folder / "b")
    index = folder / "b" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"] = dict.fromkeys(said["weight_map"], "model-00001-of-00030.safetensors")
    index.write_text(json.dumps(said))
    return folder / "a", folder / "b"


def _axes(demo: Path, folder: Path) -> Pair:
    save_tiny("llama", folder / "a")
    turned = (".up_proj.weight", ".gate_proj.weight", ".down_proj.weight")
    edit = lambda held: {  # noqa: E731
        name: tensor.T if name.endswith(turned) else tensor for name, tensor in held.items()
    }
    return folder / "a", edited(folder / "a", folder / "b", edit)


def _kernel(demo: Path, folder: Path) -> Pair:
    made("gemma3_vision", folder / "a")
    edit = lambda held: {  # noqa: E731
        name: tensor.flatten(1) if tensor.ndim > 2 else tensor for name, tensor in held.items()
    }
    return folder / "a", edited(folder / "a", folder / "b", edit)


def _key_of(key: str, value: object) -> Callable[[Path, Path], Pair]:
    def make(demo: Path, folder: Path) -> Pair:
        shutil.copytree(demo, folder / "b")
        config = json.loads((demo / "config.json").read_text())
        (folder / "b" / "config.json").write_text(json.dumps({**config, key: value}))
        return demo, folder / "b"

    return make


def _gguf_key(demo: Path, folder: Path) -> Pair:
    a, b = folder / "a.gguf", folder / "b.gguf"
    assert command("convert", demo, a, "--no-carry", "--quiet").code == 0
    assert command("set", a, "qwen2.attention.head_count=3", "-o", b, "--quiet").code == 0
    return a, b


def _packed(demo: Path, folder: Path, kind: str, *more: str) -> dict[str, object]:
    """Write `a`, quantized, and `b`, its copy; return its config.json."""
    made = command("quantize", demo, folder / "a", "--type", kind, *more, "--quiet")
    assert made.code == 0, made.err
    shutil.copytree(folder / "a", folder / "b")
    config: dict[str, object] = json.loads((folder / "a" / "config.json").read_text())
    return config


def _modules(demo: Path, folder: Path) -> Pair:
    config = _packed(demo, folder, "MLX-4bit-g64")
    stored = load_file(folder / "a" / "model.safetensors")
    names = [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]
    key = "quantization" if "quantization" in config else "quantization_config"
    said = config[key]
    assert isinstance(said, dict)
    own = {"bits": said["bits"], "group_size": said["group_size"]}
    for side, head in (("a", "model."), ("b", "net.model.")):
        rows = {name.replace("model.", head, 1): own for name in names}
        section = {**said, "bits": 8, **rows}
        keys = {k: section for k in ("quantization", "quantization_config") if k in config}
        (folder / side / "config.json").write_text(json.dumps({**config, **keys}))
    return folder / "a", folder / "b"


def _claims(demo: Path, folder: Path) -> Pair:
    config = _packed(demo, folder, "AWQ-g32", "--tensor", "re:o_proj.weight=BF16")
    section = config["quantization_config"]
    assert isinstance(section, dict)
    section["modules_to_not_convert"] = ["lm_head", "model.layers.0.attention.wo"]
    (folder / "b" / "config.json").write_text(json.dumps(config))
    return folder / "a", folder / "b"


# What is made: the kind of relation that maps B, and the cause that it is.
CASES: dict[str, tuple[Callable[[Path, Path], Pair], RelationKind, str]] = {
    "a prefix": (_prefixed, "names", "tensor_names"),
    "a component": (_renamed, "names", "tensor_names"),
    "a shifted count": (_shifted, "names", "tensor_names"),
    "a prefix, no architecture": (_without_architecture, "names", "tensor_names"),
    "the other container's names": (_container, "container", "tensor_names"),
    "an extension": (_extension, "extension", ""),
    "a stale index": (_index, "index", "tensor_names"),
    "exchanged axes": (_axes, "axes", "transpose"),
    "a flat kernel": (_kernel, "kernels", "stored_shape"),
    "no heads": (_key_of("num_attention_heads", 0), "keys", "gqa_mapping"),
    "a width": (_key_of("intermediate_size", 7), "keys", "config_sizes"),
    "a layer too few": (_key_of("num_hidden_layers", 3), "keys", "config_sizes"),
    "a GGUF's heads": (_gguf_key, "keys", "gqa_mapping"),
    "modules under a prefix": (_modules, "modules", "packing_claim"),
    "a list of modules": (_claims, "claims", "packing_claim"),
}


def test_every_kind_has_a_case() -> None:
    assert {kind for _, kind, _ in CASES.values()} == {*get_args(RelationKind)}


@pytest.mark.parametrize("label", CASES)
def test_the_command_that_is_printed_writes_it_back(
    label: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kind, cause = CASES[label]
    a, b = make(demo_model, tmp_path)
    with open_model(b, damaged=True) as model:
        own = [one for one in list_relations(model) if one.kind == kind]
    said = {name: command(name, a, b, "--json") for name in ("diff", "diagnose")}
    if kind == "extension":  # no difference of two models: it is said, and `validate` fails
        remedy = own[0].remedy
        assert remedy in said["diff"].err and said["diff"].code == 0
        assert command("validate", b).code == 1
    else:
        remedies = set()
        for done in said.values():
            assert done.code == 1
            assert [one["cause"] for one in done.json["causes"]] == [cause], done.json["causes"]
            (one,) = done.json["causes"]
            assert done.json["next"] == [one["remedy"]["command"]]
            remedies.add(one["remedy"]["command"])
        (remedy,) = remedies
    made = written(remedy, b, tmp_path / "run", monkeypatch)
    if kind == "extension":
        made = b.with_suffix(".safetensors")
    assert command("diff", a, made).code == 0, remedy
    done = command("diagnose", a, made, "--json").json
    assert not done["causes"] and (done["verdict"] in ("same", "precision") or done["reason"])
    with open_model(made) as model:
        assert not list_relations(model)
