"""What `diff` and `diagnose` say where a comparison ends early: one exit code, and a way on.

Seen red: equal zeros, and equal files of an unknown architecture, were 2 for `diagnose` and 0 for
`diff`; `diagnose` printed no next command for anything not comparable, and said that no command
mends a B for which `diff` had one; a missing shard ended `diff`; a tokenizer of A that cannot be
read sent to B; a cut file was not completed from the good one.
"""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.diagnosis.controls import PAIRS
from tests.diagnosis.faults import FAULTS

Pair = tuple[Path, Path]
SIZES: dict[str, Any] = {"hidden": 64, "layers": 2, "ffn": 96, "heads": 4, "kv_heads": 2}
WEIGHTS = "model.safetensors"


def zeros(a: Path, b: Path) -> None:
    for side in (a, b):
        rows = load_file(side / WEIGHTS)
        save_file({name: np.zeros_like(row) for name, row in rows.items()}, side / WEIGHTS)


def config(side: Path, **changes: object) -> None:
    path = side / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def unknown(a: Path, b: Path) -> None:
    for side in (a, b):
        config(side, model_type="weird", architectures=["WeirdForCausalLM"])


def unknown_b(a: Path, b: Path) -> None:
    config(b, model_type="weird", architectures=["WeirdForCausalLM"])


def cut(a: Path, b: Path) -> None:
    (b / WEIGHTS).write_bytes((b / WEIGHTS).read_bytes()[:-3000])


def cut_and_key(a: Path, b: Path) -> None:
    cut(a, b)
    config(b, unheard_of=3)


