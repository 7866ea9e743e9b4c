"""Commands on the demo model without its biases: refused by name, or accepted and recorded."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from aprfmt.conversion import convert
from aprfmt.model import open_model
from aprfmt.model.completeness import RECORD
from tests.cli.run import aprfmt

IDS = "1417,362,258"
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
ALLOW = tuple(word for role in BIASES for word in ("--allow-missing", role))
FORMATS = ("safetensors", "gguf", "apr")

# Everything that runs, converts or judges; {model} and {out} are filled.
COMMANDS = {
    "run": "run {model} --ids 1417,362 --max-tokens 2",
    "logits": "logits {model} --ids 1417,362",
    "trace": "trace {model} --payload --ids 1417,362 --layers 0",
    "trace plan": "trace {model}",
    "trace transformers": "trace {model} --payload --engine transformers --ids 1417,362",
    "eval": "eval {model} --ids 1417,362,258",
    "parity": "parity {model} --between numpy numpy::float64 --ids 1417,362",
    "convert": "convert {model} {out}.apr",
    "convert alike": "convert {model} {out}{suffix} --encoding F32",
    "quantize": "quantize {model} {out}.gguf --type Q8_0",
    "import": "import {model} -o {out}.apr",
    "export": "export {model} --to gguf -o {out}.gguf",
}


def stripped(source: Path, target: Path, gone: Callable[[str], bool]) -> Path:
    """Copy a folder without some of its tensors."""
    import ml_dtypes  # noqa: F401  (numpy's bfloat16)

    shutil.copytree(source, target)
    weights = target / "model.safetensors"
    with safe_open(weights, "np") as file:
        about = file.metadata()
    tensors = {name: value for name, value in load_file(weights).items() if not gone(name)}
    weights.unlink()
    save_file(tensors, weights, about)
    return target


@pytest.fixture(scope="module")
def lacking(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The demo model without any bias, in every container, none of which accepts it."""
    root = tmp_path_factory.mktemp("lacking")
    found = {"safetensors": stripped(demo_model, root / "model", lambda n: n.endswith(".bias"))}
    for name in ("gguf", "apr"):
        found[name] = root / f"model.{name}"
        accepted = root / f"accepted.{name}"
        convert(found["safetensors"], accepted, allow_missing=BIASES)
        convert(accepted, found[name], complete=False, metadata={RECORD: "[]"})
    return found


def line(command: str, model: Path, out: Path) -> list[str]:
    return [word.format(model=model, out=out, suffix=model.suffix) for word in command.split()]


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_without_its_biases_is_refused(
    command: str, format_name: str, lacking: Mapping[str, Path], tmp_path: Path
) -> None:
    done = aprfmt(*line(COMMANDS[command], lacking[format_name], tmp_path / "out"))
    assert done.code == 2
    assert "12 of 50 tensors are missing that qwen2 needs: L0.attn_q.bias" in done.err
    assert "--allow-missing attn_q.bias --allow-missing attn_k.bias" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format_name", FORMATS)
def test_validate_and_qa_fail_and_inspect_warns(
    format_name: str, lacking: Mapping[str, Path]
) -> None:
    model = lacking[format_name]
    done = aprfmt("validate", model, "--json")
    failed = [check["name"] for check in done.json["checks"] if check["outcome"] == "FAIL"]
    assert (done.code, failed) == (1, ["completeness"])
    done = aprfmt("qa", model, "--only", "tensor-contract", "--json")
    details = next(g for g in done.json["gates"] if g["name"] == "tensor-contract")["details"]
    assert (done.code, details["found"], details["expected"]) == (1, 38, 50)
    done = aprfmt("inspect", model)
    assert done.code == 0
    assert "12 of 50 tensors the configuration demands are missing" in done.err
    roles = aprfmt("inspect", model, "--json").json["roles"]
    assert (roles["found"], roles["required"], len(roles["missing"])) == (38, 50, 12)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "trace transformers"])
def test_what_is_allowed_goes_with_one_warning(
    command: str, lacking: Mapping[str, Path], tmp_path: Path
) -> None:
    model, out = lacking["safetensors"], tmp_path / "out"
    done = aprfmt(*line(COMMANDS[command].replace("{suffix}", ".safetensors"), model, out), *ALLOW)
    assert done.code < 2, done.err  # the loss of three tokens may be beyond its bound
    if command != "trace plan":
        assert done.err.count("12 of 50 required tensors are missing and accepted") == 1


@pytest.mark.parametrize("format_name", FORMATS)
def test_what_is_written_records_it(
    format_name: str, lacking: Mapping[str, Path], tmp_path: Path
) -> None:
    first, second = tmp_path / f"a.{format_name}", tmp_path / "b.gguf"
    done = aprfmt("convert", lacking["safetensors"], first, *ALLOW, "--json")
    assert done.json["allowed_missing"] == list(BIASES)
    with open_model(first) as model:
        assert json.loads(str(model.metadata[RECORD])) == list(BIASES)
    done = aprfmt("quantize", first, second, "--type", "Q8_0", "--json")  # and keeps accepting it
    assert done.json["allowed_missing"] == list(BIASES)
    for target in (first, second):
        report = aprfmt("validate", target, "--json").json
        warned = [f for f in report["findings"] if f["check"] == "completeness"]
        assert report["outcome"] == "PASS" and len(warned) == 12
        assert {f["level"] for f in warned} == {"warning"}
        assert aprfmt("validate", target, "--strict").code == 1
        done = aprfmt("logits", target, "--ids", IDS, "--json")
        assert done.code == 0 and "aprfmt.allowed_missing" in done.err
        assert len(done.json["run"]["allowed_missing"]) == 12
        assert len(aprfmt("inspect", target, "--json").json["roles"]["accepted"]) == 12


