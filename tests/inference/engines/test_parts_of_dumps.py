"""A dump in files whose names count them: all are read, or what is missing is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt as command

IDS = [5, 80, 300, 7, 900, 12, 44, 101]


@pytest.fixture(scope="module")
def halves(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the arrays of a run in two dicts, each with the token ids."""
    saved = tmp_path_factory.mktemp("parts") / "t.safetensors"
    asked = ("--points", "L0.out,L1.out,L2.out,logits", "--ids", ",".join(map(str, IDS)))
    assert command("trace", demo_model, "--payload", *asked, "-o", saved).code == 0
    held = load_file(saved)
    names = [name for name in held if name[0] in "Ll"]
    ids = {"input_ids": np.array([IDS])}
    return [ids | {name: held[name] for name in names[at::2]} for at in (0, 1)]


@pytest.mark.parametrize("name", [
    "dump_part{}of2.npz", "run-0000{}-of-00002.npz", "chunk_{}_of_2.safetensors",
])  # fmt: skip
@pytest.mark.parametrize("beside", [False, True])
def test_a_part_alone_names_the_others(
    name: str, beside: bool, halves: list[dict[str, Any]], demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: "precision", and nothing that was not compared."""
    for number, arrays in enumerate(halves[: 1 + beside], 1):
        save(tmp_path / name.format(number), arrays)
    done = command("diagnose", demo_model, tmp_path / name.format(1), "--json").json
    left = {row["name"]: row["why"] for row in done["not_compared"]}
    missing = name.format(2)
    assert missing in left and name.format(1) not in left
    assert ("give the folder" if beside else "is not there") in left[missing]


def test_parts_that_repeat_the_ids_are_one_run(
    halves: list[dict[str, Any]], demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: "holds no model, but captures of a run"."""
    for number, arrays in enumerate(halves, 1):
        save(tmp_path / f"part{number}of2.npz", arrays)
    done = command("diagnose", demo_model, tmp_path, "--json")
    assert done.code == 0, done.err
    assert not done.json["not_compared"]
    # The same arrays again, or other ids, are another run.
    save(tmp_path / "part2of2.npz", halves[0])
    assert command("diagnose", demo_model, tmp_path).code == 2
    save(tmp_path / "part2of2.npz", halves[1] | {"input_ids": np.array([IDS[::-1]])})
    assert command("diagnose", demo_model, tmp_path).code == 2


@pytest.mark.parametrize("name", ["top1of2.npz", "part3of2.npz", "part1of1.npz", "run.npz"])
def test_other_names_count_no_parts(
    name: str, halves: list[dict[str, Any]], demo_model: Path, tmp_path: Path
) -> None:
    save(tmp_path / name, halves[0] | halves[1])
    done = command("diagnose", demo_model, tmp_path / name, "--json")
    assert done.code == 0 and not done.json["not_compared"]


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays as the file's suffix says."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)
