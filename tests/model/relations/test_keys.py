"""Keys of a configuration that say other sizes than the tensors have, and readings that go on.

Seen red: a wrong size that ended every reading, a file without its last layers called a wrong key,
the tensors of an architecture that is not read compared with nothing.
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import aprfmt
from aprfmt.arch import ARCHS
from aprfmt.causes.hyperparameters import relation_cause
from aprfmt.checks import validate
from aprfmt.model import open_model
from tests.cli.run import aprfmt as command
from tests.model.relations.edits import edited, same
from tests.models import save_tiny

Keys = dict[str, Any]
GONE = object()


def with_keys(source: Path, target: Path, keys: Keys) -> Path:
    """Return a copy of a folder whose config.json has other values, GONE: no such key."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if value is not GONE}
    (target / "config.json").write_text(json.dumps(config))
    return target


WRONG: dict[str, tuple[str, Any]] = {
    "zero width": ("hidden_size", 0),
    "twice the width": ("hidden_size", 512),
    "text for a width": ("hidden_size", "x"),
    "no heads": ("num_attention_heads", 0),
    "heads lost": ("num_attention_heads", GONE),
    "another MLP": ("intermediate_size", 1024),
    "a layer too few": ("num_hidden_layers", 3),
}


@pytest.mark.parametrize("label", WRONG)
def test_a_wrong_size_is_solved_from_the_tensors(
    label: str, demo_model: Path, tmp_path: Path
) -> None:
    key, value = WRONG[label]
    right = json.loads((demo_model / "config.json").read_text())[key]
    bad = with_keys(demo_model, tmp_path / "bad", {key: value})
    with open_model(bad) as model:
        (relation,) = model.relations
        assert (relation.kind, relation.values) == ("keys", ((key, right),))
        assert f"{key}={right}" in shlex.split(relation.remedy)
        assert not model.resolution.missing and not model.resolution.coverage.misshapen
    report = aprfmt.diff(demo_model, bad)
    assert report.exit_code() == 1 and not report.differs
    found = command("diagnose", demo_model, bad, "--json").json
    assert len(found["causes"]) == 1 and found["causes"][0]["where"] == [key]
    failed = [r["name"] for r in command("validate", bad, "--json").json["checks"]
              if r["outcome"] == "FAIL"]  # fmt: skip
    assert failed == ["architecture"]
    shutil.rmtree(bad)
    same(demo_model, with_keys(demo_model, bad, dict(relation.values)))


GGUF = {
    "embedding_length": (0, 256), "attention.head_count": (3, 4), "block_count": (0, 4),
    "feed_forward_length": (7, 512),
}  # fmt: skip


