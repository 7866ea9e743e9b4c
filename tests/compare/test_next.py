"""The command that is said after `diff` mends B and keeps what B is: its encodings, its training.

For each form of B one tensor is exchanged for another's bytes; the command is run, and what it
writes has to be the sound copy, byte for byte and encoding for encoding. Seen red: `convert`
without B's encoding, a trained B remade from A, and in `diagnose` one with a head of its own.
"""

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.causes import CAUSES
from aprfmt.causes.remedies import is_repaired_by_rewriting
from aprfmt.compare import DiffReport
from aprfmt.diagnosis import next_commands
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof, unfitted_proof
from tests.cli.run import aprfmt as command
from tests.conversion.dialect_folders import write_folder

SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama of random weights, its head tied."""
    folder = tmp_path_factory.mktemp("next") / "base"
    folder.mkdir()
    rng = np.random.default_rng(0)

    def drawn() -> np.ndarray:
        return rng.normal(0, 0.05, (256, 256)).astype(np.float32)

    held = {"model.embed_tokens.weight": drawn(), "model.norm.weight": np.ones(256, np.float32)}
    for layer in range(2):
        stem = f"model.layers.{layer}"
        held |= {f"{stem}.{name}.weight": drawn() for name in NAMES}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            held[f"{stem}.{norm}.weight"] = rng.uniform(0.5, 1.5, 256).astype(np.float32)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5,
              "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | SIZES))
    return folder


FORMS: Mapping[str, tuple[str, ...]] = {
    "as A is": ("convert", "b.gguf"),
    "F16": ("convert", "b.gguf", "--encoding", "F16"),
    "Q8_0": ("convert", "b.gguf", "--encoding", "Q8_0"),
    "Q4_K_M": ("quantize", "b.gguf", "--type", "Q4_K_M"),
    "MXFP4 but one": (
        "convert",
        "b.gguf",
        "--encoding",
        "MXFP4",
        "--tensor",
        "token_embd.weight=BF16",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_command_writes_the_sound_copy(
    form: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, name, *options = FORMS[form]
    assert command(verb, base, name, *options).code == 0
    broken = tmp_path / f"broken{Path(name).suffix}"
    data = bytearray(Path(name).read_bytes())
    with aprfmt.open(name) as model:
        mine, other = (model.roles[f"L0.{role}.weight"] for role in ("ffn_gate", "ffn_up"))
        assert mine.encoding == other.encoding
        data[mine.offset : mine.offset + mine.nbytes] = bytes(other.raw())
    broken.write_bytes(data)
    done = command("diff", base, broken, "--json")
    (said,) = done.json["next"]
    words = shlex.split(said)
    assert done.code == 1 and words[0] == "aprfmt"
    assert command(*words[1:]).code == 0, said
    mended = tmp_path / f"broken-fixed{Path(name).suffix}"
    with aprfmt.open(name) as right, aprfmt.open(mended) as found:
        assert {key: view.encoding for key, view in right.roles.items()} == {
            key: view.encoding for key, view in found.roles.items()
        }
        assert all(bytes(right[name].raw()) == bytes(found[name].raw()) for name in right)


def changed(base: Path, folder: Path, change: Mapping[str, np.ndarray]) -> Path:
    shutil.copytree(base, folder)
    held = load_file(base / "model.safetensors")
    save_file({**held, **change}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("form", ["GGUF", "input scales"])
def test_a_folder_is_written_again_from_another_form(
    form: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: `convert a.gguf b-fixed` without `--to`, and scales that no `--drop` left out."""
    monkeypatch.chdir(tmp_path)
    a, right = tmp_path / "a.gguf", base
    if form == "GGUF":
        assert command("convert", base, a).code == 0
    else:
        a, right = tmp_path / "a", tmp_path / "right"
        write_folder(a, "modelopt")
        wishes = ("--encoding", "F32", "--drop", "*input_scale")
        assert command("convert", a, right, "--to", "safetensors", *wishes).code == 0
    stem = "model.layers.0.mlp"
    other = load_file(right / "model.safetensors")[f"{stem}.up_proj.weight"]
    broken = changed(right, tmp_path / "broken", {f"{stem}.gate_proj.weight": other})
    for question in ("diff", "diagnose"):
        (said,) = command(question, a, broken, "--json").json["next"]
        assert said.startswith(f"aprfmt convert {a} broken-fixed"), said
        assert command(*shlex.split(said)[1:], "--force").code == 0, said
        assert command("diff", tmp_path / "broken-fixed", right, "--only", "tensors").code == 0


def test_a_head_that_the_configuration_denies_is_kept(base: Path, tmp_path: Path) -> None:
    """The key is set; and where it is set, no command writes A's head over B's."""
    held = load_file(base / "model.safetensors")
    noise = np.random.default_rng(3).normal(0, 0.02, (256, 256)).astype(np.float32)
    head = held["model.embed_tokens.weight"] + noise  # trained apart: it resembles the table still
    own = changed(base, tmp_path / "own", {"lm_head.weight": head})
    for question in ("diff", "diagnose"):
        (said, *_) = command(question, base, own, "--json").json["next"]
        assert said.startswith(f"aprfmt set {own} tie_word_embeddings=false -o "), said
    fixed = tmp_path / "fixed"
    assert command("set", own, "tie_word_embeddings=false", "-o", fixed).code == 0
    assert np.array_equal(load_file(fixed / "model.safetensors")["lm_head.weight"], head)
    for question in ("diff", "diagnose"):
        for said in command(question, base, fixed, "--json").json["next"]:
            assert not said.startswith(("aprfmt convert", "aprfmt quantize")), said