def in_shards(side: Path) -> None:
    rows = tensors_of(side)
    (side / WEIGHTS).unlink()
    homes = {}
    for i in range(2):
        home = f"model-0000{i + 1}-of-00002.safetensors"
        part = {name: rows[name] for name in list(rows)[i::2]}
        write_mixed(side / home, part)
        homes.update(dict.fromkeys(part, home))
    (side / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def missing_shard(a: Path, b: Path) -> None:
    in_shards(a)
    in_shards(b)
    (b / "model-00002-of-00002.safetensors").unlink()


def zero_shard(a: Path, b: Path) -> None:
    missing_shard(a, b)
    (b / "model-00002-of-00002.safetensors").write_bytes(bytes(5000))


def broken(name: str) -> Callable[[Path, Path], None]:
    def harm(a: Path, b: Path) -> None:
        (b / name).write_text("{oops")

    return harm


# What is done to a copy, the exit code of both commands, and what the next command begins with.
ENDS: dict[str, tuple[Callable[[Path, Path], None], int, str]] = {
    "zeros": (zeros, 0, ""),
    "unknown": (unknown, 0, ""),
    "unknown-b": (unknown_b, 1, "aprfmt set B"),
    "cut": (cut, 2, "aprfmt repair B/model.safetensors --from A/model.safetensors"),
    "cut-and-key": (cut_and_key, 1, "aprfmt set B --remove config.json:unheard_of"),
    "missing-shard": (missing_shard, 2, "aprfmt validate B"),
    "zero-shard": (zero_shard, 2, "aprfmt validate B"),
    "tokenizer": (broken("tokenizer.json"), 2, "aprfmt inspect B"),
    "generation": (broken("generation_config.json"), 2, "aprfmt inspect B"),
}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    llama_folder(tmp_path / "A", "F32", **SIZES)
    (tmp_path / "A" / "generation_config.json").write_text('{"eos_token_id": 2}')
    shutil.copytree(tmp_path / "A", tmp_path / "B")
    return tmp_path / "A", tmp_path / "B"


@pytest.mark.parametrize("name", ENDS)
def test_both_commands_end_alike_and_lead_on(name: str, pair: Pair) -> None:
    (a, b), (harm, code, begin) = pair, ENDS[name]
    harm(a, b)
    for asked in ("diff", "diagnose"):
        done = command(asked, a, b)
        assert done.code == code, done.out + done.err
        assert len(done.out.splitlines()) <= 12
        told = done.out.replace(f"{a.parent}/", "")
        assert f"next: {begin}" in told if begin else "next:" not in told, told
        assert "no command mends" not in told
        turned = command(asked, b, a)  # what cannot be read is asked for where it stands
        assert turned.code == code
        if begin.startswith("aprfmt inspect"):
            assert f"next: {begin}" in turned.out.replace(f"{a.parent}/", "")


def copied_layer(rows: dict[str, Any]) -> None:
    for name in rows:
        if ".layers.0." in name:
            rows[name.replace(".0.", ".1.")] = rows[name]


def damaged_value(rows: dict[str, Any]) -> None:
    rows[UP].view(np.uint32)[5, 7] ^= 3 << 22


def zeroed_rows(rows: dict[str, Any]) -> None:
    rows[UP][3:5] = 0


UP = "model.layers.1.mlp.up_proj.weight"
# What is done to B's tensors, the cause, how the name of each place begins, what is said of it.
PLACES: dict[str, tuple[Callable[[dict[str, Any]], None], str, str, str]] = {
    "layer": (copied_layer, "layer_order", "model.layers.1.", "layer 1 of B is a copy of layer 0"),
    "value": (damaged_value, "bit_rot", UP, "at [5, 7] ("),
    "rows": (zeroed_rows, "bit_rot", UP, ": rows 3-4"),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_are_the_damaged_ones_down_to_the_row(name: str, pair: Pair) -> None:
    """Seen red: the sound layer of a copy among the places, and damage without row or element."""
    harm, cause, begin, says = PLACES[name]
    rows = {key: row.copy() for key, row in load_file(pair[1] / WEIGHTS).items()}
    harm(rows)
    save_file(rows, pair[1] / WEIGHTS)
    for asked in ("diff", "diagnose"):
        (found,) = command(asked, *pair, "--json").json["causes"]
        assert found["cause"] == cause and says in found["says"]
        assert found["where"] and all(place.startswith(begin) for place in found["where"])


def test_zeros_are_said(pair: Pair) -> None:
    zeros(*pair)
    assert "all values of A and B are zero" in command("diagnose", *pair).out
    config(pair[1], rms_norm_eps=0.5)
    for asked in ("diff", "diagnose"):
        assert command(asked, *pair).code == 1


def test_a_budget_holds_for_zeros(pair: Pair) -> None:
    """Seen red: all of a file of zeros was read, whatever the budget."""
    rows = load_file(pair[1] / WEIGHTS)
    save_file({name: np.zeros_like(row) for name, row in rows.items()}, pair[1] / WEIGHTS)
    whole, part = (command("diagnose", *pair, *more) for more in ((), ("--budget", "10K")))
    assert whole.code == 1 and "all values of B are zero" in whole.out
    assert "all values" not in part.out and "left by the budget" in part.out


def test_a_cut_file_is_completed_from_the_good_one(pair: Pair) -> None:
    cut(*pair)
    for asked in ("diff", "diagnose"):
        (told,) = command(asked, *pair, "--json").json["next"]
        assert command(*shlex.split(told)[1:]).code == 0
        assert (pair[0] / WEIGHTS).read_bytes() == (pair[1] / WEIGHTS).read_bytes()
        cut(*pair)
    rows = dict(load_file(pair[0] / WEIGHTS))
    rows["lm_head.weight"] = rows["lm_head.weight"] * 2
    save_file(rows, pair[0] / WEIGHTS)  # another model's file completes nothing
    assert "repair" not in str(command("diff", *pair, "--json").json["next"])


OPEN = [one.name for one in PAIRS if one.verdict == "not_comparable"]


@pytest.mark.parametrize("name", OPEN)
def test_what_cannot_be_compared_leads_on(name: str) -> None:
    done = command("diagnose", *FAULTS[name].make())
    assert "next: aprfmt " in done.out and len(done.out.splitlines()) <= 12, done.out
    assert done.code == (1 if name.startswith("other-") and name != "other-ids" else 2)