@pytest.mark.parametrize("key", GGUF)
def test_a_gguf_is_mended_by_the_command_that_is_printed(
    key: str, demo_model: Path, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    assert command("convert", demo_model, good, "--no-carry", "--quiet").code == 0
    wrong, right = GGUF[key]
    assert command("set", good, f"qwen2.{key}={wrong}", "-o", bad, "--quiet").code == 0
    with open_model(bad) as model:
        (relation,) = model.relations
        assert relation.values == ((f"qwen2.{key}", right),)
    assert len(command("diagnose", good, bad, "--json").json["causes"]) == 1
    assert command(*shlex.split(relation.remedy)[1:]).code == 0
    same(good, bad)


def test_two_answers_are_none_until_the_other_side_decides(
    demo_model: Path, tmp_path: Path
) -> None:
    bad = with_keys(demo_model, tmp_path / "bad", {"num_attention_heads": 8})
    with open_model(bad) as model:
        assert model.relations == () and len(model.resolution.coverage.misshapen) > 1
    (found,) = command("diagnose", demo_model, bad, "--json").json["findings"]
    assert (found["cause"], found["confidence"]) == ("gqa_mapping", "confirmed")
    assert "num_attention_heads" in found["where"]


def test_a_key_that_both_sides_state_alike_is_not_accused(demo_model: Path, tmp_path: Path) -> None:
    """Seen red: "head_dim is 64, the tensors say 128" was confirmed where n_heads is wrong."""
    config = json.loads((demo_model / "config.json").read_text())
    heads = {key: config[key] for key in ("num_attention_heads", "num_key_value_heads")}
    size = config["hidden_size"] // heads["num_attention_heads"]
    good = with_keys(demo_model, tmp_path / "good", {"head_dim": size})
    bad = with_keys(good, tmp_path / "bad", {key: n // 2 for key, n in heads.items()})
    for pair in ((good, bad), (bad, good)):
        done = command("diff", *pair, "--json")
        assert done.code == 1 and [row["cause"] for row in done.json["causes"]] == []
    (cause,) = command("diagnose", good, bad, "--json").json["causes"]
    words = shlex.split(cause["remedy"]["command"])
    words[words.index("-o") + 1] = str(tmp_path / "mended")
    assert command(*words[1:]).code == 0
    assert command("diagnose", good, tmp_path / "mended").code == 0


@pytest.mark.parametrize("value", [64, GONE])
def test_a_size_that_the_tensors_show_is_not_of_the_config(
    value: Any, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: `inspect` gave "config" as the origin of a key that is not there."""
    bad = with_keys(demo_model, tmp_path / "bad", {"intermediate_size": value})
    for folder, origin in ((bad, "shape"), (demo_model, "config")):
        rows = command("inspect", folder, "--json").json["hyperparameters"]
        assert (rows["ffn_size"]["origin"], rows["hidden_size"]["origin"]) == (origin, "config")


@pytest.mark.parametrize(
    ("key", "cause"),
    [
        ("head_dim", "config_sizes"), ("num_attention_heads", "gqa_mapping"),
        ("num_key_value_heads", "gqa_mapping"), ("num_hidden_layers", "config_sizes"),
        ("rope_theta", "rope_theta"),
    ],
)  # fmt: skip
def test_the_cause_of_a_key_is_what_it_changes(key: str, cause: str) -> None:
    """Seen red: a lost width of the heads was a wrong mapping of heads."""
    relation: Any = SimpleNamespace(kind="keys", where=(key,))
    model: Any = SimpleNamespace(spec=ARCHS["mistral"])
    assert relation_cause(relation, model) == cause


def test_missing_layers_are_no_wrong_key(demo_model: Path, tmp_path: Path) -> None:
    bad = edited(
        demo_model, tmp_path / "bad",
        lambda held: {n: t for n, t in held.items() if ".layers.3." not in n},
    )  # fmt: skip
    with open_model(bad, allow_missing=("*",)) as model:
        assert model.relations == ()
    done = command("validate", bad)
    lines = [line for line in done.out.splitlines() if ": missing" in line]
    assert len(lines) == 1 and re.search(r"and \d+ more: missing", lines[0])
    rows = [row for row in command("validate", bad, "--json").json["checks"]
            if row["name"] == "completeness"]  # fmt: skip
    assert rows[0]["outcome"] == "FAIL"


@pytest.mark.parametrize("arch", ["llama", "mixtral", "gpt2", "deepseek_v2", "qwen3_next", "bloom"])
def test_healthy_models_have_no_relation(arch: str, tmp_path: Path) -> None:
    save_tiny(arch, tmp_path / "m")
    gguf = tmp_path / "m.gguf"
    written = command("convert", tmp_path / "m", gguf, "--quiet").code == 0
    for path in (tmp_path / "m", *([gguf] if written else [])):
        with open_model(path, damaged=True) as model:
            assert model.relations == ()


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": 0, "num_attention_heads": "x", "num_hidden_layers": "x"},
        {"model_type": "none", "architectures": []},
    ],
)
def test_what_needs_no_architecture_goes_on(keys: Keys, demo_model: Path, tmp_path: Path) -> None:
    bad = with_keys(demo_model, tmp_path / "bad", keys)
    told = command("inspect", bad)
    if "model_type" not in keys:
        assert "qwen2 is not read" in told.out and "not known" not in told.out
    done = command("diagnose", demo_model, bad, "--json")
    unequal = {row["name"] for row in done.json["not_compared"] if row["state"] == "unequal"}
    assert done.code == 1 and {*done.json["where"], *unequal} & {*keys}  # unread on one side
    assert any("--arch" in line for line in done.json["not_checked"])
    name = "model.norm.weight"
    other = edited(bad, tmp_path / "other", lambda held: held | {name: held[name] * 2})
    done = command("diagnose", demo_model, other, "--json")
    assert done.code == 1 and name in done.json["where"]


@pytest.mark.parametrize("equal", [True, False])
def test_a_key_that_ties_a_head_of_its_own_fails_with_the_set(
    equal: bool, demo_model: Path, tmp_path: Path
) -> None:
    """A stored copy of the embedding is only a contradiction, which is a warning."""
    bad = tmp_path / "bad"
    shutil.copytree(demo_model, bad)
    held = load_file(bad / "model.safetensors")
    table = held["model.embed_tokens.weight"]
    held["lm_head.weight"] = table.clone() if equal else table * 1.5
    save_file(held, bad / "model.safetensors", {"format": "pt"})
    (bad / "config.json").write_text(
        json.dumps(json.loads((bad / "config.json").read_text()) | {"tie_word_embeddings": True})
    )
    report = validate(bad)
    failed = [one for one in report.answers if one.outcome == "FAIL"]
    assert [one.name for one in failed] == ([] if equal else ["hyperparameters"])
    if equal:
        return
    todo = next(one.todo for one in failed[0].findings if one.level == "fail")
    assert command(*shlex.split(todo)[1:]).code == 0
    assert json.loads((bad / "config.json").read_text())["tie_word_embeddings"] is False
    assert validate(bad).outcome == "PASS"


@pytest.mark.parametrize("label", ["twice the width", "another MLP", "a layer too few"])
def test_inspect_warns_of_each_relation(label: str, demo_model: Path, tmp_path: Path) -> None:
    """The note has the text that the library gives, of this file, once."""
    key, value = WRONG[label]
    bad = with_keys(demo_model, tmp_path / "bad", {key: value})
    with open_model(bad) as model:
        relations, where = [each.text for each in model.relations], str(model.path)
    assert relations
    body = command("inspect", bad, "--json").json
    assert [row["says"] in text for row, text in zip(body["relations"], relations, strict=True)]
    notes = [note for note in body["notes"] if note["key"] == "relation"]
    assert [(note["level"], note["where"], note["text"]) for note in notes] == [
        ("warning", where, text) for text in relations
    ]
    err = command("inspect", bad).err
    assert all(err.count(text) == 1 for text in relations)
