"""An index that does not fit the shards beside it, and the one that `repair --index` makes.

Seen red: misplaced tensors called missing, a stale index called a missing shard, an extra file
passed over, a shard of a set missing while the index is made.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import aprfmt
from aprfmt.formats.safetensors.index_check import IndexFault, check_weight_map
from aprfmt.model import open_model
from tests.cli.run import aprfmt as command
from tests.conversion.folders import write_mixed

INDEX = "model.safetensors.index.json"
Edit = Callable[[Path, dict[str, str]], None]


def shard(number: int, count: int = 3) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


@pytest.fixture
def good(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model in three shards with their index."""
    folder = tmp_path / "good"
    shutil.copytree(demo_model, folder)
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(held)
    homes = {name: shard(min(i // 20, 2) + 1) for i, name in enumerate(names)}
    for number in (1, 2, 3):
        mine = {name: held[name] for name in names if homes[name] == shard(number)}
        save_file(mine, folder / shard(number), metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in held.values())
    index = {"metadata": {"total_size": total, "made_by": "x"}, "weight_map": homes}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def misplaced(folder: Path, homes: dict[str, str]) -> None:
    for name in [name for name in homes if homes[name] == shard(1)][:2]:
        homes[name] = shard(2)


def phantom(folder: Path, homes: dict[str, str]) -> None:
    homes["mtp.fc.weight"] = shard(3)


def forgotten(folder: Path, homes: dict[str, str]) -> None:
    del homes["model.norm.weight"]


def stale(folder: Path, homes: dict[str, str]) -> None:
    homes.update({name: shard(i % 30 + 1, 30) for i, name in enumerate(homes)})


def renamed(folder: Path, homes: dict[str, str]) -> None:
    homes.update({name: home.replace("of-00003", "of-00004") for name, home in homes.items()})


def everything_in_one(folder: Path, homes: dict[str, str]) -> None:
    homes.update(dict.fromkeys(homes, shard(1)))


def no_index(folder: Path, homes: dict[str, str]) -> None:
    homes.clear()  # `written` then writes none


def index_of_pickles(folder: Path, homes: dict[str, str]) -> None:
    pickled = {name: home.replace("safetensors", "bin") for name, home in homes.items()}
    index = {"metadata": {}, "weight_map": pickled}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    homes.clear()


FAULTS: dict[str, tuple[Edit, str]] = {
    "misplaced": (misplaced, "names another shard than the one that holds it for 2 tensors"),
    "phantom": (phantom, "names 1 tensor that no shard holds ('mtp.fc.weight'"),
    "forgotten": (forgotten, "does not name 1 tensor that its shards hold"),
    "stale": (stale, "none of the 30 shards it names is there"),
    "in one": (everything_in_one, "names another shard than the one that holds it for 30 tensors"),
    "renamed": (renamed, "none of the 3 shards it names is there"),
    "absent": (no_index, "the 3 shards of a whole set have no index"),
    "of pickles": (index_of_pickles, "the 3 shards of a whole set have no index"),
}


def written(good: Path, target: Path, edit: Edit) -> Path:
    shutil.copytree(good, target)
    index = json.loads((target / INDEX).read_text())
    edit(target, index["weight_map"])
    (target / INDEX).write_text(json.dumps(index))
    if not index["weight_map"]:
        (target / INDEX).unlink()
    return target


@pytest.mark.parametrize("label", FAULTS)
def test_a_wrong_index_is_one_finding_and_is_made_anew(
    label: str, good: Path, tmp_path: Path
) -> None:
    edit, says = FAULTS[label]
    bad = written(good, tmp_path / "bad", edit)
    with open_model(bad, damaged=True) as model:
        (relation,) = model.relations
        assert relation.kind == "index" and says in relation.says
        shown = relation.to_json()["examples"]
        assert isinstance(shown, list) and len(shown) <= 2 <= relation.count + 1
        for stored, read in shown:  # all that are kept are shown
            assert f"{stored} for {read}" in relation.examples_text
        assert len(model) == 50 and not model.damage and not model.resolution.missing
    report = aprfmt.diff(good, bad)
    assert (report.counts["SAME_BYTES"], report.exit_code()) == (50, 1)
    assert command("inspect", bad).code == 0
    failed = [r["name"] for r in command("validate", bad, "--json").json["checks"]
              if r["outcome"] == "FAIL"]  # fmt: skip
    assert failed == ["shards"]
    found = command("diagnose", good, bad, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["tensor_names"]
    refused = command("convert", bad, tmp_path / "x")
    assert refused.code == 2 and "repair --index" in refused.err
    assert command(*relation.remedy.split()[1:]).code == 0
    assert command("diagnose", good, bad, "--json").json["verdict"] == "same"
    assert aprfmt.diff(good, bad).equal
    made = json.loads((bad / INDEX).read_text())
    right = json.loads((good / INDEX).read_text())
    if edit in (no_index, index_of_pickles):
        del right["metadata"]["made_by"]  # which no old index says
    assert made == right


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.90.mlp.up_proj.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_a_tensor_lost_from_its_module_is_mended_by_no_index(
    name: str, lost: bool, tmp_path: Path
) -> None:
    """Seen red: an index made anew was the whole remedy, and the tensor was missing after it."""
    held = {"model.layers.1.mlp.down_proj.weight", "model.norm.weight"}
    faults: list[IndexFault] = []
    homes = dict.fromkeys([*held, name], shard(1))
    check_weight_map(tmp_path / INDEX, homes, {shard(1): held}, faults)
    (fault,) = faults
    assert fault.where == (name,) and fault.mended is not lost


@pytest.mark.parametrize("edit", [None, forgotten], ids=["files", "files and index"])
@pytest.mark.parametrize("numbers", [(2,), (1, 2, 3)], ids=["one", "all"])
def test_shards_of_other_names_are_told_by_what_they_hold(
    numbers: tuple[int, ...], edit: Edit | None, good: Path, tmp_path: Path
) -> None:
    """Seen red: `diff` said "only in B" with exit 1, `diagnose` "get the file again" with 2."""
    bad = written(good, tmp_path / "bad", edit or (lambda folder, homes: None))
    for number in numbers:  # a browser's second download
        (bad / shard(number)).rename(bad / f"{number} (1).safetensors")
    for asked in ("diff", "diagnose"):
        found = command(asked, good, bad, "--json").json
        assert (found["exit"], [one["cause"] for one in found["causes"]]) == (1, ["tensor_names"])
        assert not found["not_compared"]
        assert {shard(number) for number in numbers} <= set(found["causes"][0]["where"])
    refused = command("convert", bad, tmp_path / "x")
    assert refused.code == 2 and f"rename {numbers[0]} (1).safetensors" in refused.err
    moves = [shlex.split(one) for one in found["causes"][0]["remedy"]["command"].split(" && ")]
    for words in moves[: len(numbers)]:
        subprocess.run(words, check=True)
    assert len(moves) == len(numbers) + (edit is not None)
    assert edit is None or command(*moves[-1][1:]).code == 0
    assert aprfmt.diff(good, bad).equal and command("validate", bad).code == 0


def test_a_file_that_may_be_another_shard_is_not_taken(good: Path, tmp_path: Path) -> None:
    """Neither one of other tensors, nor one of two copies: which is right is not known."""
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    (bad / shard(2)).unlink()
    for names in (["x"], ["y", "z"]):
        for name in names:
            part = load_file(good / shard(2))
            held = dict(list(part.items())[1:]) if name == "x" else part
            save_file(held, bad / f"{name}.safetensors")
        for asked in ("diff", "diagnose"):
            found = command(asked, good, bad, "--json").json
            assert (found["exit"], found["causes"]) == (1, [])
            left = {one["name"] for one in found["not_compared"] if one["kind"] == "file"}
            assert {f"{name}.safetensors" for name in names} <= left


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("change", [0.0, 0.5])
def test_tensors_in_two_shards_are_named_and_the_rest_is_compared(
    change: float, number: int, good: Path, tmp_path: Path
) -> None:
    """Stale copies before or behind the shard that the index names: its own copy is compared."""
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    own = load_file(good / shard(2))
    stale = {name: own[name] + change for name in list(own)[:3]}
    held = load_file(bad / shard(number))
    save_file(held | stale, bad / shard(number), metadata={"format": "pt"})
    with open_model(bad, damaged=True) as model:
        (relation,) = model.relations
    assert set(relation.where) == set(stale) and "and 2 more stand in" in relation.says
    assert f"the index names {shard(2)}" in relation.says
    assert f"remove the copies from {shard(number)}" in relation.says
    assert ("3 of them differ" if change else "the copies are equal") in relation.says
    report = aprfmt.diff(good, bad)
    assert (report.counts["SAME_BYTES"], report.exit_code()) == (50, 1)
    refused = command("convert", bad, tmp_path / "x")
    assert refused.code == 2 and "and 2 more stand in" in refused.err
    # The printed command writes the shards without the copies.
    assert relation.remedy == f"aprfmt repair {bad} --by-index -o bad-fixed"
    said = command("validate", bad, "--format", "agent").out
    assert said.splitlines()[-1] == f"next: {relation.remedy}"
    fixed = tmp_path / "bad-fixed"
    words = relation.remedy.split()[1:-1]
    done = command(*words, fixed, "--json")
    assert done.code == 0 and done.json["removed"] == {shard(number): sorted(stale)}
    assert load_file(fixed / shard(number)).keys() == load_file(good / shard(number)).keys()
    assert command("diff", good, fixed).code == 0 and command("validate", fixed).code == 0
    names = [{each.name for each in one.iterdir() if each.is_file()} for one in (fixed, good)]
    assert names[0] == names[1]
    again = command(*words, fixed)
    assert again.code == 2 and "exists" in again.err


def test_shards_that_fit_are_not_written_anew(good: Path, tmp_path: Path) -> None:
    """Nothing to do, a tensor that its shard has not, the folder itself: nothing is written."""
    out = tmp_path / "out"
    done = command("repair", good, "--by-index", "-o", out)
    assert done.code == 2 and "nothing to do" in done.err and not out.exists()
    assert command("repair", good, "--by-index", "-o", good).code == 2
    assert "name the folder" in command("repair", good, "--by-index").err
    homes = json.loads((good / INDEX).read_text())
    misplaced(good, homes["weight_map"])
    (good / INDEX).write_text(json.dumps(homes))
    done = command("repair", good, "--by-index", "-o", out)
    assert done.code == 2 and "is not in" in done.err and not out.exists()
    bare = tmp_path / "bare"
    bare.mkdir()
    assert (
        "has no model.safetensors.index.json"
        in command("repair", bare, "--by-index", "-o", out).err
    )


def test_a_shard_that_the_index_does_not_name_is_left_out(good: Path, tmp_path: Path) -> None:
    extra = good / "model-mtp-of-00003.safetensors"
    save_file({"mtp.fc.weight": torch.ones(2)}, extra)
    save_file({"x.lora": torch.ones(2)}, good / "adapter_model.safetensors")
    done = command("repair", good, "--by-index", "-o", tmp_path / "out", "--json")
    assert done.json["left_out"] == [extra.name] and done.json["removed"] == {}
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    with open_model(tmp_path / "out") as model:
        assert not model.relations and "mtp.fc.weight" not in model


def test_a_shard_in_another_writers_order_is_written_anew(tmp_path: Path) -> None:
    """Its tensors lie as no writer of ours puts them; a subfolder is said to be left out.

    Seen red: "tensors have to be written in the order" of a shard with types mixed.
    """
    bad = tmp_path / "bad"
    (bad / "1_Pooling").mkdir(parents=True)
    raw = np.arange(8, dtype=np.float32).tobytes()
    first = {"a": ("BF16", (2, 2), raw[:8]), "b": ("F32", (2,), raw[:8])}
    write_mixed(bad / "one.safetensors", first)
    second = {"b": ("F32", (2,), raw[8:16]), "a2": first["a"], "c": first["b"]}
    write_mixed(bad / "two.safetensors", second)
    homes = {"a": "one.safetensors"} | dict.fromkeys(second, "two.safetensors")
    (bad / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    done = command("repair", bad, "--by-index", "-o", tmp_path / "out", "--json")
    assert done.json["removed"] == {"one.safetensors": ["b"]}
    assert done.json["left_out"] == ["1_Pooling"]
    assert load_file(tmp_path / "out" / "one.safetensors").keys() == {"a"}
    assert load_file(tmp_path / "out" / "two.safetensors")["b"].tolist() == [2.0, 3.0]
    (bad / INDEX).rename(bad / "pytorch_model.bin.index.json")
    refused = command("repair", bad / "pytorch_model.bin.index.json", "--by-index", "-o", "x")
    assert refused.code == 2 and "has no model.safetensors.index.json" in refused.err


def test_a_file_that_no_index_names_is_said(good: Path, tmp_path: Path) -> None:
    extra = good / "model-mtp-of-00003.safetensors"
    save_file({"mtp.fc.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}, extra)
    with open_model(good, damaged=True) as model:
        (relation,) = model.relations
        assert (
            relation.where == ("mtp.fc.weight", "mtp.norm.weight") and extra.name in relation.says
        )
    assert command("validate", good).code == 1
    assert extra.name in command("convert", good, tmp_path / "x").err
    assert command("repair", "--index", good, "--json").json["index"]["tensors"] == 52
    with open_model(good) as model:
        assert "mtp.fc.weight" in model and not model.relations


def test_copies_and_strangers_beside_a_set_are_innocent(good: Path, demo_model: Path) -> None:
    shutil.copy(demo_model / "model.safetensors", good / "model.safetensors")
    save_file({"x.lora": torch.ones(2)}, good / "adapter_model.safetensors")
    with open_model(good, damaged=True) as model:
        assert model.relations == ()


@pytest.mark.parametrize("left", [0, 1], ids=["no shard", "one shard"])
def test_a_whole_file_beside_a_stale_index_is_read(
    left: int, good: Path, demo_model: Path, tmp_path: Path
) -> None:
    """It is said what loads what: transformers takes the single file, whatever the index says.

    https://github.com/ml-explore/mlx-swift-lm/pull/562. Seen red: "get them".
    """
    shutil.copy(demo_model / "model.safetensors", good / "model.safetensors")
    for number in (1, 2, 3)[left:]:
        (good / shard(number)).unlink()
    transformers = pytest.importorskip("transformers")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(good, output_loading_info=True)
    assert not info["missing_keys"]
    found = command("diagnose", demo_model, good, "--json").json
    assert (found["verdict"], [one["cause"] for one in found["causes"]]) == (
        "bug",
        ["tensor_names"],
    )
    says = found["causes"][0]["says"]
    assert "the index is stale" in says and "transformers" in says and "vLLM" in says
    checks = command("validate", good, "--json").json["checks"]
    (failed,) = [row for row in checks if row["outcome"] == "FAIL"]
    assert failed["name"] == "shards" and "get" not in failed["todo"]
    refused = command("convert", good, tmp_path / "x")
    assert refused.code == 2 and "the index is stale" in refused.err
    repaired = command("repair", "--index", good)
    assert (repaired.code == 0) is not left
    if not left:
        assert set(json.loads((good / INDEX).read_text())["weight_map"].values()) == {
            "model.safetensors"
        }
        for question in ("validate", "inspect"):
            assert command(question, good).code == 0
        assert command("diagnose", demo_model, good, "--json").json["verdict"] == "same"


def test_a_pickled_file_beside_a_stale_index_is_named(good: Path) -> None:
    held = {name: tensor for n in (1, 2, 3) for name, tensor in load_file(good / shard(n)).items()}
    for path in good.glob("model*"):
        path.unlink()
    torch.save(held, good / "pytorch_model.bin")
    homes = dict.fromkeys(held, "pytorch_model-00001-of-00001.bin")
    (good / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))
    refused = command("inspect", good)
    assert refused.code == 2 and "name that file, or take the index away" in refused.err
    assert command("inspect", good / "pytorch_model.bin").code == 0


def test_what_validate_prints_mends_several_faults_at_once(good: Path) -> None:
    """Seen red: "get all files of one set" for a file of no set, and a command that exits 2."""
    index = json.loads((good / INDEX).read_text())
    for edit in (misplaced, phantom, forgotten):
        edit(good, index["weight_map"])
    index["weight_map"]["model.layers.9.up.weight"] = shard(9, 9)
    (good / INDEX).write_text(json.dumps(index))
    done = command("validate", good)
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if line.startswith("next: ")]
    assert line == f"next: aprfmt repair --index {good}"
    assert command(*line.split()[2:]).code == 0
    assert command("validate", good).code == 0
    (good / shard(3)).unlink()  # what is lost is in no index that could be made
    lost = command("validate", good)
    assert lost.code == 1 and "next: " not in lost.out and "get all files of one set" in lost.out


def test_an_index_hides_no_missing_shard(good: Path) -> None:
    before = (good / INDEX).read_bytes()
    (good / shard(2)).unlink()
    done = command("repair", "--index", good)
    assert done.code == 2 and "shard 2 of 3 is missing" in done.err
    assert (good / INDEX).read_bytes() == before


def test_an_index_is_not_made_of_two_models(good: Path) -> None:
    shutil.copy(good / shard(1), good / "model-copy.safetensors")
    done: Any = command("repair", "--index", good)
    assert done.code == 2 and "stands in" in done.err


@pytest.mark.parametrize(
    "words", [("--partial",), ("--from", "x"), ("--manifest", "x"), ("--compare",)]
)
def test_an_index_is_made_from_shards_alone(words: tuple[str, ...], good: Path) -> None:
    assert command("repair", "--index", good, *words).code == 2


def test_a_folder_without_shards_is_refused(demo_model: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_model, tmp_path / "one")
    done = command("repair", "--index", tmp_path / "one")
    assert done.code == 2 and "holds no shards" in done.err
    done = command("repair", "--index", tmp_path / "nowhere")
    assert done.code == 2 and "no such" in done.err


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_that_the_index_names_is_not_to_be_taken_away(indexed: bool, good: Path) -> None:
    """Seen red: the advice was to take away a file with twenty tensors of the model."""
    home = json.loads((good / INDEX).read_text())["weight_map"]
    name = next(key for key, file in home.items() if file == shard(2))
    held = load_file(good / shard(1))
    save_file(held | {name: load_file(good / shard(2))[name] + 1}, good / shard(1))
    if not indexed:
        (good / INDEX).unlink()
    done = command("repair", "--index", good)
    assert done.code == 2
    away = "take the file away" in done.err
    kept = f"the index names {shard(2)}, and {shard(1)} for other tensors" in done.err
    assert (away, kept) == (not indexed, indexed), done.err
