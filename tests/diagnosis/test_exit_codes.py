"""`diff` and `diagnose` of one pair agree in what is established: one table of exit codes.

Seen red: a scale of an unknown name, bytes behind the last tensor, a method that is not decoded and
a model of zeros ended `diagnose` with 2 where `diff` said 1; a configuration that lost a key which
it cannot be read without was "equal", exit 0, for `diff`. Two models of other sizes, blocks or
weights were 2 for `diagnose`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aprfmt
from tests import approved
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.diagnosis.faults import FAULTS, FILES
from tests.diagnosis.table import answer

ANSWERS = Path(__file__).parent / "answers_of_diff"
Pair = tuple[Path, Path]
# name of a part of NF4 weights -> what stands beside it in the file under that name
PARTS = ("absmax", "quant_map", "quant_state.bitsandbytes__nf4")


def renamed_part(part: str, packed_reference: bool) -> Callable[[Path], Pair]:
    """A part of every packed weight has a name that no loader knows."""

    def make(folder: Path) -> Pair:
        llama_folder(folder / "a", "BF16", hidden=64, layers=2, ffn=96, heads=4, kv_heads=2)
        aprfmt.convert(folder / "a", folder / "good", encoding="NF4")
        shutil.copytree(folder / "good", folder / "b")
        rows = tensors_of(folder / "good")
        moved = {f"{name}_x" if name.endswith(f".{part}") else name: x for name, x in rows.items()}
        assert moved.keys() != rows.keys()
        write_mixed(folder / "b" / "model.safetensors", moved)
        return folder / ("good" if packed_reference else "a"), folder / "b"

    return make


def undecoded(also: bool) -> Callable[[Path], Pair]:
    """All layers are packed by a method that nothing here decodes; `also`: a norm differs too."""

    def make(folder: Path) -> Pair:
        llama_folder(folder / "a", "F32", hidden=64, layers=2, ffn=96, heads=4, kv_heads=2)
        shutil.copytree(folder / "a", folder / "b")
        rows = load_file(folder / "b" / "model.safetensors")
        for name in [name for name in rows if name.endswith("_proj.weight")]:
            stem, values = name.removesuffix("weight"), rows.pop(name)
            rows[f"{stem}W_q"] = np.zeros((values.shape[0] // 2, values.shape[1]), np.uint8)
            rows[f"{stem}meta_scale"] = np.ones((values.shape[0], 1), np.float16)
        if also:
            rows["model.norm.weight"][3] = 17
        save_file(rows, folder / "b" / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "b" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "hqq", "nbits": 4}
        (folder / "b" / "config.json").write_text(json.dumps(config))
        return folder / "a", folder / "b"

    return make


def surplus(folder: Path) -> Pair:
    """Bytes follow the last tensor."""
    llama_folder(folder / "a", "F32", hidden=64, layers=1, ffn=96, heads=4, kv_heads=2)
    shutil.copytree(folder / "a", folder / "b")
    with (folder / "b" / "model.safetensors").open("ab") as file:
        file.write(b"\x01" * 64)
    return folder / "a", folder / "b"


def without_layer_count(folder: Path) -> Pair:
    """A key that no configuration can be read without is lost."""
    llama_folder(folder / "a", "F32", hidden=64, layers=1, ffn=96, heads=4, kv_heads=2)
    shutil.copytree(folder / "a", folder / "b")
    config = json.loads((folder / "b" / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "b" / "config.json").write_text(json.dumps(config))
    return folder / "a", folder / "b"


PAIRS: dict[str, Callable[[Path], Pair]] = {
    **{f"part-{name}": renamed_part(name, False) for name in PARTS},
    **{f"part-{name}-of-packed": renamed_part(name, True) for name in PARTS},
    "undecoded-and-changed": undecoded(True),
    "surplus": surplus,
    "key-lost": without_layer_count,
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_established_difference_is_one_from_both_sides(name: str, tmp_path: Path) -> None:
    a, b = PAIRS[name](tmp_path)
    for pair in ((a, b), (b, a)):
        for asked in ("diff", "diagnose"):
            told = command(asked, *pair, "--json").json
            assert told["exit"] == 1, (asked, told["says"])
            assert told["causes"] or told["not_compared"], asked


def test_codes_that_nothing_decodes_leave_the_answer_open(tmp_path: Path) -> None:
    a, b = undecoded(False)(tmp_path)
    for pair in ((a, b), (b, a)):
        for asked in ("diff", "diagnose"):
            told = command(asked, *pair, "--json").json
            assert (told["exit"], told["causes"]) == (2, []), (asked, told["says"])
            assert len(told["not_compared"]) == 3 * 14  # weights, codes and scales of two layers


SIZES: dict[str, Any] = {"hidden": 64, "layers": 2, "ffn": 96, "heads": 4, "kv_heads": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": 128}, "layers": {"layers": 4}, "ffn": {"ffn": 128},
    "heads": {"heads": 8}, "kv-heads": {"kv_heads": 4}, "several": {"hidden": 32, "layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", [*OTHERS, "block", "weights"])
def test_two_models_are_a_difference(name: str, tmp_path: Path) -> None:
    """What cannot be compared because the models are seen to be other ones is established."""
    llama_folder(tmp_path / "a", "F32", **SIZES)
    a, b = tmp_path / "a", tmp_path / "b"
    if name in OTHERS:
        llama_folder(b, "F32", **{**SIZES, **OTHERS[name]})
    else:
        kind = "architecture" if name == "block" else "checkpoint"
        a, b = (Path(str(side)) for side in FAULTS[f"other-{kind}"].make())
    for pair in ((a, b), (b, a)):
        for asked in ("diff", "diagnose"):
            done = command(asked, *pair, "--json")
            assert (done.code, done.json["exit"]) == (1, 1), (asked, done.json["says"])
            assert done.json["pronounced"]["exit"] == 1
            assert "equal" != done.json["pronounced"]["word"] != "same"
        assert done.json["verdict"] in ("not_comparable", "bug")
        assert aprfmt.diagnose(*map(str, pair)).exit_code == 1


def test_bytes_of_no_tensor_are_taken_away(tmp_path: Path) -> None:
    a, b = surplus(tmp_path)
    found = aprfmt.diagnose(str(a), str(b))
    assert found.next == tuple(command("diff", a, b, "--json").json["next"])
    assert found.next[0].startswith("aprfmt repair ")
    assert not aprfmt.diagnose(str(b), str(a)).next  # A is not mended


@pytest.mark.parametrize("name", [fault.name for fault in FILES])
def test_exit_codes_of_seeded_faults_agree(name: str) -> None:
    """Equal bytes are the same model, and what is established by one command the other sees.

    `diagnose` may say "same" or "precision" of values that differ: it knows what they compute.
    """
    a, b = FAULTS[name].make()
    if not (Path(str(a)).exists() and Path(str(b)).exists()):
        pytest.skip("NOT-RUN: a run, which `diff` does not take")
    done, found = command("diff", a, b), answer(name).exit_code
    approved.check(ANSWERS / f"{name}.txt", done.out)
    assert (done.code, found) in {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}, answer(name).sentence