def test_what_b_was_taught_is_not_written_over(base: Path, tmp_path: Path) -> None:
    """B was trained, and one matrix of it is another's: A has neither."""
    rng = np.random.default_rng(5)
    held = load_file(base / "model.safetensors")
    taught = {
        name: (value + rng.normal(0, 0.01, value.shape)).astype(np.float32)
        for name, value in held.items()
        if value.ndim == 2
    }
    stem = "model.layers.0.mlp"
    taught[f"{stem}.gate_proj.weight"] = held[f"{stem}.up_proj.weight"]
    copy = changed(base, tmp_path / "taught", taught)
    for question in ("diff", "diagnose"):
        for said in command(question, base, copy, "--json").json["next"]:
            assert not said.startswith(("aprfmt convert", "aprfmt quantize")), said


def swapped(*parts: tuple[str, str]) -> Mapping[str, str]:
    """Return {part of a name: the one that stands there}, both ways."""
    return {**dict(parts), **{new: old for old, new in parts}}


# What is exchanged, and how many renames put it right; 0: B is written again from A.
EXCHANGES: Mapping[str, tuple[Mapping[str, str], int]] = {
    "gate and up": (swapped(("gate_proj", "up_proj")), 3),
    "one layer's keys and values": (
        swapped(("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj")),
        3,
    ),
    "layers": (swapped(("layers.0.", "layers.1.")), 3),
    "three in turn": ({"q_proj": "k_proj", "k_proj": "v_proj", "v_proj": "q_proj"}, 4),
    "beside another fault": (swapped(("gate_proj", "up_proj")), 0),
    "a copy": ({"layers.1.mlp.gate_proj": "layers.1.mlp.up_proj"}, 0),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "folder") for name in EXCHANGES), ("layers", "GGUF"), ("three in turn", "GGUF")],
)
def test_exchanged_names_are_put_right_without_a(
    name: str, form: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: B was to be written again from A, though it holds all of A's tensors."""
    monkeypatch.chdir(tmp_path)
    parts, count = EXCHANGES[name]
    count = 0 if "turn" in name and form == "GGUF" else count  # its q and k have rows of pairs
    held = load_file(base / "model.safetensors")
    taken = {
        key: held[key.replace(old, new)] for key in held for old, new in parts.items() if old in key
    }
    if name == "beside another fault":
        taken["model.norm.weight"] = held["model.norm.weight"] * 2
    b: Path = changed(base, tmp_path / "b", taken)
    if form == "GGUF":
        aprfmt.convert(b, tmp_path / "b.gguf")
        b = tmp_path / "b.gguf"
    report = aprfmt.diff(base, b)
    commands = set(report.next)
    assert len(commands) == 1
    words = shlex.split(commands.pop())
    assert (words.count("--rename"), words[2]) == (count, str(b if count else base))
    assert command(*words[1:]).code == 0
    assert aprfmt.diff(base, words[3]).equal


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("num_attention_heads", 8, "gqa_mapping"),
        ("num_key_value_heads", 8, "gqa_mapping"),
        ("vocab_size", 100, "config_sizes"),
        ("rms_norm_eps", 1e-6, ""),
        ("rope_theta", 20000.0, ""),
    ],
)
def test_a_key_that_the_tensors_contradict_is_a_cause(
    key: str, value: float, cause: str, base: Path, tmp_path: Path
) -> None:
    """Seen red: the values of the hyperparameters alone. Any epsilon fits the tensors."""
    b = changed(base, tmp_path / "b", {})
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps(config | {key: value}))
    done = command("diff", base, b, "--json").json
    assert done["exit"] == 1
    assert [(one["cause"], one["level"]) for one in done["causes"]] == (
        [(cause, "confirmed")] if cause else []
    )
    if cause:
        (said,) = done["next"]
        words = shlex.split(said)[1:-2]
        assert command(*words, "--in-place").code == 0, said
        assert aprfmt.diff(base, b).equal


MENDED = sorted(name for name, row in CAUSES.items() if row.verdict == "bug")


@pytest.mark.parametrize("shown", [None, unfitted_proof()])
def test_a_model_is_written_again_only_for_what_was_reproduced(
    shown: Proof | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only located may be A's fault. Of damaged bytes A alone has what was there."""
    said = "aprfmt convert a b"
    monkeypatch.setattr(DiffReport, "rewriting_command", said)
    monkeypatch.setattr(next_commands, "rewrite_b_command", lambda parts, one: said)
    side = SimpleNamespace(model=None, kind="model", path="a")
    parts: Any = SimpleNamespace(a=side, b=side)
    for name in MENDED:
        found = Finding(name, "", "tensor", "bug", ("w",), shown is not None, proof=shown)
        (row,) = DiffReport("a", "b", (), (), (), (), findings=(found,)).causes
        again = shown is not None or CAUSES[name].weights == "lost"
        assert (row.remedy is not None) == again, name
        assert (next_commands.repair_command(parts, found) == said) == again, name


def test_numbers_that_are_none_are_written_again_where_the_rest_is_equal() -> None:
    for both, whole in ((3, True), (2, False)):
        values = {"nonfinite": {"w": {"a": 3, "both": both}}}
        assert is_repaired_by_rewriting("nonfinite", False, values) is whole
    assert not is_repaired_by_rewriting("nonfinite", False, {"nonfinite": {}})