def test_a_record_goes_when_nothing_is_missing(demo_model: Path, tmp_path: Path) -> None:
    claimed, again = tmp_path / "claimed.gguf", tmp_path / "again.gguf"
    convert(demo_model, claimed, metadata={RECORD: '["attn_q.bias"]'}, complete=False)
    with open_model(claimed) as model:
        assert RECORD in model.metadata
    assert aprfmt("convert", claimed, again, "--json").json["allowed_missing"] == []
    with open_model(again) as model:
        assert RECORD not in model.metadata


def test_one_layer_in_any_spelling(demo_model: Path, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.bias"
    model = stripped(demo_model, tmp_path / "one", lambda found: found == name)
    refused = aprfmt("logits", model, "--ids", IDS)
    assert refused.code == 2 and "1 of 50 tensors are missing that qwen2 needs" in refused.err
    assert "--allow-missing L2.attn_k.bias" in refused.err
    for spelling in ("L2.attn_k.bias", "blk.2.attn_k.bias", name, "attn_k.bias", "attn_k", "*"):
        assert aprfmt("logits", model, "--ids", IDS, "--allow-missing", spelling).code == 0
    for spelling in ("L1.attn_k.bias", "attn_q.bias", "blk.1"):
        done = aprfmt("logits", model, "--ids", IDS, "--allow-missing", spelling)
        assert done.code == 2 and "L2.attn_k.bias" in done.err
    target = tmp_path / "one.apr"
    done = aprfmt("import", model, "-o", target, "--allow-missing", "attn_k.bias", "--json")
    assert done.json["allowed_missing"] == ["L2.attn_k.bias"]


@pytest.mark.parametrize("command", ["logits {model} --ids 1,2", "validate {model}"])
def test_a_misspelt_role_is_said(command: str, demo_model: Path, tmp_path: Path) -> None:
    words = line(command, demo_model, tmp_path)
    done = aprfmt(*words, "--allow-missing", "attn_w.bias")
    assert done.code == 2
    assert "'attn_w.bias' names no tensor of qwen2; near names: " in done.err


def test_what_no_pass_can_do_without_stays_refused(demo_model: Path, tmp_path: Path) -> None:
    model = stripped(demo_model, tmp_path / "m", lambda name: name.endswith("q_proj.weight"))
    target = tmp_path / "m.gguf"
    allow = ("--allow-missing", "attn_q.weight")
    assert aprfmt("convert", model, target, *allow).code == 0
    assert aprfmt("validate", target).code == 0
    for given in (target, model):
        done = aprfmt("run", given, "--ids", IDS, *allow)
        assert done.code == 2
        assert "4 tensors are missing that no forward pass of qwen2 can do without" in done.err
    alone = aprfmt("run", model, "--ids", IDS)
    assert alone.code == 2 and "--allow-missing attn_q" not in alone.err


def test_an_architecture_that_the_user_named_may_be_wrong(demo_model: Path, tmp_path: Path) -> None:
    """Seen red: "get the file again", of a whole file."""
    model = stripped(demo_model, tmp_path / "m", lambda name: name.endswith("q_proj.weight"))
    for allow in ((), ("--allow-missing", "attn_q.weight")):
        for named in (True, False):
            arch = ("--arch", "qwen2") * named
            done = aprfmt("run", model, "--ids", IDS, *allow, *arch)
            assert done.code == 2 and "4 " in done.err
            assert ("--arch qwen2 does not fit this file if it is whole" in done.err) == named
            assert ("get the file again" in done.err) != named


def test_a_lost_head_is_no_tied_one(demo_model: Path, tmp_path: Path) -> None:
    """The demo is tied; a config.json that says it is not requires a head."""
    model = shutil.copytree(demo_model, tmp_path / "untied")
    config = json.loads((model / "config.json").read_text())
    for claim in ({"tie_word_embeddings": False}, {}):
        del config["tie_word_embeddings"]
        config |= claim
        (model / "config.json").write_text(json.dumps(config))
        done = aprfmt("logits", model, "--ids", IDS)
        assert done.code == 2 and "needs: output.weight" in done.err
        config.setdefault("tie_word_embeddings", False)
    assert aprfmt("logits", model, "--ids", IDS, "--allow-missing", "output.weight").code == 0


def test_dropped_tensors_are_recorded_too(demo_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "dropped.gguf"
    done = aprfmt("convert", demo_model, target, "--drop", "*.attn_v.bias", "--json")
    assert done.json["allowed_missing"] == ["attn_v.bias"]
    assert aprfmt("logits", target, "--ids", IDS).code == 0


def test_diagnose_examines_what_others_refuse(
    demo_model: Path, lacking: Mapping[str, Path]
) -> None:
    done = aprfmt("diagnose", demo_model, lacking["gguf"], "--ids", IDS, "--json")
    assert (done.code, done.json["cause"]) == (1, "missing_bias")
    done = aprfmt("diagnose", lacking["apr"], lacking["gguf"], "--ids", IDS, "--json")
    said = [row["says"] for row in done.json["evidence"]]
    assert sum("lacks 12 of 50 tensors that its configuration demands" in s for s in said) == 2


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', "attn_q.bias", "[" * 2000])
def test_a_broken_record_is_one_line(text: str, demo_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "broken.gguf"
    convert(demo_model, target, metadata={RECORD: text}, complete=False, verify=False)
    done = aprfmt("logits", target, "--ids", IDS)
    assert done.code == 2 and RECORD in done.err and len(done.err.splitlines()) == 1
    assert aprfmt("inspect", target).code in (0, 2)
