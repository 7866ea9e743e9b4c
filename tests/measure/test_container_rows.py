"""Files with another container's names whose values are stored as their own container has them.

Seen red: `rope_pairing` in q and k, and a command that would reorder right rows; norms called 1 too
small.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.measure.container_rows import read_by_names_alone
from aprfmt.model import open_model
from tests.cli.run import aprfmt as command
from tests.model.relations.edits import edited, remedied, same
from tests.models import save_tiny

Stored = dict[str, Any]


def pair(arch: str, folder: Path, edit: Callable[[Stored, Stored], Stored]) -> tuple[Path, Path]:
    """Return (a tiny model's folder, a copy with llama.cpp's names and the values of `edit`).

    `edit` has {name in a GGUF: tensor}: the values of the folder, and those of its GGUF.
    """
    good, made = folder / "good", folder / "made.gguf"
    save_tiny(arch, good)
    assert command("convert", good, made, "--quiet").code == 0
    with open_model(good) as a, open_model(made) as b:
        called = {view.names[0]: b.roles[key].names[0] for key, view in a.roles.items()}

        def stored(held: Stored) -> Stored:
            as_gguf = {name: b[name].torch() for name in called.values()}
            return edit({called[name]: tensor for name, tensor in held.items()}, as_gguf)

        return good, edited(good, folder / "bad", stored)


@pytest.mark.parametrize("arch", ["llama", "gemma", "granite", "gpt2"])
def test_names_alone_are_the_cause_and_a_rename_mends_them(arch: str, tmp_path: Path) -> None:
    good, bad = pair(arch, tmp_path, lambda own, _: own)
    for a, b, side in ((good, bad, "B"), (bad, good, "A")):
        said = command("diagnose", a, b, "--json").json
        (cause,) = said["causes"]
        assert (cause["cause"], cause["level"]) == ("tensor_names", "confirmed")
        assert cause["says"].startswith(f"{side}: ")
        assert "are stored as those of Hugging Face are: only the names are wrong" in cause["says"]
        assert set(cause["where"]) == set(open_model(bad))
    report = aprfmt.diff(good, bad)
    assert report.counts["SAME_BYTES"] == len(report.tensors) and report.exit_code() == 1
    (relation,) = (one.relation for one in report.relations)
    assert relation.kind == "names" and "--rename" in relation.remedy
    same(good, remedied(relation.remedy, tmp_path / "mended"))


def read_kind(good: Path, bad: Path) -> str:
    """Return the kind of the one relation under which `bad` is read beside `good`."""
    with open_model(good) as a, open_model(bad) as b:
        made = read_by_names_alone(a, b)
        assert made[0] is a
        (relation,) = made[1].relations
        return relation.kind


@pytest.mark.parametrize("arch", ["llama", "gemma"])
def test_values_stored_as_the_names_say_stay_so(arch: str, tmp_path: Path) -> None:
    good, bad = pair(arch, tmp_path, lambda _, made: made)
    assert read_kind(good, bad) == "container"
    assert [one["cause"] for one in command("diagnose", good, bad, "--json").json["causes"]] == [
        "tensor_names"
    ]


def test_where_both_layouts_are_one_names_are_read_as_before(tmp_path: Path) -> None:
    good, bad = pair("qwen3", tmp_path, lambda own, _: own)
    assert read_kind(good, bad) == "container"


def test_rows_of_one_role_in_another_order_are_no_matter_of_names(tmp_path: Path) -> None:
    """Keys stand as the names say, queries do not: their rows are wrong."""
    good, bad = pair(
        "llama", tmp_path, lambda own, made: {k: (own if "attn_q" in k else made)[k] for k in made}
    )
    assert read_kind(good, bad) == "container"
    causes = [one["cause"] for one in command("diagnose", good, bad, "--json").json["causes"]]
    assert sorted(causes) == ["rope_pairing", "tensor_names"]


def test_another_fault_beside_the_names_is_named_too(tmp_path: Path) -> None:
    """It is looked for, and passes are run, under the layout that the values have."""

    def swapped(own: Stored, _: Stored) -> Stored:
        first, second = "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"
        return {**own, first: own[second], second: own[first]}

    good, bad = pair("llama", tmp_path, swapped)
    said = command("diagnose", good, bad, "--json").json
    assert sorted(one["cause"] for one in said["causes"]) == ["swapped_tensors", "tensor_names"]
    assert all(one["level"] == "confirmed" for one in said["causes"])


def test_another_model_decides_nothing(tmp_path: Path) -> None:
    _, bad = pair("llama", tmp_path, lambda own, _: own)
    save_tiny("llama", tmp_path / "other", seed=5)
    assert read_kind(tmp_path / "other", bad) == "container"
